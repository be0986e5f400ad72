"""The symmetric memory of AllGather + GEMM and of GEMM + ReduceScatter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_fused.lasting import lasting
from dlrm_fused.ops.all_gather_gemm.kernel import Epoch
from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.schedules import MOST_PIECES, Pair, Schedule
from dlrm_fused.ops.schedules.piece_flags import PieceFlags, ends_of
from dlrm_fused.ops.schedules.plan import cut
from dlrm_fused.symmetric import SymmetricMemory
from dlrm_fused.symmetric.device import uses_kernels

# Counters of a launch: programs that have begun, and programs that have stored at the peers.
COUNTERS = 2


class Started(NamedTuple):
    """A call that has been started.

    Attributes:
        out: its result, an ordinary tensor.
        rows: gives the rows that were gathered, [M, K], until the next call.
    """

    out: Tensor
    rows: Callable[[], Tensor]


class ShardWorkspace(MatrixWorkspace):
    """The symmetric memory in which shards are gathered, and products for other ranks received. Making one is collective.

    Calls may share it, of both operators and of any layers. ``max_rows`` are those of all ranks together, M; ``max_columns``
    those of what travels: K of ``all_gather_gemm``, N of ``gemm_reduce_scatter``, and for gradients the same ones. Memory for
    two matrices [max_rows, max_columns] is allocated, or some more where hosts have unequal numbers of ranks.
    """

    _channels = ("", "beside")

    def _allocate(self) -> None:
        group, name = self.group, self.name
        size = self.max_rows * self.max_columns * self.dtype.itemsize
        self.gathered = group.allocate(f"{name}.gathered", size)
        # From each rank of a host for each rank that one of them sends to: more than all ranks where hosts are unequal.
        hosts = group.hosts
        of_senders = (served * len(hosts.ranks[hosts.of_rank[rank]]) for rank, served in hosts.served_by.items())
        self.received_shards = max([self.world_size, *of_senders])
        self.received = group.allocate(f"{name}.received", self.received_shards * size // self.world_size)
        self.pieces = PieceFlags(self.channel, f"{name}.pieces", MOST_PIECES, has_own_channel=True)
        # The flags of rows that are gathered beside another call.
        self.pieces_beside = PieceFlags(self.channels[1], f"{name}.pieces_beside", 1, has_own_channel=False)
        self._numbers: dict[tuple[int, ...], Tensor] = {}
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device=group.device)
        self.gather_stream = torch.cuda.Stream(group.device, priority=-1) if group.device.type == "cuda" else None
        self.schedules = {
            pair: self.schedules_of(pair, f", {pair}") for pair in (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)
        }

    @property
    def is_by_kernels(self) -> bool:
        """Whether copy engines and kernels reach all ranks; else rows go by any transport, and the library multiplies."""
        return self.world_size > 1 and uses_kernels(self.device) and not self.group.hosts.are_many

    def _release_memory(self) -> None:
        for memory in (self.gathered, self.received):
            self.group.release(memory)
        for flags in (self.pieces, self.pieces_beside):
            flags.release()

    def epoch(self, schedule: Schedule, rows: int, fingerprint: int) -> Epoch:
        """Return the epoch of a call by kernels, with so many rows of a shard."""
        ends = ends_of(cut(rows, schedule.parts))
        return Epoch(self.channel, self.pieces, fingerprint, ends, self.counters)

    def matrix(self, memory: SymmetricMemory, rank: int, shape: Sequence[int]) -> Tensor:
        """The matrix, of this shape, that ``memory`` has on a rank of this host."""
        elements = torch.Size(shape).numel()
        return memory.peer(rank)[: elements * self.dtype.itemsize].view(self.dtype).view(*shape)

    def places_at_senders(self, ranks: Sequence[int]) -> list[int]:
        """Return where a rank's products for these ranks of other hosts belong at the ranks of this host that send to them:
        rank * ``received_shards`` + shard, where shards for one rank follow each other."""
        hosts = self.group.hosts
        own, senders, places = hosts.local.index(self.rank), Counter[int](), []
        for sender in (hosts.counterpart(rank, hosts.own) for rank in ranks):
            places.append(sender * self.received_shards + senders[sender] * len(hosts.local) + own)
            senders[sender] += 1
        return places

    def rows_of_shards(self, shards: tuple[int, ...], shard_rows: int) -> Tensor:
        """Return int32 [shards * shard_rows]: the rows of these shards, one after the other."""
        rows = torch.arange(shard_rows, dtype=torch.int32, device=self.device)
        return (self._on_device(shards)[:, None] * shard_rows + rows).flatten()

    @lasting
    def _on_device(self, numbers: tuple[int, ...]) -> Tensor:
        if numbers not in self._numbers:
            self._numbers[numbers] = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        return self._numbers[numbers]

    def window_of(self, memory: SymmetricMemory, fingerprint: int) -> ReceiveWindow:
        """Return the window of one call of the channel, in which ranks receive at the beginning of ``memory``."""
        return ReceiveWindow(memory, self.channel, 0, fingerprint)
