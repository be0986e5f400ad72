"""Which operator multiplies and sums in row-parallel layers: what ``comm`` means for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_fused.auto_choice import fused_is_faster
from dlrm_fused.config import Comm, Config
from dlrm_fused.models.choice import compute_dtype, reachable_memory
from dlrm_fused.models.tensor_parallel import RowParallelProduct
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace

# A block's feed-forward layer is so many times as wide as d_model.
FEED_FORWARD_FACTOR = 4
# Rows (tokens) of one fused call at most: few enough for their memory to be small beside that of activations. What is above
# goes in several calls, whose results are copied together.
_MAX_ROWS = 32_768


def choose_product(config: Config, group: dist.ProcessGroup | None, tokens: int, device: torch.device) -> RowParallelProduct:
    """The product of ``config.comm`` for the model's row-parallel layers. Collective over the group.

    With ``auto``, both ways are measured: the two products of a block, forward, with the rows of a training batch.

    Args:
        group: ranks that share the layers; None for this rank alone, where there is nothing to sum.
        tokens: T, of a sample.

    Raises:
        UsageError: on all ranks, with ``comm_strict``, if they cannot reach each other's memory.
        CommunicationError: on all ranks, if one of them has too little memory left.
    """
    if group is None:
        return RowParallelProduct()
    rows = [
        group.size() * -(-samples // dist.get_world_size()) * tokens
        for samples in (config.training.global_batch_size, config.evaluation.global_batch_size)
    ]
    width = config.model.d_model
    fused = fused_product(config, group, device, "row-parallel layers", width, min(max(rows), _MAX_ROWS))
    if fused.workspace is None or config.comm is Comm.fused:
        return fused
    baseline = RowParallelProduct(group)
    is_faster = fused_is_faster(
        _products_of_a_block(fused, config, rows[0], device),
        _products_of_a_block(baseline, config, rows[0], device),
        group,
        device,
        work=f"row-parallel layers of {rows[0]} rows",
        unfused_name="product and all-reduce",
    )
    return fused if is_faster else baseline


def fused_product(
    config: Config, group: dist.ProcessGroup | None, device: torch.device, name: str, max_columns: int, max_rows: int
) -> RowParallelProduct:
    """Products and sums in one operator, in the dtype of ``training.precision``. Collective over the group.

    Without a workspace where there is nothing to sum, with ``comm=baseline``, and if ranks cannot reach each other's memory.

    Args:
        name, max_columns, max_rows: of the workspace.

    Raises:
        UsageError, CommunicationError: as :func:`choose_product`.
    """
    if group is None or group.size() == 1 or config.comm is Comm.baseline:
        return RowParallelProduct(group)
    ranks = reachable_memory(config, group, device, "tensor-parallel layers")
    if ranks is None:
        return RowParallelProduct(group)
    dtype = compute_dtype(config)
    workspace = GemvWorkspace(
        ranks,
        name=name,
        max_columns=max_columns,
        dtype=dtype,
        max_rows=max_rows,
        # Times differ from run to run, and with schedules the rounding: comm=fused is to give the same bits in every run.
        measures_schedules=config.comm is Comm.auto,
    )
    return RowParallelProduct(group, workspace)


def _products_of_a_block(product: RowParallelProduct, config: Config, rows: int, device: torch.device) -> Callable[[], None]:
    """What makes the two products of a block. Collective."""
    assert product.group is not None
    width, dtype = config.model.d_model, compute_dtype(config)
    depths = [width // product.group.size(), FEED_FORWARD_FACTOR * width // product.group.size()]
    inputs = [torch.ones(rows, depth, dtype=dtype, device=device) for depth in depths]
    weights = [torch.ones(width, depth, dtype=dtype, device=device) for depth in depths]
    residual, norm_weight = torch.ones(rows, width, dtype=dtype, device=device), torch.ones(width, dtype=dtype, device=device)

    @torch.no_grad()
    def multiply() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            product(x, weight, residual, norm_weight)

    return multiply
