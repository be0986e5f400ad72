"""Collectives as lists of messages between ranks that are told apart: each with its route and what it waits for.

They are written from the algorithms, not from ``dlrm_fused.scaleout``, whose classes of equal links and flows they check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

Route = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """
    Args:
        route: devices, from the sender to the receiver.
        after: earlier messages, by their place in the list.
        channel: messages of one channel of a rank share a window; each ring is a channel, as in NCCL.
    """

    route: Route
    bytes: float
    after: tuple[int, ...] = ()
    channel: int = 0


@dataclass
class Wires:
    """Devices, of which the first are ranks, and the links between them.

    Args:
        links: bytes/s and seconds of latency, by the devices at their ends.
        routes: the ways from a rank to another one, each with the share of a message that takes it.
        rings: orders of the ranks; a collective by rings divides its data over them.
    """

    ranks: int
    ranks_per_host: int
    devices: int
    routes: Callable[[int, int], list[tuple[float, Route]]]
    rings: list[list[int]]
    links: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def connect(self, one: int, other: int, bytes_per_second: float, latency: float) -> None:
        self.links[one, other] = self.links[other, one] = (bytes_per_second, latency)


def switch(ranks: int, bytes_per_second: float, latency: float) -> Wires:
    wires = Wires(ranks, ranks, ranks + 1, lambda a, b: [(1, (a, ranks, b))], [list(range(ranks))])
    for rank in range(ranks):
        wires.connect(rank, ranks, bytes_per_second, latency / 2)
    return wires


def torus(rows: int, columns: int, bytes_per_second: float, latency: float) -> Wires:
    """Raises: ValueError: neither a ring nor a square of at least 3 x 3, for which the cycles of :func:`_cycles` are known."""

    def routes(source: int, target: int) -> list[tuple[float, Route]]:
        along_row = _ways(source % columns, target % columns, columns)
        along_column = _ways(source // columns, target // columns, rows)
        found = []
        for (first_share, row_way), (second_share, column_way) in product(along_row, along_column):
            first = [source // columns * columns + column for column in row_way]
            second = [row * columns + target % columns for row in column_way]
            found.append((first_share * second_share, (*first, *second[1:])))
        return found

    wires = Wires(rows * columns, 1, rows * columns, routes, _cycles(rows, columns))
    for row, column in product(range(rows), range(columns)):
        here = row * columns + column
        if columns > 1:
            wires.connect(here, row * columns + (column + 1) % columns, bytes_per_second, latency)
        if rows > 1:
            wires.connect(here, (row + 1) % rows * columns + column, bytes_per_second, latency)
    return wires


def _ways(start: int, end: int, size: int) -> list[tuple[float, list[int]]]:
    """The shortest ways around a ring, with the share of the bytes that takes each."""
    forward, back = (end - start) % size, (start - end) % size
    ahead = [(start + hop) % size for hop in range(forward + 1)]
    behind = [(start - hop) % size for hop in range(back + 1)]
    if forward == back and forward:
        return [(0.5, ahead), (0.5, behind)]
    return [(1, ahead if forward <= back else behind)]


def _cycles(rows: int, columns: int) -> list[list[int]]:
    """Hamiltonian cycles without common links, in both directions (Bae and Bose, IEEE Trans. Computers 52(10), 2003)."""
    if rows == 1:
        cycles = [list(range(columns))]
    elif rows == columns and rows > 2:
        places = [(number // rows, (number - number // rows) % rows) for number in range(rows * rows)]
        cycles = [[a * rows + b for a, b in places], [b * rows + a for a, b in places]]
    else:
        raise ValueError(f"a torus of {rows} x {columns}: cycles are known for rings and for squares of at least 3 x 3")
    return cycles + [cycle[::-1] for cycle in cycles]


def cluster(hosts: int, ranks_per_host: int, nvlink: float, nic: float, nvlink_latency: float, nic_latency: float) -> Wires:
    """A pod of hosts: an NVLink switch in each, a leaf switch for each rail. Messages to another rail change it in the host.

    Rings leave a host by the NIC by which they come into the next one. Only an even number of hosts has them.
    """
    ranks = hosts * ranks_per_host

    def routes(source: int, target: int) -> list[tuple[float, Route]]:
        host, rail = divmod(target, ranks_per_host)
        here = source // ranks_per_host
        if here == host:
            return [(1, (source, ranks + here, target))]
        on_rail = here * ranks_per_host + rail
        to_rail = () if on_rail == source else (source, ranks + here)
        return [(1, (*to_rail, on_rail, ranks + hosts + rail, target))]

    def order(host: int, first: int) -> list[int]:
        rails = [(first + place) % ranks_per_host for place in range(ranks_per_host)]
        return [host * ranks_per_host + rail for rail in (rails if host % 2 == 0 else rails[::-1])]

    rings = [[rank for host in range(hosts) for rank in order(host, first)] for first in range(ranks_per_host)]
    wires = Wires(ranks, ranks_per_host, ranks + hosts + ranks_per_host, routes, rings if hosts % 2 == 0 else [])
    for rank in range(ranks):
        wires.connect(rank, ranks + rank // ranks_per_host, nvlink, nvlink_latency / 2)
        wires.connect(rank, ranks + hosts + rank % ranks_per_host, nic, nic_latency / 2)
    return wires


class _Plan:
    """Messages under way. A rank goes on to the next phase when all that it sent and gets in the one before is there."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.messages: list[Message] = []

    def send(self, source: int, target: int, size: float, after: Iterable[int] = (), channel: int = 0) -> list[int]:
        first = len(self.messages)
        waits = tuple(after)
        self.messages += [Message(route, size * share, waits, channel) for share, route in self.wires.routes(source, target)]
        return list(range(first, len(self.messages)))

    def exchange(
        self, groups: Sequence[Sequence[int]], size: float, after: dict[int, list[int]] | None = None
    ) -> dict[int, list[int]]:
        """Every rank of a group sends ``size`` bytes to every other one. Returns the messages from and to each rank."""
        exchanged: dict[int, list[int]] = defaultdict(list)
        for group in groups:
            for offset, place in product(range(1, len(group)), range(len(group))):
                source, target = group[place], group[(place + offset) % len(group)]
                sent = self.send(source, target, size, (after or {}).get(source, ()))
                exchanged[source] += sent
                exchanged[target] += sent
        return exchanged

    def around(
        self, rings: Sequence[Sequence[int]], size: float, steps: int, after: dict[int, list[int]] | None = None
    ) -> dict[int, list[int]]:
        """In each step every rank passes on to the next one what came in the step before. Returns the last to come."""
        last: dict[int, list[int]] = defaultdict(list)
        for channel, ring in enumerate(rings):
            arrived = {rank: list((after or {}).get(rank, ())) for rank in ring}
            for _ in range(steps):
                sent = {
                    ring[(place + 1) % len(ring)]: self.send(rank, ring[(place + 1) % len(ring)], size, arrived[rank], channel)
                    for place, rank in enumerate(ring)
                }
                arrived = sent
            for rank in ring:
                last[rank] += arrived[rank]
        return last

    @property
    def hosts(self) -> list[list[int]]:
        each = self.wires.ranks_per_host
        return [list(range(first, first + each)) for first in range(0, self.wires.ranks, each)]

    @property
    def rails(self) -> list[list[int]]:
        each = self.wires.ranks_per_host
        return [list(range(rail, self.wires.ranks, each)) for rail in range(each)]


