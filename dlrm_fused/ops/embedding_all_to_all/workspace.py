"""The All-to-All of pooled embeddings between the ranks that hold the tables and those that hold the batches.

An :class:`EmbeddingWorkspace` is made once for one embedding module and names, for every rank, which columns of the output its
lookups produce. It owns the symmetric memory in which the ranks store each other's results, and what the kernels need to know
of where things go. The operators in this package refer to it by its ``handle``.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.workspace import Workspace
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import PrefetchedSort
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, SymmetricMemory

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 4096  # bytes: what a ready word can express
# Batch sizes whose tables are kept: a training and an evaluation batch and their uneven last ones.
_KEPT_BATCH_PLANS = 64


@dataclass(frozen=True)
class LookupLayout:
    """What one lookup of one rank produces.

    Attributes:
        columns: first column in the output of each of its features.
        dims: width of each feature.
        row_wise: its results are partial sums: every rank has a lookup with the same columns, and the destination adds them
            in the order of ranks.
    """

    columns: tuple[int, ...]
    dims: tuple[int, ...]
    row_wise: bool = False

    @property
    def width(self) -> int:
        """Columns of its own result."""
        return sum(self.dims)

    def runs(self) -> list[tuple[int, int, int]]:
        """(column in the result, column in the output, width) of the longest stretches that lie side by side in both."""
        merged: list[tuple[int, int, int]] = []
        source = 0
        for column, dim in zip(self.columns, self.dims, strict=True):
            if merged and merged[-1][1] + merged[-1][2] == column:
                begin, first, width = merged.pop()
                merged.append((begin, first, width + dim))
            else:
                merged.append((source, column, dim))
            source += dim
        return merged


@dataclass(frozen=True)
class ExchangeLayout:
    """The lookups of every rank, in order, and the number of columns of the output."""

    lookups: tuple[tuple[LookupLayout, ...], ...]
    columns: int

    def check(self, world_size: int) -> None:
        """Raise UsageError unless every column is produced exactly once, or by all ranks in row-wise lookups."""
        if len(self.lookups) != world_size:
            raise UsageError(f"layout.lookups has {len(self.lookups)} ranks, the process group {world_size}")
        producers = [0] * self.columns
        for rank, lookups in enumerate(self.lookups):
            for number, lookup in enumerate(lookups):
                _check_lookup(lookup, f"layout.lookups[{rank}][{number}]", self.columns)
                for column, dim in zip(lookup.columns, lookup.dims, strict=True):
                    for i in range(column, column + dim):
                        producers[i] += 1 if not lookup.row_wise else world_size**2 + 1
        row_wise = [[lookup for lookup in lookups if lookup.row_wise] for lookups in self.lookups]
        for rank, partial in enumerate(row_wise):
            if partial != row_wise[0]:
                raise UsageError(
                    f"layout.lookups[{rank}]: its row-wise lookups differ from those of rank 0; they must be equal"
                )
        for column, count in enumerate(producers):
            if count not in (1, world_size * (world_size**2 + 1)):
                raise UsageError(
                    f"layout: column {column} of the output is produced {count % (world_size**2 + 1)} times, not once"
                )

    @property
    def row_wise_columns(self) -> int:
        """Columns that arrive as partial sums."""
        return sum(lookup.width for lookup in self.lookups[0] if lookup.row_wise)

    def width(self, rank: int) -> int:
        """Columns of all results of a rank."""
        return sum(lookup.width for lookup in self.lookups[rank])

    @property
    def row_wise_features(self) -> int:
        """Features that arrive as partial sums."""
        return sum(len(lookup.dims) for lookup in self.lookups[0] if lookup.row_wise)

    def first_row_wise_feature(self, rank: int, lookup: int) -> int:
        """Number of a lookup's first feature among those that arrive as partial sums."""
        return sum(len(other.dims) for other in self.lookups[rank][:lookup] if other.row_wise)

    def destination_columns(self, rank: int, lookup: int) -> tuple[int, ...]:
        """First column of each feature of a lookup where it is received: in the output, or among the partial sums."""
        own = self.lookups[rank]
        if not own[lookup].row_wise:
            return own[lookup].columns
        first = sum(other.width for other in own[:lookup] if other.row_wise)
        return tuple(itertools.accumulate(own[lookup].dims[:-1], initial=first))


