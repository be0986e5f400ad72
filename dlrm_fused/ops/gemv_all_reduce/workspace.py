"""The symmetric memory of GEMV + AllReduce."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace
from dlrm_fused.ops.common.schedules import Shape
from dlrm_fused.ops.common.sum_over_hosts import SumOverHosts
from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.ops.gemv_all_reduce.kernel import ReceiveBuffer, SplitBuffer, poll
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_COLUMNS, MAX_ROWS, MAX_SPLITS, MIN_COLUMNS, TAGGED_SPLIT_ROWS, padded
from dlrm_fused.ops.schedules import MOST_PIECES
from dlrm_fused.ops.schedules.piece_flags import PieceFlags
from dlrm_fused.symmetric import BlockPool, SymmetricGroup
from dlrm_fused.symmetric.device import polls_per_second, uses_kernels
from dlrm_fused.symmetric.launches import ceil_div

_HELD_RESULTS = 2


class Inputs(NamedTuple):
    """The inputs of :func:`gemv_all_reduce`; all tensors begin at multiples of 16 bytes."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float

    @property
    def shape(self) -> Shape:
        """Rows, columns and K of the product."""
        return len(self.x), len(self.weight), self.x.shape[1]

    def fingerprint(self, how: Hashable) -> int:
        """Return a checksum, of 31 bits, of what must be equal on all ranks; ``how`` the call is made, too."""
        given = tuple(tensor is not None for tensor in (self.bias, self.residual, self.norm_weight))
        return fingerprint_of(tuple(self.x.shape), tuple(self.weight.shape), self.x.dtype, given, self.norm_eps, how)


class GemvWorkspace(MatrixWorkspace):
    """The symmetric memory through which partial results are summed. Making one is collective; calls may share it."""

    _counts_rows_of_all_ranks = False

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        max_columns: int,
        dtype: torch.dtype,
        max_rows: int = MAX_ROWS,
        timeout_seconds: float = 600.0,
        measures_schedules: bool = True,
    ) -> None:
        """Collective.

        Args:
            group, name, timeout_seconds: as for :class:`~dlrm_fused.ops.common.workspace.Workspace`.
            max_columns: the largest N.
            dtype: float32, bfloat16 or float16.
            max_rows: the largest m. The memory for it is allocated here: for up to 64 rows on GPUs about
                1.5 kB * (ranks + 3) * max_columns, for more of them four times the result besides. NCCL, between hosts,
                needs none.
            measures_schedules: whether ``auto`` may measure a shape that it meets for the first time, on GPUs.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        super().__init__(
            group,
            name=name,
            max_rows=max_rows,
            max_columns=max_columns,
            dtype=dtype,
            timeout_seconds=timeout_seconds,
            measures_schedules=measures_schedules,
        )
        ranks, few = group.world_size, min(max_rows, MAX_ROWS)
        self.schedules = self.schedules_of("gemv_all_reduce")
        # Kernels sum what they reach by stores.
        self.sums_by_kernel = uses_kernels(group.device) and not group.hosts.are_many
        if self.sums_by_kernel:
            # Slots of words for each rank and for finished sums, the same for values of at most half a word, flags of the
            # narrowest tiles, and handshake.
            self.slot_words = few * max_columns
            self.flags_at = (ranks + 1) * (self.slot_words + ceil_div(self.slot_words, 2))
            most_tiles = ceil_div(max_columns, MIN_COLUMNS)
            self.half_words = self.flags_at + (ranks + 1) * most_tiles + ranks
            self.receive_buffer = group.allocate(f"{name}.receive_buffer", 2 * self.half_words * 8)
            poll_limit = math.ceil(timeout_seconds * polls_per_second(group.device, poll))
            self.kernel_args = self.channel.args._replace(poll_limit=poll_limit)
            self.split_buffer = split_buffer(few, max_columns, most_tiles, group.device)
            self.squares = torch.empty(MAX_ROWS * max_columns, dtype=torch.float32, device=group.device)
            if max_rows > MAX_ROWS:
                # Products of ranks, and their sums.
                self.parts = group.allocate(f"{name}.parts", max_rows * max_columns * dtype.itemsize)
                self.results = BlockPool.with_spare(group, f"{name}.results", self.parts.size, _HELD_RESULTS)
                # Copy engines move pieces of products, and of sums.
                self.pieces = PieceFlags(self.channel, f"{name}.pieces", 2 * MOST_PIECES, has_own_channel=False)
        elif not self.channel.is_by_nccl:
            self.sums = SumOverHosts(group, self.channel, f"{name}.sums", max_rows * max_columns, wire=dtype)

    def _release_memory(self) -> None:
        if not self.sums_by_kernel:
            if not self.channel.is_by_nccl:
                self.sums.release()
            return
        self.group.release(self.receive_buffer)
        if self.max_rows > MAX_ROWS:
            self.group.release(self.parts)
            self.results.release()
            self.pieces.release()

    def buffer_args(self, *, flagged: bool) -> ReceiveBuffer:
        """The layout of the receive buffer for the kernel; ``flagged`` values have a place of their own."""
        parts_at, slot_words = 0, self.slot_words
        if flagged:
            parts_at, slot_words = (self.world_size + 1) * slot_words, ceil_div(slot_words, 2)
        return ReceiveBuffer(
            self.receive_buffer.local.view(torch.int64),
            self.receive_buffer.addresses,
            self.half_words,
            parts_at,
            parts_at + self.world_size * slot_words,
            self.flags_at,
        )


def split_buffer(rows: int, columns: int, tiles: int, device: torch.device) -> SplitBuffer:
    """Return a buffer for products of up to ``rows`` rows and ``columns`` columns, in up to ``tiles`` tiles."""
    slots = MAX_SPLITS - 1
    # The last tile may be wider than what is left of the columns.
    elements = padded(rows) * (columns + MAX_COLUMNS)
    return SplitBuffer(
        torch.zeros(slots * min(rows, TAGGED_SPLIT_ROWS) * columns, dtype=torch.int64, device=device),
        torch.empty(slots * elements, dtype=torch.float32, device=device),
        torch.zeros(slots * tiles, dtype=torch.int64, device=device),
    )
