"""NVSHMEM as Triton's interpreter can have it: puts between processes of one machine that stand for ranks of several hosts.

A put is carried out later, by a thread of the rank that puts: after a random time and in any order, as a network may do it, but
always the data first, in pieces and in any order, and then the signal. Only then is the source read: who changes it too early
sends the wrong data.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dlrm_fused.symmetric import device_puts, factory
from dlrm_fused.symmetric.channel import _store_release
from dlrm_fused.symmetric.hosts import Hosts
from dlrm_fused.symmetric.memory import SymmetricMemory
from dlrm_fused.symmetric.shared import SharedGroup

_FLUSH_SECONDS = 60.0
_PIECES = 4


class Put(NamedTuple):
    """Addresses in this process: destination and word are those in the block of the rank that is put to."""

    destination: int
    source: int
    size: int
    word: int
    value: int


class Network:
    """Carries out the puts of this process.

    Attributes:
        longest_delay: seconds, before a put and between its pieces.
        signals_first: whether the signal goes before the data, as it must not.
    """

    def __init__(self) -> None:
        self.longest_delay = 1e-3
        self.signals_first = False
        self._blocks: list[list[Tensor]] = []  # of all ranks; kept for puts that arrive late
        self._pending: list[Put] = []
        self._changed = threading.Condition()
        self._random = random.Random()
        threading.Thread(target=self._run, name="puts", daemon=True).start()

    def add(self, own: int, blocks: list[Tensor]) -> None:
        """Blocks of symmetric memory of all ranks, that of this one first in the search for addresses."""
        self._blocks.append([blocks[own], *blocks])

    def put(self, destination: Any, source: Any, size: Any, word: Any, value: Any, pe: Any) -> None:
        """What kernels call in place of NVSHMEM."""
        there, at, length, flag, number, rank = map(_number, (destination, source, size, word, value, pe))
        put = Put(self._of(rank, there), at, length, self._of(rank, flag), number)
        with self._changed:
            self._pending.append(put)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all has arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._pending, _FLUSH_SECONDS)

    def _of(self, rank: int, address: int) -> int:
        """Where the same byte of symmetric memory lies at another rank."""
        for own, *blocks in self._blocks:
            offset = address - own.data_ptr()
            if 0 <= offset < own.numel():
                return int(blocks[rank].data_ptr()) + offset
        raise AssertionError(f"{address} is no symmetric memory")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending))
                put = self._random.choice(self._pending)
            self._carry_out(put)
            with self._changed:
                self._pending.remove(put)
                self._changed.notify_all()

    def _carry_out(self, put: Put) -> None:
        if self.signals_first:
            _store_release(put.word, put.value)
        piece = -(-put.size // _PIECES)
        for begin in self._random.sample(range(0, put.size, piece), k=len(range(0, put.size, piece))):
            self._delay()
            ctypes.memmove(put.destination + begin, put.source + begin, min(piece, put.size - begin))
        self._delay()
        if not self.signals_first:
            _store_release(put.word, put.value)

    def _delay(self) -> None:
        if self._random.random() < 0.3:
            time.sleep(self._random.uniform(0, self.longest_delay))


class ModelGroup(SharedGroup):
    """Ranks on the CPU, whose kernels store inside their "host" and put to others."""

    puts_between_hosts = True
    network: Network

    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        hosts, self.hosts = self.hosts, Hosts((tuple(range(self.world_size)),), self.rank)
        try:
            reached = super()._allocate(name, size)
        finally:
            self.hosts = hosts
        blocks = [reached.peer(rank) for rank in range(self.world_size)]
        self.network.add(self.rank, blocks)
        return SymmetricMemory(name, {rank: blocks[rank] for rank in hosts.local}, self.rank, self.world_size)

    def close(self) -> None:
        self.network.flush()
        super().close()


def with_puts(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of each rank: call ``function(*arguments)`` with the model in place of NVSHMEM."""
    use_model()
    return function(*arguments)


def use_model() -> Network:
    """Have groups of this process put between hosts, by way of the network that is returned."""
    network = ModelGroup.network = Network()
    factory._TRANSPORTS["cpu", "messages"] = ModelGroup
    device_puts.put_with_signal = network.put
    device_puts.order_after_signal = lambda word, value: None
    return network


def _number(value: Any) -> int:
    """Of a tensor of the interpreter."""
    return int(value.handle.data.item())