def _check_lookup(lookup: LookupLayout, name: str, columns: int) -> None:
    if len(lookup.columns) != len(lookup.dims):
        raise UsageError(f"{name}: {len(lookup.columns)} columns but {len(lookup.dims)} dims")
    for column, dim in zip(lookup.columns, lookup.dims, strict=True):
        if dim <= 0 or dim % 4 or column % 4:
            raise UsageError(f"{name}: column={column}, dim={dim}; both must be multiples of 4, and dim positive")
        if column < 0 or column + dim > columns:
            raise UsageError(f"{name}: columns {column} to {column + dim} lie outside the output's {columns}")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a local tensor that belong at one place in a peer's memory."""

    peer: int
    source_row: int
    source_column: int
    offset: int  # bytes into the peer's memory
    stride: int  # elements between rows there
    width: int
    rows: int
    item_size: int  # bytes of an element there


# Columns of a program's tile.
TILE_COLUMNS = 512
# Bags of a feature, in the bytes that tell which partial sums are not empty, are rounded up to it.
PRESENCE_UNIT = 16


def tile_table(tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """The tiles as the kernel wants them: int64 [n, 7], none wider than a tile, fields in their order."""
    narrow = [
        replace(
            tile,
            source_column=tile.source_column + begin_column,
            offset=tile.offset + begin_column * tile.item_size,
            width=min(TILE_COLUMNS, tile.width - begin_column),
        )
        for tile in tiles
        for begin_column in range(0, tile.width if tile.rows else 0, TILE_COLUMNS)
    ]
    rows = [astuple(tile)[:7] for tile in narrow]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 7).to(device, non_blocking=True)


@dataclass(frozen=True)
class FeatureTable:
    """Features of one lookup whose dims have the same next power of two.

    Attributes:
        table: int64 [count, 4]: number of the feature in the lookup, first element of its table (where partial sums are added
            up: its column among them), dim, column at the destination.
        vector: elements, 4 or 8, that divide dims, columns and first elements.
        is_exact: all dims equal block_dim.
    """

    table: Tensor
    count: int
    block_dim: int
    vector: int
    is_exact: bool


def feature_tables(
    sources: Sequence[int], dims: Sequence[int], columns: Sequence[int], device: torch.device
) -> list[FeatureTable]:
    """What a kernel needs to know of each feature, by block dim: where it is read, its dim, and its destination's column."""
    by_block: dict[int, list[tuple[int, int, int, int]]] = {}
    for feature, (source, dim, column) in enumerate(zip(sources, dims, columns, strict=True)):
        by_block.setdefault(1 << (dim - 1).bit_length(), []).append((feature, source, dim, column))
    return [
        FeatureTable(
            table=torch.tensor(rows, dtype=torch.int64, device=device),
            count=len(rows),
            block_dim=block_dim,
            vector=8 if all(value % 8 == 0 for row in rows for value in row[1:]) else 4,
            is_exact=all(dim == block_dim for _, _, dim, _ in rows),
        )
        for block_dim, rows in sorted(by_block.items())
    ]


