"""Sorts looked-up indices on another stream during the forward pass: the update needs their order, but no gradient for it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.ops.embedding_all_to_all.update import SortedLookup, sort_lookup

# Operators of PyTorch take numbers, not objects.
_handles = itertools.count(1)
# So few indices are sorted in less time than it takes to let another stream do it and wait for that.
_FEW_INDICES = 2**19
_prefetched: weakref.WeakValueDictionary[int, PrefetchedSort] = weakref.WeakValueDictionary()


class PrefetchedSort:
    """The sorted lookups of one forward pass. Its autograd graph owns them, so they cannot be taken for those of another.

    Attributes:
        handle: a number, at least 1, by which the backward operator names them.
        tables: as given; the backward pass updates them, also if others have been attached since.
    """

    def __init__(
        self,
        tables: Sequence[LocalTables],
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Sort on ``stream``, after what the current stream has been given; on the current one if it is None, as on the CPU,
        if there are few indices, or within a capture: a graph ends on the stream on which it began."""
        self.tables = tables
        is_worth_it = any(own.optimizer is not None for own in tables) and sum(map(Tensor.numel, indices)) > _FEW_INDICES
        is_captured = stream is not None and torch.cuda.is_current_stream_capturing()
        self._stream = stream = stream if is_worth_it and not is_captured else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._lookups: list[SortedLookup | None] | None = _sort(tables, indices, offsets)
        if stream is not None:
            self._done = stream.record_event()
            for tensor in (*indices, *offsets):
                tensor.record_stream(stream)
        self.handle = next(_handles)
        _prefetched[self.handle] = self

    def take(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[SortedLookup | None]:
        """The sorted lookups, for the current stream; None for tables without optimizer.

        Their memory is needed no longer than for one backward pass: for another they are sorted once more.
        """
        lookups, self._lookups = self._lookups, None
        if lookups is None:
            return _sort(self.tables, indices, offsets)
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._stream.device)
            stream.wait_event(self._done)
            for lookup in lookups:
                for tensor in lookup.tensors() if lookup is not None else ():
                    tensor.record_stream(stream)
        return lookups


def sorted_lookups(
    handle: int, tables: Sequence[LocalTables], indices: Sequence[Tensor], offsets: Sequence[Tensor]
) -> list[tuple[LocalTables, SortedLookup | None]]:
    """The tables of the forward pass with this handle and the sorted lookups, None for tables without optimizer.

    Args:
        tables: for a forward pass that has left nothing.
        indices, offsets: of the forward pass.
    """
    prefetched = _prefetched.get(handle)
    if prefetched is None:
        return list(zip(tables, _sort(tables, indices, offsets), strict=True))
    return list(zip(prefetched.tables, prefetched.take(indices, offsets), strict=True))


def _sort(tables: Sequence[LocalTables], indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[SortedLookup | None]:
    return [
        sort_lookup(own, own_indices, own_offsets) if own.optimizer is not None else None
        for own, own_indices, own_offsets in zip(tables, indices, offsets, strict=True)
    ]