def all_to_all_direct(wires: Wires, size: float) -> list[Message]:
    plan = _Plan(wires)
    plan.exchange([range(wires.ranks)], size / wires.ranks)
    return plan.messages


def all_to_all_pairwise(wires: Wires, size: float) -> list[Message]:
    """In step k rank r sends to r + k, once what it sent and what came in the step before is there."""
    plan = _Plan(wires)
    before: dict[int, list[int]] = defaultdict(list)
    for offset in range(1, wires.ranks):
        now: dict[int, list[int]] = defaultdict(list)
        for rank in range(wires.ranks):
            target = (rank + offset) % wires.ranks
            sent = plan.send(rank, target, size / wires.ranks, before[rank])
            now[rank] += sent
            now[target] += sent
        before = now
    return plan.messages


def all_to_all_hierarchical(wires: Wires, size: float) -> list[Message]:
    plan = _Plan(wires)
    inside = plan.exchange(plan.hosts, size / wires.ranks_per_host)
    plan.exchange(plan.rails, size * wires.ranks_per_host / wires.ranks, inside)
    return plan.messages


def all_reduce_ring(wires: Wires, size: float) -> list[Message]:
    plan = _Plan(wires)
    plan.around(wires.rings, size / wires.ranks / len(wires.rings), 2 * (wires.ranks - 1))
    return plan.messages


def all_reduce_direct(wires: Wires, size: float) -> list[Message]:
    plan = _Plan(wires)
    reduced = plan.exchange([range(wires.ranks)], size / wires.ranks)
    plan.exchange([range(wires.ranks)], size / wires.ranks, reduced)
    return plan.messages


def all_reduce_hierarchical(wires: Wires, size: float) -> list[Message]:
    plan = _Plan(wires)
    each = wires.ranks_per_host
    hosts = wires.ranks // each
    reduced = plan.around(plan.hosts, size / each, each - 1)
    summed = plan.around(plan.rails, size / wires.ranks, 2 * (hosts - 1), reduced)
    plan.around(plan.hosts, size / each, each - 1, summed)
    return plan.messages


MESSAGES: dict[tuple[str, str], Callable[[Wires, float], list[Message]]] = {
    ("all_to_all", "direct"): all_to_all_direct,
    ("all_to_all", "pairwise"): all_to_all_pairwise,
    ("all_to_all", "hierarchical"): all_to_all_hierarchical,
    ("all_reduce", "ring"): all_reduce_ring,
    ("all_reduce", "direct"): all_reduce_direct,
    ("all_reduce", "hierarchical"): all_reduce_hierarchical,
}
