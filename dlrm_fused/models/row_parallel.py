"""Which operator multiplies and sums in row-parallel layers: what ``comm`` means for them."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

from dlrm_fused.config import Comm, Config, Precision
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.models.tensor_parallel import RowParallelProduct
from dlrm_fused.ops.gemv_all_reduce import GemvExchange
from dlrm_fused.symmetric import symmetric_group

logger = logging.getLogger("dlrm_fused")

# A block's feed-forward layer is so many times as wide as d_model.
FEED_FORWARD_FACTOR = 4
# Rows (tokens) of one fused call: enough to be fast, few enough for their memory to be small beside that of activations.
_MOST_ROWS = 16_384
_WARMUP_RUNS, _MEASURED_RUNS = 3, 10


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
    chosen = fused_product(config, group, device, "row-parallel layers", width, min(max(rows), _MOST_ROWS))
    if chosen.exchange is None or config.comm is Comm.fused:
        return chosen
    fused, baseline, dtype = chosen, RowParallelProduct(group), chosen.exchange.dtype
    own, other = _slowest_rank(
        [_seconds(product, config, rows[0], dtype, device) for product in (fused, baseline)], group, device
    )
    logger.info(
        "comm=auto, row-parallel layers of %d rows: fused %.3f ms, product and all-reduce %.3f ms: %s",
        rows[0],
        own * 1e3,
        other * 1e3,
        "fused" if own < other else "product and all-reduce",
    )
    return fused if own < other else baseline


def fused_product(
    config: Config, group: dist.ProcessGroup | None, device: torch.device, name: str, max_columns: int, max_rows: int
) -> RowParallelProduct:
    """Products and sums in one operator, in the dtype of ``training.precision``. Collective over the group.

    Without an exchange where there is nothing to sum, with ``comm=baseline``, and if ranks cannot reach each other's memory.

    Args:
        name, max_columns, max_rows: of the exchange.

    Raises:
        UsageError, CommunicationError: as :func:`choose_product`.
    """
    if group is None or group.size() == 1 or config.comm is Comm.baseline:
        return RowParallelProduct(group)
    try:
        ranks = symmetric_group(group, device)
    except CommunicationError as error:  # raised by all ranks
        if config.comm_strict:
            raise UsageError(f"comm_strict=true: tensor-parallel layers without fused communication: {error}") from None
        logger.warning("tensor-parallel layers run without fused communication: %s", error)
        return RowParallelProduct(group)
    dtype = torch.bfloat16 if config.training.precision is Precision.bf16 else torch.float32
    return RowParallelProduct(group, GemvExchange(ranks, name=name, max_columns=max_columns, dtype=dtype, max_rows=max_rows))


def _seconds(product: RowParallelProduct, config: Config, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Mean time of the two products of a block. Collective."""
    assert product.group is not None
    width = config.model.d_model
    depths = [width // product.group.size(), FEED_FORWARD_FACTOR * width // product.group.size()]
    inputs = [torch.ones(rows, depth, dtype=dtype, device=device) for depth in depths]
    weights = [torch.ones(width, depth, dtype=dtype, device=device) for depth in depths]
    residual, norm_weight = torch.ones(rows, width, dtype=dtype, device=device), torch.ones(width, dtype=dtype, device=device)
    with torch.no_grad():
        for run in range(_WARMUP_RUNS + _MEASURED_RUNS):
            if run == _WARMUP_RUNS:
                _synchronize(device)
                begin = time.perf_counter()
            for x, weight in zip(inputs, weights, strict=True):
                product(x, weight, residual, norm_weight)
    _synchronize(device)
    return (time.perf_counter() - begin) / _MEASURED_RUNS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest_rank(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return [float(time) for time in times]
