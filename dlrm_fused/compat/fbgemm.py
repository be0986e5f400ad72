"""Undocumented attributes of FBGEMM's lookup (table batched embeddings, TBE), 1.6 and 1.8."""

from __future__ import annotations

from typing import NamedTuple, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor


class Storage(NamedTuple):
    """Where the tables of a lookup lie; the tensors are the live ones.

    Attributes:
        weights: all tables, one after the other, flat.
        offsets: of each table in ``weights``, in elements.
        rows, dims: of each table.
        momentum: the first state of the optimizer of all tables, flat; None if it has none.
    """

    weights: Tensor
    offsets: tuple[int, ...]
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    momentum: Tensor | None


def storage(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> Storage:
    """The tables of a lookup, in place, so that another kernel reads and updates what checkpoints hold."""
    place = "host" if lookup.use_cpu else "dev"
    momentum = getattr(lookup, f"momentum1_{place}", None)
    return Storage(
        weights=getattr(lookup, f"weights_{place}").detach(),
        offsets=tuple(lookup.weights_physical_offsets),
        rows=tuple(rows for rows, *_ in lookup.embedding_specs),
        dims=tuple(dim for _, dim, *_ in lookup.embedding_specs),
        momentum=None if momentum is None else momentum.detach(),
    )


def step_counts(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> tuple[Tensor, Tensor]:
    """The steps that the optimizer of a lookup has made, [1] each; the live ones, on the device and on the CPU.

    FBGEMM counts forward passes, those without a backward pass too.
    """
    return cast(Tensor, lookup.iter), lookup.iter_cpu


def kernel_inputs(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, weights: Tensor | None, checks_bounds: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and weights of samples as FBGEMM hands them to its kernels.

    Args:
        checks_bounds: FBGEMM replaces wrong indices by 0, as the lookup's ``bounds_check_mode`` says; false keeps them.
    """
    mode, version = lookup.bounds_check_mode_int, lookup.bounds_check_version
    if not checks_bounds:
        lookup.bounds_check_mode_int = BoundsCheckMode.NONE.value
    # Of FBGEMM's two kernels for the same check, the faster one: see docs/performance/training.md.
    lookup.bounds_check_version = 2
    try:
        indices, offsets, weights, _ = lookup.prepare_inputs(indices, offsets, weights)
    finally:
        lookup.bounds_check_mode_int, lookup.bounds_check_version = mode, version
    return indices, offsets, cast(Tensor | None, weights)
