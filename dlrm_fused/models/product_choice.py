"""The choice of operators that multiply and communicate in tensor-parallel layers, by ``comm``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.auto_choice import measure_both
from dlrm_fused.config import Comm, Config, ModelKind
from dlrm_fused.models.fused_communication import compute_dtype, reachable_memory
from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace
from dlrm_fused.ops.common.matrix_workspace import ROW_BYTES
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace

# A block's feed-forward layer is so many times as wide as d_model.
FEED_FORWARD_FACTOR = 4
# Columns of a column-parallel weight of a block, and depth of the row-parallel one behind it, in d_model: attention makes one
# result of several.
_PAIRS = {
    ModelKind.transformer: [(3, 1), (FEED_FORWARD_FACTOR, FEED_FORWARD_FACTOR)],
    ModelKind.hstu: [(4, 1)],
}
# Rows (tokens) of one fused call at most, whose memory is 0.5 GB with 1,024 columns of 16 bits. What is above goes in several
# calls, whose results are copied together.
_MAX_ROWS = 65_536


def choose_product(config: Config, group: dist.ProcessGroup | None, tokens: int, device: torch.device) -> LayerProducts:
    """Return the product of ``config.comm`` for the model's row-parallel layers. Collective over the group.

    With ``auto``, all ways are measured: the products of a block, forward and backward, with the rows of a training batch. That
    in which each rank has its own rows between layers is among them on GPUs of one host.

    Args:
        group: ranks that share the layers; None for this rank alone, where there is nothing to sum.
        tokens: T, of a sample.

    Raises:
        UsageError: on all ranks, with ``comm_strict``, if they cannot reach each other's memory.
        CommunicationError: on all ranks, if one of them has too little memory left.
    """
    if group is None:
        return LayerProducts()
    rows = [
        group.size() * -(-samples // dist.get_world_size()) * tokens
        for samples in (config.training.global_batch_size, config.evaluation.global_batch_size)
    ]
    width = config.model.d_model
    fused = fused_product(config, group, device, "row-parallel layers", width, min(max(rows), _MAX_ROWS))
    if fused.workspace is None or config.comm is Comm.fused:
        return fused

    def is_faster(way: LayerProducts, other: LayerProducts, work: str, other_name: str) -> bool:
        step, other_step = (_products_of_a_block(products, config, rows[0], device) for products in (way, other))
        return measure_both(step, other_step, group, device, work=work, unfused_name=other_name).fused_is_faster

    baseline = LayerProducts(group)
    is_fused = is_faster(fused, baseline, f"row-parallel layers of {rows[0]} rows", "product and all-reduce")
    whole = fused if is_fused else baseline
    sharded = _sharded_products(fused, config, min(max(rows), _MAX_ROWS))
    if sharded is None:
        return whole
    if is_faster(sharded, whole, f"layers of {rows[0]} rows, each rank with its own between them", "all ranks with all rows"):
        return sharded
    assert sharded.shards is not None
    sharded.shards.release()
    return whole


def _sharded_products(fused: LayerProducts, config: Config, max_rows: int) -> LayerProducts | None:
    """Return sequence parallelism's products over the ranks of ``fused``; None without GPUs that reach each other's memory.
    Collective over the group."""
    assert fused.workspace is not None
    ranks, width, dtype = fused.workspace.group, config.model.d_model, compute_dtype(config)
    fits = width // ranks.world_size * dtype.itemsize % ROW_BYTES == 0
    if ranks.device.type != "cuda" or ranks.hosts.are_many or not fits:
        return None
    max_rows -= max_rows % ranks.world_size
    return LayerProducts(
        fused.group,
        shards=ShardWorkspace(ranks, name="tensor-parallel layers", max_rows=max_rows, max_columns=width, dtype=dtype),
    )


def fused_product(
    config: Config, group: dist.ProcessGroup | None, device: torch.device, name: str, max_columns: int, max_rows: int
) -> LayerProducts:
    """Products and sums in one operator, in the dtype of ``training.precision``. Collective over the group.

    Without a workspace where there is nothing to sum, with ``comm=baseline``, and if ranks cannot reach each other's memory.

    Args:
        name, max_columns, max_rows: of the workspace.

    Raises:
        UsageError, CommunicationError: as :func:`choose_product`.
    """
    if group is None or group.size() == 1 or config.comm is Comm.baseline:
        return LayerProducts(group)
    ranks = reachable_memory(config, group, device, "tensor-parallel layers")
    if ranks is None:
        return LayerProducts(group)
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
    return LayerProducts(group, workspace)


def _products_of_a_block(product: LayerProducts, config: Config, rows: int, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the products of a block and their gradients. Collective."""
    assert product.group is not None
    width, dtype, ranks = config.model.d_model, compute_dtype(config), product.group.size()

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)

    norm_weight, between = ones(width), ones(rows // ranks if product.shards else rows, width)
    of_rank = width // ranks
    weights = [(ones(columns * of_rank, width), ones(width, depth * of_rank)) for columns, depth in _PAIRS[config.model.kind]]

    @torch.enable_grad()  # also where the model is only to be evaluated
    def train() -> None:
        for into, out_of in weights:
            result = product(product.columns(between, into)[:, : out_of.shape[1]], out_of, between, norm_weight)
            torch.autograd.grad(result, (between, into, out_of), [torch.ones_like(part) for part in result])

    return train
