"""The symmetric memory in which rows are received, and who asks whom for how many of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.common.workspace import Workspace, asked_of_all_ranks, check_counts, check_dtype
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import round_up, uses_kernels

# A kernel's loads and stores of a row have so many bytes.
_ROW_BYTES = 16
# Memory is made larger by more than is needed, so that batches which grow little by little do not make it anew every time.
_SPARE = 1.25
_FINGERPRINTS = 2**31 - 1


@dataclass(frozen=True)
class Counts:
    """The rows that this rank and every other one ask each other for, in one call.

    Attributes:
        asked: [ranks]: that this rank asks each one for.
        sent: [ranks]: that each one asks this one for.
        first_rows: [ranks]: where this rank's rows begin among those that each one receives.
        most_rows: the most that a rank receives, forward or backward; at least 1, and equal on all ranks.
        fingerprint: equal on ranks that agree on all counts.
    """

    asked: tuple[int, ...]
    sent: tuple[int, ...]
    first_rows: tuple[int, ...]
    most_rows: int
    fingerprint: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """Return those of :func:`numbers_of`, or :attr:`numbers`."""
        ranks = len(numbers) // 3
        asked, sent, first_rows = (tuple(numbers[i * ranks : (i + 1) * ranks]) for i in range(3))
        return cls(asked, sent, first_rows, *numbers[3 * ranks :])

    @classmethod
    def between(cls, asked: Sequence[Sequence[int]], rank: int) -> Self:
        """Return those of a rank, as :func:`numbers_of` finds them, from numbers that the host has.

        In Python alone: a compiler that traces the call knows them then.

        Args:
            asked: [ranks][ranks]: how many rows rank i asks rank j for.
        """
        of_ranks = [[int(number) for number in of_rank] for of_rank in asked]
        to_ranks = [list(column) for column in zip(*of_ranks, strict=True)]
        most = max(1, *(sum(numbers) for numbers in (*of_ranks, *to_ranks)))
        in_order = itertools.chain.from_iterable(of_ranks)
        fingerprint = sum(number * place % _FINGERPRINTS for place, number in enumerate(in_order, start=1)) % _FINGERPRINTS
        first_rows = tuple(sum(of_rank[:rank]) for of_rank in of_ranks)
        return cls(tuple(of_ranks[rank]), tuple(to_ranks[rank]), first_rows, most, fingerprint)

    @property
    def numbers(self) -> list[int]:
        """[3 * ranks + 2], as an operator of PyTorch takes them."""
        return [*self.asked, *self.sent, *self.first_rows, self.most_rows, self.fingerprint]

    @cached_property
    def received_bounds(self) -> list[int]:
        """[ranks + 1], where the rows of each rank begin among those that this one asked for, and the end."""
        return [0, *itertools.accumulate(self.asked)]

    @cached_property
    def sent_bounds(self) -> list[int]:
        """[ranks + 1], where those of each asking rank begin in the order of what this one was asked for, and the end."""
        return [0, *itertools.accumulate(self.sent)]


def numbers_of(asked: Tensor, rank: int) -> Tensor:
    """Return the counts of a rank as numbers, int64 [3 * ranks + 2]; see :class:`Counts`.

    Args:
        asked: int64 [ranks, ranks]: how many rows rank i asks rank j for.
    """
    most = torch.maximum(asked.sum(0).max(), asked.sum(1).max()).clamp_(min=1)
    # Numbers of different places count differently, and the sum stays within 31 bits.
    places = torch.arange(1, asked.numel() + 1, device=asked.device)
    fingerprint = (asked.flatten() * places % _FINGERPRINTS).sum() % _FINGERPRINTS
    return torch.cat([asked[rank], asked[:, rank], asked[:, :rank].sum(1), torch.stack([most, fingerprint])])


class SequenceWorkspace(Workspace):
    """The memory in which rows, and backward their gradients, are received. Making one is collective.

    It grows, collectively, with the largest number of rows that a rank receives. Outputs are the callers' as long as a tensor
    uses them; those beyond ``held_outputs`` are copied to ordinary memory.

    Attributes:
        table: all attached tables as one, which backward passes update; None if there are none.
        feature_first_rows: int64 [features], the first row of the table that each of them reads.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        width: int,
        *,
        name: str,
        output_dtype: torch.dtype = torch.float32,
        forward_wire: torch.dtype = torch.float32,
        backward_wire: torch.dtype = torch.float32,
        timeout_seconds: float = 600.0,
        held_outputs: int = 2,
    ) -> None:
        """Collective.

        Args:
            group, name, timeout_seconds: as for :class:`~dlrm_fused.ops.common.workspace.Workspace`.
            width: elements of a row; on GPUs their bytes on the wire must be a multiple of 16.
            output_dtype: float32, bfloat16 or float16: of the rows, of the output and of its gradient.
            forward_wire, backward_wire: the same: in which rows, and their gradients, travel.
            held_outputs: outputs that may be alive at once without a copy.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        self.width, self.output_dtype, self.held_outputs = width, output_dtype, held_outputs
        self.forward_wire, self.backward_wire = forward_wire, backward_wire
        super().__init__(group, name, lambda: self._checked(group, name), timeout_seconds=timeout_seconds)
        # Gives the lookup something to differentiate, also on a rank without tables.
        self.anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.table: LocalTables | None = None
        self.feature_first_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self._most_rows = 0
        self._pool: BlockPool | None = None

    def _checked(self, group: SymmetricGroup, name: str) -> Mapping[str, object]:
        """Return what must be equal on all ranks; raises UsageError."""
        check_counts(name, width=self.width, held_outputs=self.held_outputs)
        for dtype in (self.output_dtype, self.forward_wire, self.backward_wire):
            check_dtype(name, dtype)
            if uses_kernels(group.device) and self.width * dtype.itemsize % _ROW_BYTES:
                raise UsageError(
                    f"{name}: width={self.width}; needed in {dtype}: a multiple of {_ROW_BYTES // dtype.itemsize}, 16 bytes"
                )
        keys = ("width", "output_dtype", "forward_wire", "backward_wire", "held_outputs")
        return {key: getattr(self, key) for key in keys}

    @lasting
    def attach_tables(self, tables: Sequence[LocalTables]) -> None:
        """Name the tables of this rank, those of one lookup or none. Rows are counted on over all of them.

        Raises:
            UsageError: if they are of several lookups, or do not lie behind each other in rows of the workspace's width.
        """
        if len(tables) > 1:
            raise UsageError(f"{self.name}: tables of {len(tables)} lookups; needed: of one, or none")
        self.table = _as_one(tables[0], self.width, self.name) if tables else None
        of_features = [own.first_rows[table] for own in tables for table in own.feature_tables]
        self.feature_first_rows = torch.tensor(of_features, dtype=torch.int64).to(self.device)

    def counts(self, asked: Sequence[Sequence[int]]) -> Counts:
        """Return the counts of a call.

        Args:
            asked: [ranks][ranks]: rows that rank i asks rank j for; equal on all ranks.

        Raises:
            UsageError: if there is not a number, at least 0, for each two ranks.
        """
        ranks = self.world_size
        if len(asked) != ranks or any(len(of_rank) != ranks or min(of_rank) < 0 for of_rank in asked):
            raise UsageError(
                f"{self.name}: counts={list(asked)}; needed: {ranks} numbers, at least 0, for each of {ranks} ranks"
            )
        return Counts.between(asked, self.rank)

    def checks(self, counts: Counts) -> AbstractContextManager[None]:
        """Return a context for the checks of a call. When one of them raises UsageError, no rank goes on.

        Where the counts need more memory, all ranks are asked before it is allocated.
        """
        if self._pool is None or counts.most_rows > self._most_rows:
            return asked_of_all_ranks(self, "most rows and checksum of counts", (counts.most_rows, counts.fingerprint))
        return abort_peers_on_error(self.channel)

    def pool(self, counts: Counts) -> BlockPool:
        """Return the memory for a call, which all ranks make larger where it has too few rows."""
        if self._pool is None or counts.most_rows > self._most_rows:
            self._pool = self._allocated(int(counts.most_rows * _SPARE))
        return self._pool

    @lasting
    def _allocated(self, rows: int) -> BlockPool:
        self.channel.assemble()
        torch.get_device_module(self.device).synchronize(self.device)
        self._release_memory()
        self._most_rows = rows
        # A block for a gradient beside the outputs that are held.
        return BlockPool.with_spare(self.group, f"{self.name}: rows", self.block_bytes, self.held_outputs + 1)

    @property
    def block_bytes(self) -> int:
        """Bytes in which a rank receives in one call."""
        return self.places_at(self._most_rows) + 4 * self._most_rows

    def destinations_at(self, rows: int) -> int:
        """Return the byte of a block behind so many rows, whatever wire they come by."""
        return round_up(rows * self.width * max(self.forward_wire.itemsize, self.backward_wire.itemsize))

    def places_at(self, rows: int) -> int:
        """Return the byte of a block behind the destinations of so many rows."""
        return self.destinations_at(rows) + 4 * rows

    def _release_memory(self) -> None:
        if self._pool is not None:
            self._pool.release()
            self._pool = None


def _as_one(tables: LocalTables, width: int, name: str) -> LocalTables:
    """Return tables that lie behind each other as one: so their rows, and the states of their optimizer, are numbered."""
    begin = tables.offsets[0] if tables.offsets else 0
    expected = tuple(begin + first * width for first in tables.first_rows)
    if any(dim != width for dim in tables.dims) or tables.offsets != expected:
        raise UsageError(
            f"{name}: tables of dims {tables.dims} at {tables.offsets}; needed: rows of {width} elements, one behind the other"
        )
    return replace(tables, offsets=(begin,), rows=(tables.total_rows,), dims=(width,), feature_tables=(0,), mean=False)
