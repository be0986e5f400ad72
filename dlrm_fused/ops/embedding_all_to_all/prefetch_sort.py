"""Sorts looked-up indices on another stream during the forward pass: the update needs their order, but no gradient for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.ops.embedding_all_to_all.update import SortedLookup, sort_lookup

# So few indices are sorted in less time than it takes to let another stream do it and wait for that.
_FEW_INDICES = 2**19


class PrefetchedSort:
    """The sorted lookups of one forward pass. Its autograd graph owns them, so they cannot be taken for those of another.

    Attributes:
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


def _sort(tables: Sequence[LocalTables], indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[SortedLookup | None]:
    return [
        sort_lookup(own, own_indices, own_offsets) if own.optimizer is not None else None
        for own, own_indices, own_offsets in zip(tables, indices, offsets, strict=True)
    ]