def _view(memory: SymmetricMemory, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return memory.local[offset : offset + size].view(dtype).view(shape)


class EmbeddingWorkspace(Workspace):
    """Where pooled embeddings and their gradients go, and the memory they are received in. Making one is collective.

    Args:
        group: the ranks that take part.
        layout: equal on all ranks.
        name: for messages; equal on all ranks, and not used by another workspace of the group.
        forward_wire: dtype in which pooled embeddings travel: float32, bfloat16 or float16. The output is float32.
        backward_wire: the same for the gradients.
        gradient_scale: factor of the gradients that the tables get.
        timeout_seconds: how long a rank waits for another.
        held_outputs: outputs that may be alive at once without a copy. Further ones are copied out of the symmetric memory.
        check_indices: compare every index with the number of rows before each lookup; slow, for debugging.

    Raises:
        UsageError: on all ranks, if the layout does not cover the output, differs between ranks, or an argument is wrong.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        layout: ExchangeLayout,
        *,
        name: str,
        forward_wire: torch.dtype = torch.float32,
        backward_wire: torch.dtype = torch.float32,
        gradient_scale: float = 1.0,
        timeout_seconds: float = 600.0,
        held_outputs: int = 2,
        check_indices: bool = False,
    ) -> None:
        settings = {
            "layout": layout,
            "forward_wire": forward_wire,
            "backward_wire": backward_wire,
            "gradient_scale": gradient_scale,
            "held_outputs": held_outputs,
            "check_indices": check_indices,
        }
        super().__init__(
            group,
            name,
            lambda: _checked(settings, name, group.world_size),
            timeout_seconds=timeout_seconds,
            channels=("forward", "backward"),
        )
        self.forward_channel, self.backward_channel = self.channels
        self.layout = layout
        self.forward_wire, self.backward_wire = forward_wire, backward_wire
        self.gradient_scale = gradient_scale
        self.held_outputs = held_outputs
        self.check_indices = check_indices
        self.own_lookups = layout.lookups[self.rank]
        # Gives the operators something to differentiate, also on a rank without tables.
        self.anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.tables: tuple[LocalTables, ...] = ()
        self._feature_tables: list[list[FeatureTable]] = []
        self._buffers: Buffers | None = None
        # Graphs hold the addresses of buffers for ever.
        self._is_captured = False
        self._plans: dict[tuple[int, ...], BatchPlan] = {}

    def attach_tables(self, tables: Sequence[LocalTables]) -> None:
        """Name the tables of this rank's lookups, in their order.

        Raises:
            UsageError: if they do not match the layout.
        """
        if len(tables) != len(self.own_lookups):
            raise UsageError(f"{self.name}: {len(tables)} groups of tables for {len(self.own_lookups)} lookups of the layout")
        for number, (own, lookup) in enumerate(zip(tables, self.own_lookups, strict=True)):
            dims = tuple(own.dims[table] for table in own.feature_tables)
            if dims != lookup.dims:
                raise UsageError(f"{self.name}: tables[{number}] gives features of dims {dims}, the layout {lookup.dims}")
            if own.weights.device.type != self.device.type:
                raise UsageError(f"{self.name}: tables[{number}] is on {own.weights.device}, the workspace on {self.device}")
            if lookup.row_wise and own.mean:
                raise UsageError(
                    f"{self.name}: tables[{number}] is row-wise with mean pooling; divide the sum at the destination"
                )
        self.tables = tuple(tables)
        self._feature_tables = [
            feature_tables(
                tuple(own.offsets[table] for table in own.feature_tables),
                self.own_lookups[number].dims,
                self.layout.destination_columns(self.rank, number),
                self.device,
            )
            for number, own in enumerate(tables)
        ]

    def feature_tables(self, lookup: int) -> list[FeatureTable]:
        """The features of a lookup of this rank for the kernel, one table for each block dim."""
        return self._feature_tables[lookup]

    @cached_property
    def partial_sum_tables(self) -> list[FeatureTable]:
        """The features that arrive as partial sums, for the kernel that adds these up."""
        row_wise = [lookup for lookup in self.own_lookups if lookup.row_wise]
        dims = [dim for lookup in row_wise for dim in lookup.dims]
        columns = [column for lookup in row_wise for column in lookup.columns]
        return feature_tables(tuple(itertools.accumulate(dims, initial=0))[:-1], dims, columns, self.device)

    @cached_property
    def _sort_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prefetch_sort(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> PrefetchedSort:
        """Begin to sort the indices of this rank's lookups, for the backward pass."""
        return PrefetchedSort(self.tables, indices, offsets, self._sort_stream)

    def plan(self, batch_sizes: Sequence[int]) -> BatchPlan:
        """What depends on the batch sizes of all ranks.

        Raises:
            UsageError: if there is not one size for each rank.
        """
        key = tuple(batch_sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(key) != self.world_size or min(key) < 0:
                raise UsageError(
                    f"{self.name}: batch_sizes={list(key)}; needed: one size, at least 0, for each of {self.world_size} ranks"
                )
            if len(self._plans) >= _KEPT_BATCH_PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = self._plans[key] = BatchPlan(self, key)
        return plan

    def reserve(self, batch_sizes: Sequence[int]) -> None:
        """Have memory for batches of these sizes. Collective when they are larger than any before, else nothing happens."""
        self.buffers(self.plan(batch_sizes))

    def has_room(self, batch_sizes: Sequence[int]) -> bool:
        """Whether batches of these sizes need no more memory, which is true of wrong sizes unless there is none yet."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True  # or an error, when the memory is asked for
        try:
            return self._buffers is not None and self._buffers.hold(self.plan(batch_sizes))
        except UsageError:
            return self._buffers is not None

    def buffers(self, plan: BatchPlan) -> Buffers:
        """The memory to receive in, large enough for the plan. Collective when it has to grow.

        Raises:
            UsageError: if it would have to grow while a CUDA graph is captured.
        """
        if self._buffers is None or not self._buffers.hold(plan):
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    f"{self.name}: batch_sizes={list(plan.batch_sizes)} need more memory, which cannot be had while a CUDA "
                    "graph is captured; call reserve(batch_sizes) with the largest batches before"
                )
            if self._buffers is not None and not self._is_captured:
                self._buffers.release(self.group)
            self._buffers = Buffers(self, plan)
        self._is_captured |= self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._buffers


def _checked(settings: Mapping[str, Any], name: str, world_size: int) -> dict[str, object]:
    """What must be equal on all ranks. Raises UsageError if a setting is wrong."""
    layout = settings["layout"]
    if not isinstance(layout, ExchangeLayout):
        raise UsageError(f"{name}: layout={layout!r}; needed: an ExchangeLayout")
    layout.check(world_size)
    for key in ("forward_wire", "backward_wire"):
        if settings[key] not in WIRE_DTYPES:
            raise UsageError(f"{name}: {key}={settings[key]}; allowed: float32, bfloat16, float16")
    if not 0 < settings["gradient_scale"] < math.inf:
        raise UsageError(f"{name}: gradient_scale={settings['gradient_scale']}; needed: a positive number")
    held_outputs = settings["held_outputs"]
    if not isinstance(held_outputs, int) or held_outputs < 1:
        raise UsageError(f"{name}: held_outputs={held_outputs}; needed: at least 1")
    lookups = {
        f"layout.lookups[{rank}][{number}]": lookup
        for rank, lookups in enumerate(layout.lookups)
        for number, lookup in enumerate(lookups)
    }
    return {**settings, "layout": f"{layout.columns} columns", **lookups}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class BatchPlan:
    """What depends on the batch sizes: where everything lies, and the tables that tell kernels so.

    Attributes:
        batch_sizes: bags of each rank.
        starts: first bag of each rank in the global batch, and the end.
        fingerprint: equal on ranks that agree on the batch sizes.
    """

    def __init__(self, workspace: EmbeddingWorkspace, batch_sizes: tuple[int, ...]) -> None:
        self._layout, self._rank = workspace.layout, workspace.rank
        self.batch_sizes = batch_sizes
        self.starts = (0, *itertools.accumulate(batch_sizes))
        self.local_batch = batch_sizes[workspace.rank]
        self.global_batch = self.starts[-1]
        # 30 bits, so that a kernel's argument has the same type for all batches.
        self.fingerprint = zlib.crc32(repr(batch_sizes).encode()) >> 2
        self._forward_dtype, self._backward_dtype = workspace.forward_wire, workspace.backward_wire
        self._wire, self._gradient_wire = workspace.forward_wire.itemsize, workspace.backward_wire.itemsize
        self._device = workspace.device
        self._pooled_tables: dict[int, Tensor] = {}
        self._bag_tables: dict[int, Tensor] = {}
        self.is_staged = workspace.forward_wire != torch.float32

    @cached_property
    def rotation(self) -> tuple[int, ...]:
        """Destinations in the order in which this rank serves them: the next rank first, itself last."""
        world = len(self.batch_sizes)
        return tuple((self._rank + 1 + i) % world for i in range(world))

    def output_size(self, rank: int) -> int:
        """Bytes of a rank's output."""
        return self.batch_sizes[rank] * self._layout.columns * 4

    def partial_sums_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where the partial sums of rank 0 begin."""
        return _aligned(self.batch_sizes[rank] * self._layout.columns * self._wire) if self.is_staged else 0

    def staging_size(self, rank: int) -> int:
        """Bytes that a rank needs for what does not travel straight into the output."""
        presence = len(self.batch_sizes) * self._layout.row_wise_features * self.presence_stride(rank)
        return self.presence_offset(rank) + presence

    def presence_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where it is told which partial sums are not empty."""
        partial_sums = len(self.batch_sizes) * self.batch_sizes[rank] * self._layout.row_wise_columns * self._wire
        return self.partial_sums_offset(rank) + _aligned(partial_sums)

    def presence_stride(self, rank: int) -> int:
        """Bytes between the features there: one for each bag, rounded up."""
        return -(-self.batch_sizes[rank] // PRESENCE_UNIT) * PRESENCE_UNIT

    def gradients_size(self, rank: int) -> int:
        """Bytes of the gradients of all lookups of a rank."""
        return sum(_aligned(self.global_batch * lookup.width * self._gradient_wire) for lookup in self._layout.lookups[rank])

    def gradients_offset(self, rank: int, lookup: int) -> int:
        """Byte where the gradients [global batch, width] of a rank's lookup begin."""
        before = self._layout.lookups[rank][:lookup]
        return sum(_aligned(self.global_batch * other.width * self._gradient_wire) for other in before)

    def destination(self, lookup: int, peer: int) -> tuple[int, int]:
        """Where a peer receives a lookup of this rank: byte offset of its first row, elements between rows.

        In the output, to whose offset it is relative, or in the staging memory; see :meth:`goes_to_staging`.
        """
        if not self._layout.lookups[self._rank][lookup].row_wise:
            return 0, self._layout.columns
        stride = self._layout.row_wise_columns
        return self.partial_sums_offset(peer) + self._rank * self.batch_sizes[peer] * stride * self._wire, stride

    def goes_to_staging(self, lookup: int) -> bool:
        """Whether a lookup of this rank is received in staging memory, not in the output itself."""
        return self.is_staged or self._layout.lookups[self._rank][lookup].row_wise

    def pooled_tiles(self, lookup: int) -> list[Tile]:
        """What of a lookup's result [global batch, width] goes where."""
        own = self._layout.lookups[self._rank][lookup]
        columns = self._layout.destination_columns(self._rank, lookup)
        runs = LookupLayout(columns, own.dims).runs()
        tiles = []
        for peer in self.rotation:
            offset, stride = self.destination(lookup, peer)
            for source, column, width in runs:
                place = offset + column * self._wire
                tiles.append(Tile(peer, self.starts[peer], source, place, stride, width, self.batch_sizes[peer], self._wire))
        return tiles

    def pooled_table(self, lookup: int) -> Tensor:
        """:meth:`pooled_tiles` for the kernel."""
        if lookup not in self._pooled_tables:
            self._pooled_tables[lookup] = tile_table(self.pooled_tiles(lookup), self._device)
        return self._pooled_tables[lookup]

    def bag_table(self, lookup: int) -> Tensor:
        """What the lookup kernel needs to know of the ranks.

        int64 [3 * ranks + 1]: the first bag of each rank and the end, the byte where each rank receives the lookup, and the
        byte where it is told which partial sums are not empty.
        """
        if lookup not in self._bag_tables:
            peers = range(len(self.batch_sizes))
            bases = [self.destination(lookup, peer)[0] for peer in peers]
            first, features = self._layout.first_row_wise_feature(self._rank, lookup), self._layout.row_wise_features
            presence = [
                self.presence_offset(peer) + (self._rank * features + first) * self.presence_stride(peer) for peer in peers
            ]
            self._bag_tables[lookup] = torch.tensor([*self.starts, *bases, *presence]).to(self._device, non_blocking=True)
        return self._bag_tables[lookup]

    @cached_property
    def gradient_table(self) -> Tensor:
        """:meth:`gradient_tiles` for the kernel."""
        return tile_table(self.gradient_tiles(), self._device)

    @cached_property
    def empty_table(self) -> Tensor:
        """No tile."""
        return tile_table([], self._device)

    def gradient_tiles(self) -> list[Tile]:
        """What of the output's gradient [local batch, columns] goes where."""
        tiles = []
        for peer in self.rotation:
            for number, lookup in enumerate(self._layout.lookups[peer]):
                begin = self.gradients_offset(peer, number) + self.starts[self._rank] * lookup.width * self._gradient_wire
                for source, column, width in lookup.runs():
                    place = begin + source * self._gradient_wire
                    tiles.append(Tile(peer, 0, column, place, lookup.width, width, self.local_batch, self._gradient_wire))
        return tiles

    def partial_sums_view(self, staging: SymmetricMemory) -> Tensor:
        """[ranks, local batch, row-wise columns] as received by this rank, in the wire's dtype."""
        shape = (len(self.batch_sizes), self.local_batch, self._layout.row_wise_columns)
        return _view(staging, self.partial_sums_offset(self._rank), shape, self._forward_dtype)

    def presence_view(self, staging: SymmetricMemory) -> Tensor:
        """uint8 [ranks, row-wise features, bags, rounded up] as received by this rank: 1 where a partial sum was sent."""
        shape = (len(self.batch_sizes), self._layout.row_wise_features, self.presence_stride(self._rank))
        return _view(staging, self.presence_offset(self._rank), shape, torch.uint8)

    def staged_view(self, staging: SymmetricMemory) -> Tensor:
        """[local batch, columns] as received by this rank, in the wire's dtype; nothing in the row-wise columns."""
        return _view(staging, 0, (self.local_batch, self._layout.columns), self._forward_dtype)

    def gradients_view(self, gradients: SymmetricMemory, lookup: int) -> Tensor:
        """[global batch, width] of a lookup of this rank, in the wire's dtype."""
        shape = (self.global_batch, self._layout.lookups[self._rank][lookup].width)
        return _view(gradients, self.gradients_offset(self._rank, lookup), shape, self._backward_dtype)

    def row_wise_runs(self) -> list[tuple[int, int, int]]:
        """(column among the partial sums, column in the output, width)."""
        own = [lookup for lookup in self._layout.lookups[self._rank] if lookup.row_wise]
        return LookupLayout(
            tuple(column for lookup in own for column in lookup.columns), tuple(dim for lookup in own for dim in lookup.dims)
        ).runs()

    def direct_runs(self) -> list[tuple[int, int]]:
        """(column, width) of what is no partial sum, for the conversion from the wire's dtype."""
        covered = sorted((column, width) for _, column, width in self.row_wise_runs())
        runs, begin = [], 0
        for column, width in [*covered, (self._layout.columns, 0)]:
            if column > begin:
                runs.append((begin, column - begin))
            begin = column + width
        return runs


class Buffers:
    """Symmetric memory of one workspace for batches up to a size.

    Attributes:
        outputs: where outputs are received; the caller's tensors are blocks of it.
        staging: for partial sums and for other dtypes than the output's.
        gradients: of the pooled results, by lookup.
    """

    def __init__(self, workspace: EmbeddingWorkspace, plan: BatchPlan) -> None:
        ranks = range(workspace.world_size)
        self._local, self._global = max(plan.batch_sizes), plan.global_batch
        largest = BatchPlan(workspace, (max(self._local, 1),) * workspace.world_size)
        group, name = workspace.group, workspace.name
        block = _aligned(max(largest.output_size(rank) for rank in ranks))
        self.outputs = BlockPool.with_spare(
            group, f"{name}: {workspace.held_outputs + 1} outputs", block, workspace.held_outputs
        )
        staging = max(largest.staging_size(rank) for rank in ranks)
        self.staging = group.allocate(f"{name}: partial sums and other dtypes", staging) if staging else None
        gradients = max(plan.gradients_size(rank) for rank in ranks)
        self.gradients = group.allocate(f"{name}: gradients", max(gradients, _ALIGNMENT))

    def hold(self, plan: BatchPlan) -> bool:
        """Whether batches of these sizes fit."""
        return max(plan.batch_sizes) <= self._local and plan.global_batch <= self._global

    def release(self, group: SymmetricGroup) -> None:
        """Let go of the memory; blocks that callers hold stay."""
        for memory in (self.outputs.memory, self.staging, self.gradients):
            if memory is not None:
                group.release(memory)

    def staging_memory(self) -> SymmetricMemory:
        assert self.staging is not None
        return self.staging
