"""The symmetric memory of the expert layer, and how much of it there is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.workspace import Workspace, check_counts, check_dtype
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, Routes
from dlrm_fused.ops.moe.activations import Activation
from dlrm_fused.ops.moe.between_hosts import HostBoundary
from dlrm_fused.ops.moe.dispatch import max_rows_of_rank
from dlrm_fused.ops.moe.steps import HostSteps, KernelSteps
from dlrm_fused.symmetric import BlockPool, SymmetricGroup
from dlrm_fused.symmetric.device import round_up, uses_kernels
from dlrm_fused.symmetric.memory import readable

logger = logging.getLogger("dlrm_fused")

# Kernels load and store 16 bytes at a time.
_ROW_BYTES = 16
# Calls whose backward pass is still to come that need no copy of what they received.
_HELD_CALLS = 1
# On GPUs, rows of a tile by how many rows experts have on average, if all tokens are there: from so many on.
_TILE_ROWS = {256: 128, 48: 64, 24: 32, 0: 16}
# The results of tiles of 16 and 32 rows have been compared with others' under the interpreter, not yet on a GPU.
_FEWEST_TILE_ROWS = 16 if triton.knobs.runtime.interpret else 64


@dataclass(frozen=True)
class ExpertMemory:
    """The sizes of a workspace's memory on each rank; all follow from its settings.

    Attributes:
        tile_rows: to which each expert's rows are padded.
        rows: of a receive block, in the worst case; a multiple of ``tile_rows``.
        slots: (token, expert) pairs of a rank and its guests, at most; each has a row of a block of results.
        received_bytes: of a receive block: rows, then destinations.
        destinations_at: byte of it at which the destinations begin.
        combined_bytes: of a block of results.
        symmetric_bytes: of symmetric memory, all in all.
        element_bytes: of an element of a row.
    """

    tile_rows: int
    rows: int
    slots: int
    received_bytes: int
    destinations_at: int
    combined_bytes: int
    symmetric_bytes: int
    element_bytes: int

    def hidden_bytes(self, hidden: int, activation: str = "silu") -> int:
        """Return the bytes of ordinary memory that a call holds until its backward pass, for hidden layers ``hidden`` wide."""
        parts = Activation.named(activation, "hidden_bytes").parts
        return (1 + parts) * self.rows * hidden * self.element_bytes


def expert_memory(
    ranks: int,
    experts: int,
    top_k: int,
    max_tokens: int,
    width: int,
    dtype: torch.dtype,
    *,
    with_kernels: bool,
    served: int = 0,
) -> ExpertMemory:
    """Return the memory of an :class:`ExpertWorkspace` with these settings.

    Args:
        with_kernels: whether kernels run, which want rows in tiles: on GPUs.
        served: ranks of other hosts that a rank serves, at most: the number of these hosts, if all have as many ranks.
    """
    tile_rows = 1
    if with_kernels:
        expected = rows_of_an_expert(ranks, experts, top_k, max_tokens)
        tile_rows = max(_FEWEST_TILE_ROWS, next(tile for least, tile in _TILE_ROWS.items() if expected >= least))
    rows, slots = max_rows_of_rank(ranks, experts, top_k, max_tokens, tile_rows), (1 + served) * max_tokens * top_k
    destinations_at = rows * width * dtype.itemsize
    received_bytes, combined_bytes = destinations_at + rows * 4, slots * width * dtype.itemsize
    counts_bytes, flags_bytes = ranks * experts * 4, 3 * ranks * 8
    # There are blocks of each kind for calls that hold them until their backward passes, and a spare one.
    blocks = (_HELD_CALLS + 1) * (round_up(received_bytes) + round_up(combined_bytes))
    symmetric_bytes = counts_bytes + flags_bytes + blocks
    return ExpertMemory(
        tile_rows, rows, slots, received_bytes, destinations_at, combined_bytes, symmetric_bytes, dtype.itemsize
    )


def rows_of_an_expert(ranks: int, experts: int, top_k: int, max_tokens: int) -> float:
    """Return how many rows an expert has on average, if all tokens are there."""
    return ranks * max_tokens * top_k / experts


class ExpertWorkspace(Workspace):
    """The symmetric memory through which tokens and results travel. Making one is collective; keep it as long as it is used.

    Results of calls whose backward pass is still to come hold memory of the workspace. It has room for one such call; those
    of more are copied to ordinary memory.

    Attributes:
        memory: how much of it there is.
        activation: of the experts.
        boundary: to other hosts, if there are any.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        experts: int,
        top_k: int,
        max_tokens: int,
        width: int,
        dtype: torch.dtype,
        activation: str = "silu",
        timeout_seconds: float = 600.0,
    ) -> None:
        """Collective.

        Args:
            group, name, timeout_seconds: as for :class:`~dlrm_fused.ops.common.workspace.Workspace`.
            experts: of all ranks together; a multiple of the number of ranks.
            top_k: experts of a token.
            max_tokens: of one rank and call.
            width: elements of a token; their bytes must be a multiple of 16.
            dtype: float32, bfloat16 or float16: of tokens, weights and results.
            activation: ``silu``, or ``swiglu``, whose w_in has a matrix for the gates and below it one for what they multiply.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        self.experts, self.top_k, self.max_tokens, self.width, self.dtype = experts, top_k, max_tokens, width, dtype
        self._activation = activation
        super().__init__(group, name, lambda: self._check_settings(group, name), timeout_seconds=timeout_seconds)
        self.activation = Activation.named(activation, name)
        with_kernels = uses_kernels(group.device)
        sizes = group.world_size, experts, top_k, max_tokens, width, dtype
        self.memory = expert_memory(*sizes, with_kernels=with_kernels, served=group.hosts.most_served)
        self.boundary: HostBoundary | None = None
        if group.hosts.are_many:
            self.boundary = HostBoundary(self.channel, experts, top_k, max_tokens, width * dtype.itemsize)
        if group.rank == 0:
            logger.info(
                "expert layer %s: %s of symmetric memory on each rank, for %d rows in the worst case",
                name,
                readable(self.memory.symmetric_bytes),
                self.memory.rows,
            )
        self.counts = group.allocate(f"{name}.counts", group.world_size * experts * 4)
        self.received = BlockPool.with_spare(group, f"{name}.received", self.memory.received_bytes, _HELD_CALLS)
        self.combined = BlockPool.with_spare(group, f"{name}.combined", self.memory.combined_bytes, _HELD_CALLS)
        expected_rows = rows_of_an_expert(group.world_size, experts, top_k, max_tokens)
        self.steps = (KernelSteps if with_kernels else HostSteps)(self.activation, expected_rows)

    @property
    def local_experts(self) -> int:
        return self.experts // self.group.world_size

    @property
    def tiles(self) -> int:
        """Rows of tiles in a receive block, whose order kernels want to know."""
        return self.memory.rows // self.memory.tile_rows if uses_kernels(self.group.device) else 0

    def _release_memory(self) -> None:
        self.group.release(self.counts)
        for blocks in (self.received, self.combined):
            blocks.release()

    def rows_of(self, received: Tensor) -> Tensor:
        """Return [R, d]: the rows in a receive block."""
        return received[: self.memory.destinations_at].view(self.dtype).view(self.memory.rows, self.width)

    def destinations_of(self, received: Tensor) -> Tensor:
        """Return int32 [R]: the destinations in a receive block."""
        return received[self.memory.destinations_at : self.memory.received_bytes].view(torch.int32)

    def to_tokens(self, received: Tensor, groups: Groups) -> Routes:
        """Return the places to which the results of the rows in a receive block belong."""
        return Routes(groups, self.destinations_of(received), self.memory.slots)

    def slots_of(self, combined: Tensor) -> Tensor:
        """Return [slots, d]: the rows in a block of results."""
        return combined[: self.memory.combined_bytes].view(self.dtype).view(self.memory.slots, self.width)

    def _check_settings(self, group: SymmetricGroup, name: str) -> Mapping[str, object]:
        """Raises UsageError; returns what must be equal on all ranks."""
        check_dtype(name, self.dtype)
        Activation.named(self._activation, name)
        settings = {key: getattr(self, key) for key in ("experts", "top_k", "max_tokens", "width")}
        check_counts(name, **settings)
        ranks = group.world_size
        if self.experts % ranks:
            raise UsageError(f"{name}: experts={self.experts}; needed: a multiple of the {ranks} ranks")
        if self.top_k > self.experts:
            raise UsageError(f"{name}: top_k={self.top_k}; needed: at most experts={self.experts}")
        check_row(name, "width", self.width, self.dtype)
        rows = ranks * max_rows_of_rank(ranks, self.experts, self.top_k, self.max_tokens, max(_TILE_ROWS.values()))
        rows = max(rows, ranks * (1 + group.hosts.most_served) * self.max_tokens * self.top_k)
        if rows >= 2**31:
            raise UsageError(f"{name}: max_tokens={self.max_tokens}: {rows} rows of all ranks; needed: less than 2**31")
        return {"name": name, "dtype": self.dtype, "activation": self._activation, **settings}


def check_row(name: str, key: str, elements: int, dtype: torch.dtype) -> None:
    if elements < 1 or elements * dtype.itemsize % _ROW_BYTES:
        raise UsageError(f"{name}: {key}={elements}; needed: a multiple of {_ROW_BYTES // dtype.itemsize}, 16 bytes")
