"""Exchanges of rows between hosts in pieces, so that one piece travels while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from dlrm_fused.ops.schedules.plan import cut
from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.channel import ChannelExchange

# Bytes of a piece at least, and pieces at most: a message takes the device some ten microseconds, the host three times as long,
# and smaller products do not fill a GPU.
_PIECE_BYTES = 8 << 20
_MOST_PIECES = 4


class RowExchange(NamedTuple):
    """An exchange that has begun.

    Attributes:
        rows: of the matrix that goes from one rank to another.
    """

    rows: slice
    exchange: ChannelExchange


def pieces_of(rows: int, row_bytes: int) -> list[slice]:
    """Cut the rows that one GPU sends to another one, which have so many bytes each."""
    pieces = max(1, min(_MOST_PIECES, rows * row_bytes // _PIECE_BYTES))
    return [slice(first, last) for first, last in cut(rows, (1,) * pieces)]


def exchange_by_host(
    channel: Channel,
    pieces: Sequence[slice],
    sent: Callable[[int, slice], Tensor],
    received: Callable[[int, slice], Tensor],
    fingerprint: int,
) -> list[RowExchange]:
    """Begin to exchange rows with one other host after the other, the first piece with all of them first.

    Args:
        pieces: of the rows.
        sent: makes what goes to a rank, contiguous, only when its turn has come.
        received: gives the place of what comes from a rank, contiguous.
        fingerprint: as of :meth:`~dlrm_fused.symmetric.Channel.exchange`.

    Raises:
        CommunicationError: the channel has failed.
    """
    hosts, exchanges = channel.group.hosts, []
    for rows in pieces:
        for shift, host in enumerate(hosts.others, start=1):
            source = (hosts.own - shift) % len(hosts.ranks)
            slices = {rank: sent(rank, rows) for rank in hosts.ranks[host]}
            places = {rank: received(rank, rows) for rank in hosts.ranks[source]}
            exchanges.append(RowExchange(rows, channel.exchange(slices, places, fingerprint=fingerprint)))
    return exchanges
