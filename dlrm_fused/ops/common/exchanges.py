"""Exchanges of rows between hosts, beside which products are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from dlrm_fused.ops.schedules.plan import cut
from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.channel import ChannelExchange
from dlrm_fused.symmetric.hosts import runs_of


def halves_of(rows: int, row_bytes: int, least_bytes: int) -> list[slice]:
    """Cut rows of so many bytes each into halves, of which one can travel while the other is computed.

    Rows of less than ``least_bytes`` stay together: a message takes the device some ten microseconds, the host three times as
    long, and smaller products do not fill a GPU. (More pieces were seldom faster on two H200s.)
    """
    pieces = 2 if rows * row_bytes >= least_bytes else 1
    return [slice(first, last) for first, last in cut(rows, (1,) * pieces)]


def rows_of_ranks(matrix: Tensor, ranks: range, world_size: int) -> Tensor:
    """Return the rows of neighbouring ranks in a matrix of as many rows for each rank: one product, however many ranks."""
    rows = len(matrix) // world_size
    return matrix[ranks.start * rows : ranks.stop * rows]


class HostExchange(NamedTuple):
    """Rows that are on their way between hosts.

    Attributes:
        sources: whose rows arrive, neighbours together.
    """

    exchange: ChannelExchange
    sources: Sequence[range]


def exchange_with_hosts(
    channel: Channel,
    sent: Callable[[range], Sequence[Tensor]],
    received: Callable[[int], Tensor],
    fingerprint: int,
    *,
    beside: bool = True,
) -> list[HostExchange]:
    """Begin to exchange rows with half of the other hosts, and then with the others. All ranks take part in both exchanges.

    Args:
        sent: makes what goes to each of neighbouring ranks, contiguous, only when their turn has come: what was made before
            travels meanwhile.
        received: gives the place of what comes from a rank, contiguous.
        fingerprint, beside: as of :meth:`~dlrm_fused.symmetric.Channel.exchange`.

    Raises:
        CommunicationError: the channel has failed.
    """
    hosts, exchanges = channel.group.hosts, []
    count = len(hosts.ranks)
    for first, last in cut(count - 1, (1, 1)):
        # The next hosts get this one's rows, while the ones before send theirs.
        shifts = range(1 + first, 1 + last)
        to = runs_of(rank for shift in shifts for rank in hosts.ranks[(hosts.own + shift) % count])
        from_ = runs_of(rank for shift in reversed(shifts) for rank in hosts.ranks[(hosts.own - shift) % count])
        slices = {rank: rows for ranks in to for rank, rows in zip(ranks, sent(ranks), strict=True)}
        places = {rank: received(rank) for ranks in from_ for rank in ranks}
        exchange = channel.exchange(slices, places, fingerprint=fingerprint, beside=beside)
        exchanges.append(HostExchange(exchange, from_))
    return exchanges
