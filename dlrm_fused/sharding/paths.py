"""The ways in which a sharded module looks up and delivers a batch: one interface, one object for each way.

* :class:`TorchRecPath`: TorchRec's own, for all sharding types;
* :class:`~dlrm_fused.sharding.gpu_path.GpuPath` and :class:`~dlrm_fused.sharding.cpu_path.CpuPath`: fused communication;
* :class:`MeasuringPath`: all of these in turn, until training steps have shown which is the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_fused.auto_choice import BothWays, log_choice, on_slowest_rank
from dlrm_fused.clocks import CudaClock, HostClock
from dlrm_fused.compat import torchrec as compat
from dlrm_fused.compat.fbgemm import read_steps_anew
from dlrm_fused.sharding.cpu_path import CpuPath
from dlrm_fused.sharding.exchange import Exchange
from dlrm_fused.sharding.gpu_path import GpuPath
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.symmetric import SymmetricGroup
from dlrm_fused.symmetric.device import uses_kernels

# A turn of a path: batches that compile kernels and capture graphs, and batches that are measured, of which six are whole steps
# where a module looks up twice or three times in a step. All paths have so many turns.
WARMUP_BATCHES, MEASURED_BATCHES, ROUNDS = 4, 6, 3


class Path(Protocol):
    """A way of a module's batches. It is given the module in each call, and keeps no reference to it."""

    @property
    def shardings(self) -> tuple[int, ...]:
        """Numbers of the sharding types with fused communication, ascending; TorchRec serves the others."""

    @property
    def reads_keys(self) -> bool:
        """Whether it needs the keys of the bags of a batch."""

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch whose features have been distributed. Collective."""

    def release(self) -> None:
        """Let go of the memory. Collective."""


class TorchRecPath:
    """TorchRec's own lookups and collectives."""

    shardings: tuple[int, ...] = ()
    reads_keys = False

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch. Collective."""
        return ShardedEmbeddingBagCollection.compute_and_output_dist(module, ctx, input)

    def release(self) -> None:
        """Do nothing: there is no memory of ours."""


@dataclass(frozen=True)
class FusedSettings:
    """The settings of a module's fused paths.

    Attributes:
        group: the ranks, and their memory.
        output_dtype: of the pooled embeddings.
        keyed: the features that keys of batches are for; None if none are made.
    """

    options: FusedOptions
    group: SymmetricGroup
    output_dtype: torch.dtype
    keyed: Sequence[tuple[str, int]] | None


def fused_path(module: ShardedEmbeddingBagCollection, settings: FusedSettings, shardings: Sequence[int]) -> GpuPath | CpuPath:
    """Make the fused path of some sharding types for the device of the ranks. Collective."""
    exchange = Exchange(module, settings.options, settings.group, shardings, settings.output_dtype)
    if uses_kernels(settings.group.device):
        return GpuPath(module, exchange, settings.options)
    return CpuPath(module, exchange, settings.keyed)


class Turns:
    """The training batches in which modules of one sharder are measured, one module after the other."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, batches: int) -> int:
        """Take so many batches; return how many come before."""
        self._taken += batches
        return self._taken - batches


class MeasuringPath:
    """The paths of a module in turn, until training steps have shown which is the fastest for each sharding type.

    A step counts as a whole, from one training batch to the next: input dist, lookup, the dense part, gradients, updates, and
    whatever runs beside them or is replayed. The paths are the fused one of each covered sharding type, with TorchRec's for the
    others, and then TorchRec's for all. Between hosts the covered types share one path: messages of both in one step would
    wait for each other (see docs/symmetric.md, "GPUs without peer access").

    Where a model has several modules, one after the other measures; until then they take TorchRec's path.

    Args:
        covered: numbers of the sharding types that may be fused, ascending.
        turns: of the modules of a model.

    Attributes:
        measured: by sharding type, seconds of a step; empty before the end.
    """

    def __init__(self, settings: FusedSettings, covered: Sequence[int], turns: Turns) -> None:
        self._settings = settings
        fused = [tuple(covered)] if settings.group.hosts.are_many else [(i,) for i in covered]
        self._ways: list[tuple[int, ...]] = [*fused, ()]
        self._paths: dict[tuple[int, ...], Path] = {(): TorchRecPath()}
        self._current = self._paths[()]
        # Nothing that ranks know at different times may decide: the garbage collector's work, for one.
        self._batch = -turns.take(ROUNDS * len(self._ways) * (WARMUP_BATCHES + MEASURED_BATCHES))
        self._clock = CudaClock() if settings.group.device.type == "cuda" else HostClock()
        self._marks: list[Any] = []  # of each turn: its begin, and the end of the batches that warm up
        self.measured: dict[str, BothWays] = {}

    @property
    def shardings(self) -> tuple[int, ...]:
        """Numbers of the sharding types that are fused in this turn."""
        return self._current.shardings

    @property
    def reads_keys(self) -> bool:
        """Whether the path of this turn needs the keys of the bags of a batch."""
        return self._current.reads_keys

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch. Collective."""
        return self._current.deliver(module, ctx, input)

    def release(self) -> None:
        """Let go of the memory of all paths. Collective."""
        for path in self._paths.values():
            path.release()

    def next_batch(self, module: ShardedEmbeddingBagCollection) -> Path:
        """Begin a training batch; return this path, or for good the fastest one when all have been measured. Collective."""
        turn, number = divmod(self._batch, WARMUP_BATCHES + MEASURED_BATCHES)
        self._batch += 1
        if turn < 0:
            return self
        if number in (0, WARMUP_BATCHES):
            self._marks.append(self._clock.mark())
        if number == 0:
            if turn == ROUNDS * len(self._ways):
                return self._fastest(module)
            way = self._ways[turn % len(self._ways)]
            if way not in self._paths:
                self._paths[way] = fused_path(module, self._settings, way)
            self._current = self._paths[way]
            read_steps_anew(compat.fbgemm_lookups(module))
        return self

    def _fastest(self, module: ShardedEmbeddingBagCollection) -> Path:
        """Choose, keep the times, and release the other paths. Collective."""
        process_group = cast(dist.ProcessGroup, compat.environment(module).process_group)
        begins, ends = self._marks[1::2], self._marks[2::2]
        torch.get_device_module(self._settings.group.device).synchronize(self._settings.group.device)
        own = [self._clock.milliseconds(*turn) / 1e3 / MEASURED_BATCHES for turn in zip(begins, ends, strict=True)]
        seconds = on_slowest_rank(own, process_group, self._settings.group.device)
        # A turn that is disturbed is longer, never shorter.
        of_way = {way: min(seconds[i :: len(self._ways)]) for i, way in enumerate(self._ways)}
        kinds, chosen = compat.sharding_types(module), list[tuple[int, ...]]()
        for way in self._ways[:-1]:
            both = BothWays(fused=of_way[way], unfused=of_way[()])
            work = f"{compat.path(module)}: {', '.join(kinds[i] for i in way)} tables, a step"
            log_choice(both, process_group, work=work, unfused_name="TorchRec")
            self.measured.update(dict.fromkeys((kinds[i] for i in way), both))
            if both.fused_is_faster:
                chosen.append(way)
        if len(chosen) == 1:
            fastest = self._paths.pop(chosen[0])
        self.release()
        if len(chosen) == 1:
            return fastest
        return fused_path(module, self._settings, [i for way in chosen for i in way]) if chosen else TorchRecPath()
