"""Undocumented attributes of FBGEMM's lookup (table batched embeddings, TBE), 1.6, 1.8 and 1.9."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor


class Storage(NamedTuple):
    """The memory of a lookup's tables and of their optimizer's states; the tensors are the live ones.

    Attributes:
        weights: all tables, one after the other, flat.
        offsets: of each table in ``weights``, in elements.
        rows, dims: of each table.
        momentum1, momentum2: the states of the optimizer of all tables, flat; one element of no meaning where it has none. A
            state of elements lies as the weights do.
        steps: int64 [1], the count of the optimizer's steps that FBGEMM reads and checkpoints set.
        is_trained: whether a backward pass updates the tables, which users may freeze.
    """

    weights: Tensor
    offsets: tuple[int, ...]
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    momentum1: Tensor
    momentum2: Tensor
    steps: Tensor
    is_trained: bool


def storage(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> Storage:
    """Return the tables of a lookup, in place, so that another kernel reads and updates what checkpoints hold."""
    place = "host" if lookup.use_cpu else "dev"
    return Storage(
        weights=getattr(lookup, f"weights_{place}").detach(),
        offsets=tuple(lookup.weights_physical_offsets),
        rows=tuple(rows for rows, *_ in lookup.embedding_specs),
        dims=tuple(dim for _, dim, *_ in lookup.embedding_specs),
        momentum1=getattr(lookup, f"momentum1_{place}").detach(),
        momentum2=getattr(lookup, f"momentum2_{place}").detach(),
        steps=cast(Tensor, lookup.iter),
        is_trained=_is_trained(lookup),
    )


def _is_trained(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    place = "host" if lookup.use_cpu else "dev"
    return any(cast(Tensor, t).requires_grad for t in (lookup.placeholder_autograd_tensor, getattr(lookup, f"weights_{place}")))


def what_is_copied(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> tuple[object, ...]:
    """Return what other kernels copy of a lookup: settings, numbers of its optimizer, addresses of its tensors.

    FBGEMM reads all of it in every forward pass. Two results are equal as long as nothing was changed, such as by
    ``update_hyper_parameters``, which makes new arguments, or by moving tables.
    """
    place = "host" if lookup.use_cpu else "dev"
    names = (f"weights_{place}", f"momentum1_{place}", f"momentum2_{place}", "iter", "learning_rate_tensor")
    addresses = [cast(Tensor, getattr(lookup, name)).data_ptr() for name in names]
    settings = lookup.optimizer_args, lookup.pooling_mode, lookup.bounds_check_mode_int, _is_trained(lookup)
    return *settings, *addresses


def read_steps_anew(lookups: Iterable[SplitTableBatchedEmbeddingBagsCodegen]) -> None:
    """Let lookups take the count of their optimizer's steps from the device, where others have changed it.

    They keep a copy on the CPU, which they read instead unless it is 0.
    """
    for lookup in lookups:
        lookup.iter_cpu.zero_()


@contextmanager
def uncounted(lookups: Sequence[SplitTableBatchedEmbeddingBagsCodegen]) -> Iterator[None]:
    """Keep lookups within from counting as steps of the optimizer: FBGEMM counts forward passes, with or without backward."""
    counts = [cast(Tensor, lookup.iter) for lookup in lookups]
    before = [count.clone() for count in counts]
    yield
    for count, steps in zip(counts, before, strict=True):
        count.copy_(steps)
    read_steps_anew(lookups)


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
    # FBGEMM has two kernels for this check; 2 is the faster one: see docs/performance/training.md.
    lookup.bounds_check_version = 2
    try:
        indices, offsets, weights, _ = lookup.prepare_inputs(indices, offsets, weights)
    finally:
        lookup.bounds_check_mode_int, lookup.bounds_check_version = mode, version
    return indices, offsets, cast(Tensor | None, weights)
