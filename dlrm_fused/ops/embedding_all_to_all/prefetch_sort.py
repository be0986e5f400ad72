"""Sorting a lookup's indices beside the forward pass, since the update of the tables needs the order but no gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.ops.embedding_all_to_all.update import SortedLookup, sort_lookup

# Forward passes whose backward pass is still to come; sorts beyond them are made when they are needed.
_KEPT = 16


@dataclass(frozen=True)
class _Pending:
    order: SortedLookup
    done: torch.cuda.Event | None


class PrefetchedSorts:
    """Sorted lookups that a backward pass will ask for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: dict[tuple[int, int, int], _Pending] = {}

    def start(self, tables: LocalTables, indices: Tensor, offsets: Tensor) -> None:
        """Sort on a stream of its own, after what the current stream has been given."""
        while len(self._pending) >= _KEPT:
            self._pending.pop(next(iter(self._pending)))
        key = _key(indices, offsets)
        if self._stream is None:
            self._pending[key] = _Pending(sort_lookup(tables, indices, offsets), None)
            return
        self._stream.wait_stream(torch.cuda.current_stream(indices.device))
        with torch.cuda.stream(self._stream):
            order = sort_lookup(tables, indices, offsets)
            done = torch.cuda.Event()
            done.record()
        for tensor in (indices, offsets):
            tensor.record_stream(self._stream)
        self._pending[key] = _Pending(order, done)

    def take(self, tables: LocalTables, indices: Tensor, offsets: Tensor) -> SortedLookup:
        """The order of these indices, from :meth:`start` or made now, for the current stream."""
        pending = self._pending.pop(_key(indices, offsets), None)
        if pending is None:
            return sort_lookup(tables, indices, offsets)
        if pending.done is not None:
            stream = torch.cuda.current_stream(indices.device)
            stream.wait_event(pending.done)
            for tensor in pending.order.tensors():
                tensor.record_stream(stream)
        return pending.order


def _key(indices: Tensor, offsets: Tensor) -> tuple[int, int, int]:
    # The backward pass holds the tensors, so that no other has their address meanwhile.
    return indices.data_ptr(), offsets.data_ptr(), indices.numel()
