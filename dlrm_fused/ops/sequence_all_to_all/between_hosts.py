"""Rows that go between hosts, as messages: rows of neighbouring ranks are gathered, and put into their places, at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dlrm_fused.ops.common.dtypes import within_range
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.symmetric.channel import ChannelExchange


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix, by rank.

    Attributes:
        matrix: [rows, width].
        bounds: [ranks + 1], where the rows of each rank begin.
        numbers: int64 [bounds[-1]], of the rows in the order of ``bounds``; None: they lie in the matrix in this order.
    """

    matrix: Tensor
    bounds: Sequence[int]
    numbers: Tensor | None

    def of(self, ranks: range) -> slice:
        """Return the rows of neighbouring ranks, as ``bounds`` count them."""
        return slice(self.bounds[ranks.start], self.bounds[ranks.stop])

    def gathered(self, ranks: range, dtype: torch.dtype) -> Tensor:
        """Return the rows of neighbouring ranks side by side, in a dtype."""
        own = self.of(ranks)
        rows = self.matrix[own] if self.numbers is None else self.matrix.index_select(0, self.numbers[own])
        return rows if rows.dtype == dtype else within_range(rows, dtype).to(dtype)

    def by_rank(self, ranks: range, rows: Tensor) -> Mapping[int, Tensor]:
        """Return the parts of such rows by rank."""
        sizes = [self.bounds[rank + 1] - self.bounds[rank] for rank in ranks]
        return dict(zip(ranks, rows.split(sizes), strict=True))


class RowMessages:
    """The messages of one call, which are on their way until :meth:`complete`."""

    def __init__(self, exchange: ChannelExchange, received: Rows, arriving: Mapping[range, Tensor]) -> None:
        self._exchange, self._received, self._arriving = exchange, received, arriving

    @classmethod
    def begin(cls, window: ReceiveWindow, sent: Rows, received: Rows) -> Self:
        """Begin to send rows to ranks of other hosts, and to receive theirs. Collective.

        Args:
            window: in which ranks of this host receive.
            sent: by the rank that gets them.
            received: the places of what each rank sends, of the dtype in which rows travel.
        """
        to: dict[int, Tensor] = {}
        from_: dict[int, Tensor] = {}
        arriving = {}
        channel = window.channel
        for ranks in channel.group.hosts.remote_runs:
            to |= sent.by_rank(ranks, sent.gathered(ranks, received.matrix.dtype))
            places = received.matrix[received.of(ranks)]
            if received.numbers is not None:
                places = arriving[ranks] = torch.empty_like(places)
            from_ |= received.by_rank(ranks, places)
        return cls(channel.exchange(to, from_, fingerprint=window.fingerprint), received, arriving)

    def complete(self) -> None:
        """Wait for the rows, and put them into their places. On GPUs the current stream waits, not the host.

        Raises:
            CommunicationError: a rank is lost, late, or makes other calls.
        """
        self._exchange.complete()
        for ranks, rows in self._arriving.items():
            assert self._received.numbers is not None
            self._received.matrix.index_copy_(0, self._received.numbers[self._received.of(ranks)], rows)
