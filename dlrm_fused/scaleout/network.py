"""Flows in time: each has its max-min fair rate until the set of flows changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import simpy
from numpy.typing import NDArray

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.topologies import Flows, Links

# Flows whose ends differ by less than this share of the time end together: time is a floating-point number.
_TOGETHER = 1e-12
# A link is full when this share of its capacity is left: rates are sums of floating-point numbers, too.
_FULL = 1e-12


@dataclass(eq=False)
class _Transfer:
    usage: np.ndarray
    left: float
    delivered: simpy.Event
    latency: float = 0.0
    earliest: float = 0.0
    rate: float = 0.0
    ends: float = math.inf


class Network:
    """Links that flows share, as a process of a SimPy environment whose time is in seconds.

    ``carried`` counts the bytes that each class of links has carried, all of its links together; ``busiest`` is the largest
    share of its rate that it has carried.
    """

    def __init__(self, environment: simpy.Environment, links: Mapping[str, Links]) -> None:
        self._environment = environment
        self._names = list(links)
        self._capacity = np.array([some.count * some.bytes_per_second for some in links.values()])
        self._transfers: list[_Transfer] = []
        self._carried = np.zeros(len(links))
        self._busiest = np.zeros(len(links))
        self._since = 0.0
        self._change: simpy.Event | None = None
        self._generation = 0

    @property
    def carried(self) -> dict[str, float]:
        return dict(zip(self._names, self._carried.tolist(), strict=True))

    @property
    def busiest(self) -> dict[str, float]:
        return dict(zip(self._names, self._busiest.tolist(), strict=True))

    def send(self, flows: Flows, bytes_each: float, rounds: int = 1) -> simpy.Event:
        """Start the flows now; the event happens when the last byte is there.

        Args:
            bytes_each: Bytes of one flow, in one round.
            rounds: Rounds that follow one another, each of which starts when the one before is there, as the steps of a
                ring: they cost their bytes and their latency as often.

        Raises:
            ValueError: The bytes or rounds are negative, or a class of links is not of this network.
        """
        if bytes_each < 0 or rounds < 0:
            raise UsageError(f"bytes_each is {bytes_each} and rounds is {rounds}: neither can be negative")
        unknown = set(flows.crossings) - set(self._names)
        if unknown:
            raise UsageError(f"flows cross {sorted(unknown)}, which are not links of this network: {self._names}")
        usage = np.array([flows.count * flows.crossings.get(name, 0.0) for name in self._names])
        total = bytes_each * rounds
        latency = flows.latency * rounds
        if flows.idle is None:
            transfer = _Transfer(usage, total, self._environment.event(), latency)
        else:
            earliest = self._environment.now + latency + flows.idle * total
            transfer = _Transfer(usage, total, self._environment.event(), earliest=earliest)
        self._after(flows.lead, lambda: self._start(transfer)) if flows.lead else self._start(transfer)
        return transfer.delivered

    def _start(self, transfer: _Transfer) -> None:
        if transfer.left == 0:
            self._deliver(transfer)
        else:
            self._transfers.append(transfer)
            self._settle_later()

    def _settle_later(self) -> None:
        """Rates are found once for all flows that start at the same moment."""
        if self._change is None:
            self._change = self._after(0, self._settle)

    def _settle(self) -> None:
        self._change = None
        self._advance()
        self._finish()
        self._share()

    def _advance(self) -> None:
        elapsed = self._environment.now - self._since
        self._since = self._environment.now
        for transfer in self._transfers:
            moved = min(transfer.rate * elapsed, transfer.left)
            transfer.left -= moved
            self._carried += transfer.usage * moved

    def _finish(self) -> None:
        now = self._environment.now * (1 + _TOGETHER)
        done = [transfer for transfer in self._transfers if transfer.ends <= now]
        self._transfers = [transfer for transfer in self._transfers if transfer not in done]
        for transfer in done:
            self._carried += transfer.usage * transfer.left
            self._deliver(transfer)

    def _deliver(self, transfer: _Transfer) -> None:
        left = max(transfer.latency, transfer.earliest - self._environment.now)
        self._after(left, transfer.delivered.succeed)

    def _share(self) -> None:
        self._generation += 1
        if not self._transfers:
            return
        usage = np.stack([transfer.usage for transfer in self._transfers], axis=1)
        for transfer, rate in zip(self._transfers, max_min_rates(usage, self._capacity), strict=True):
            transfer.rate = float(rate)
            transfer.ends = self._environment.now + transfer.left / transfer.rate
        load = usage @ np.array([transfer.rate for transfer in self._transfers])
        self._busiest = np.maximum(self._busiest, load / self._capacity)
        next_end = min(transfer.ends for transfer in self._transfers)
        generation = self._generation
        self._after(next_end - self._environment.now, lambda: self._ends(generation))

    def _ends(self, generation: int) -> None:
        if generation == self._generation and self._change is None:
            self._settle()

    def _after(self, seconds: float, action: Callable[[], object]) -> simpy.Event:
        def act(_: simpy.Event) -> None:
            action()

        event = self._environment.timeout(seconds)
        event.callbacks.append(act)
        return event


def max_min_rates(usage: NDArray[np.float64], capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rates, in bytes/s, at which no flow can go faster without slowing one that is not faster.

    Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.

    Args:
        usage: ``(links, flows)``, the capacity that a flow takes of a link at a rate of one byte/s. 0: the flow does not
            cross it. A class of equal flows takes their sum.
        capacity: ``(links,)``, in bytes/s; a class of equal links has their sum.

    Raises:
        UsageError: a flow crosses no link; its rate has no limit.
    """
    if not (usage > 0).any(axis=0).all():
        raise UsageError("every flow must cross at least one link")
    rates = np.zeros(usage.shape[1])
    rising = np.ones(usage.shape[1], dtype=bool)
    left = capacity.astype(np.float64)
    while rising.any():
        demand = usage[:, rising].sum(axis=1)
        used = demand > 0
        step = (left[used] / demand[used]).min()
        rates[rising] += step
        left = np.maximum(left - step * demand, 0)
        full = used & (left <= _FULL * capacity)
        rising &= ~(usage[full] > 0).any(axis=0)
    return rates
