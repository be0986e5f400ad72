"""The destinations of pooled embeddings and of their gradients, and the symmetric memory that receives them.

An :class:`EmbeddingWorkspace` is made once for one embedding module and names, for every rank, which columns of the output its
lookups produce. The operators in this package refer to it by its ``handle``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.common.dtypes import DTYPES
from dlrm_fused.ops.common.workspace import Workspace
from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout, FeatureTable, feature_tables
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import PrefetchedSort
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, SymmetricMemory

# Batch sizes whose tables are kept: a training and an evaluation batch and their uneven last ones.
_KEPT_BATCH_PLANS = 64


class EmbeddingWorkspace(Workspace):
    """The destinations of pooled embeddings and gradients, and the memory that receives them. Making one is collective.

    Args:
        group: the ranks that take part.
        layout: equal on all ranks.
        name: for messages; equal on all ranks, and not used by another workspace of the group.
        output_dtype: float32, bfloat16 or float16: of the output and of its gradient.
        forward_wire: the same: in which pooled embeddings travel. What has the output's dtype goes straight there.
        backward_wire: the same for the gradients.
        gradient_scale: factor of the gradients that the tables get, in calls that give none.
        timeout_seconds: how long a rank waits for another.
        held_outputs: outputs that may be alive at once without a copy. Further ones are copied out of the symmetric memory.
        check_indices: compare every index with the number of rows before each lookup; slow, for debugging.

    Attributes:
        outputs: where outputs are received; the caller's tensors are blocks of it.
        gradients: where the gradients of the pooled results are received, by lookup.
        tables: of this rank's lookups, in their order.

    Raises:
        UsageError: on all ranks, if the layout does not cover the output, differs between ranks, or an argument is wrong.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        layout: ExchangeLayout,
        *,
        name: str,
        output_dtype: torch.dtype = torch.float32,
        forward_wire: torch.dtype = torch.float32,
        backward_wire: torch.dtype = torch.float32,
        gradient_scale: float = 1.0,
        timeout_seconds: float = 600.0,
        held_outputs: int = 2,
        check_indices: bool = False,
    ) -> None:
        settings = {
            "layout": layout,
            "output_dtype": output_dtype,
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
        self.output_dtype, self.forward_wire, self.backward_wire = output_dtype, forward_wire, backward_wire
        self.gradient_scale = gradient_scale
        self.held_outputs = held_outputs
        self.check_indices = check_indices
        self.own_lookups = layout.lookups[self.rank]
        # Gives the operators something to differentiate, also on a rank without tables.
        self.anchor = torch.empty(0, device=self.device, requires_grad=True)
        self.tables: tuple[LocalTables, ...] = ()
        self._feature_tables: list[list[FeatureTable]] = []
        self._slice_feature_tables: list[list[FeatureTable]] = []
        self._plans: dict[tuple[int, ...], BatchPlan] = {}
        # A captured graph uses the addresses of a plan's tables, of the memory, and of tables, as long as it lives.
        self._captured_plans: set[BatchPlan] = set()  # their memory stays
        self._captured_tables: list[object] = []  # those that have been replaced
        self._captures_keep_memory = True
        # The largest batch of one rank, and of all ranks together, for which there is memory; None: no memory yet.
        self._room: tuple[int, int] | None = None
        self.outputs: BlockPool
        self.gradients: SymmetricMemory
        self._staging: SymmetricMemory | None = None

    @lasting
    def attach_tables(self, tables: Sequence[LocalTables]) -> None:
        """Name the tables of this rank's lookups, in their order. Backward passes update the tables of their forward pass.

        Raises:
            UsageError: if they do not match the layout, or while a CUDA graph is captured.
        """
        if self._is_capturing():
            raise UsageError(
                f"{self.name}: tables are attached, or have changed, while a CUDA graph is captured; run a step before"
            )
        if len(tables) != len(self.own_lookups):
            raise UsageError(f"{self.name}: {len(tables)} groups of tables for {len(self.own_lookups)} lookups of the layout")
        for number, (own, lookup) in enumerate(zip(tables, self.own_lookups, strict=True)):
            dims = tuple(own.dims[table] for table in own.feature_tables)
            if dims != lookup.dims:
                raise UsageError(f"{self.name}: tables[{number}] gives features of dims {dims}, the layout {lookup.dims}")
            if own.weights.device != self.device:
                raise UsageError(f"{self.name}: tables[{number}] is on {own.weights.device}, the workspace on {self.device}")
            if lookup.row_wise and own.mean:
                raise UsageError(
                    f"{self.name}: tables[{number}] is row-wise with mean pooling; divide the sum at the destination"
                )
        if self._captured_plans:
            self._captured_tables.append((self.tables, self._feature_tables, self._slice_feature_tables))
        self.tables = tuple(tables)
        self._feature_tables = [
            self._features_at(number, self.layout.destination_columns(self.rank, number)) for number in range(len(tables))
        ]
        self._slice_feature_tables = [
            self._features_at(number, self.layout.slice_columns(self.rank, number)) for number in range(len(tables))
        ]

    def _features_at(self, lookup: int, columns: Sequence[int]) -> list[FeatureTable]:
        own = self.tables[lookup]
        offsets = tuple(own.offsets[table] for table in own.feature_tables)
        return feature_tables(offsets, self.own_lookups[lookup].dims, columns, self.device)

    def feature_tables(self, lookup: int) -> list[FeatureTable]:
        """The features of a lookup of this rank for the kernel, one table for each block dim."""
        return self._feature_tables[lookup]

    def slice_feature_tables(self, lookup: int) -> list[FeatureTable]:
        """Return the features with their columns in slices for other hosts; none of a row-wise lookup, which sends sums."""
        return [] if self.own_lookups[lookup].row_wise else self._slice_feature_tables[lookup]

    @cached_property
    def partial_sum_tables(self) -> list[FeatureTable]:
        """The features that arrive as partial sums, for the kernel that adds these up."""
        row_wise = [lookup for lookup in self.own_lookups if lookup.row_wise]
        dims = [dim for lookup in row_wise for dim in lookup.dims]
        columns = [column for lookup in row_wise for column in lookup.columns]
        return feature_tables(tuple(itertools.accumulate(dims, initial=0))[:-1], dims, columns, self.device)

    @cached_property
    def side_stream(self) -> torch.cuda.Stream | None:
        """Return the stream for sorts and short lookups beside the current one; None on the CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prefetch_sort(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> PrefetchedSort:
        """Begin to sort the indices of this rank's lookups, for the backward pass."""
        return PrefetchedSort(self.tables, indices, offsets, self.side_stream)

    @contextmanager
    def other_anchor(self) -> Iterator[Tensor]:
        """Within, the anchor is another one: autograd lets who uses it wait for the stream on which it was used first."""
        own = self.anchor
        self.anchor = torch.empty_like(own, requires_grad=True)
        try:
            yield self.anchor
        finally:
            self.anchor = own

    @contextmanager
    def captures_until_growth(self) -> Iterator[None]:
        """Within, a capture does not keep the memory that it uses: it must not be replayed once :attr:`outputs` are others, for
        larger batches, and its :meth:`plan` is to be kept as long as itself."""
        self._captures_keep_memory = False
        try:
            yield
        finally:
            self._captures_keep_memory = True

    def plan(self, batch_sizes: Sequence[int]) -> BatchPlan:
        """Return the plan for the batch sizes of all ranks.

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
            plan = self._plans[key] = self._new_plan(key)
        return plan

    @lasting
    def _new_plan(self, batch_sizes: tuple[int, ...]) -> BatchPlan:
        dtypes = (self.output_dtype, self.forward_wire, self.backward_wire)
        return BatchPlan(self.layout, self.group.hosts, batch_sizes, *dtypes, self.device)

    def reserve(self, batch_sizes: Sequence[int]) -> None:
        """Have memory for batches of these sizes. Collective when they are larger than any before, else nothing happens.

        Raises:
            UsageError: if more memory is needed while a CUDA graph is captured.
        """
        plan, is_capturing = self.plan(batch_sizes), self._is_capturing()
        if not self._holds(plan):
            if is_capturing:
                raise UsageError(
                    f"{self.name}: batch_sizes={list(batch_sizes)} need more memory, which cannot be had while a CUDA "
                    "graph is captured; call reserve(batch_sizes) with the largest batches before"
                )
            self._allocate(plan)
        if is_capturing and self._captures_keep_memory:
            self._captured_plans.add(plan)

    @property
    def has_memory(self) -> bool:
        """Whether there is memory for any batch yet."""
        return self._room is not None

    def has_room(self, batch_sizes: Sequence[int]) -> bool:
        """Whether there is memory for batches of these sizes; sizes that are wrong need none, once there is any."""
        if self._is_capturing():
            return True  # or an error, when the memory is asked for
        try:
            return self._holds(self.plan(batch_sizes))
        except UsageError:
            return self._room is not None

    def staging(self) -> SymmetricMemory:
        """Return the memory that receives partial sums, and other dtypes than the output's."""
        assert self._staging is not None
        return self._staging

    def destination_memory(self, plan: BatchPlan, lookup: int) -> SymmetricMemory:
        """Return the memory in which destinations receive a lookup of this rank."""
        return self.staging() if plan.places.goes_to_staging(lookup) else self.outputs.memory

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _holds(self, plan: BatchPlan) -> bool:
        return self._room is not None and max(plan.batch_sizes) <= self._room[0] and plan.global_batch <= self._room[1]

    @lasting
    def _allocate(self, plan: BatchPlan) -> None:
        """Memory for batches up to the plan's, in place of what there is. Collective."""
        self.channel.assemble()
        ranks, (local_room, global_room) = range(self.world_size), self._room or (0, 0)
        local_batch, global_batch = max(local_room, *plan.batch_sizes), max(global_room, plan.global_batch)
        self._release_memory()
        largest = self._new_plan((max(local_batch, 1),) * self.world_size)
        block = max(largest.places.output_size(rank) for rank in ranks)
        self.outputs = BlockPool.with_spare(
            self.group, f"{self.name}: {self.held_outputs + 1} outputs", block, self.held_outputs
        )
        staging = max(largest.places.staging_size(rank) for rank in ranks)
        self._staging = self.group.allocate(f"{self.name}: partial sums and other dtypes", staging) if staging else None
        of_all = self._new_plan((global_batch,) + (0,) * (self.world_size - 1))
        gradients = max(of_all.places.gradients_size(rank) for rank in ranks)
        self.gradients = self.group.allocate(f"{self.name}: gradients", max(gradients, 4096))
        self._room = local_batch, global_batch

    def _release_memory(self) -> None:
        # Graphs of before the memory grew are replayed in it.
        if self._room is not None and not self._captured_plans:
            # Blocks that callers hold stay.
            self.outputs.release()
            for memory in (self._staging, self.gradients):
                if memory is not None:
                    self.group.release(memory)
        self._room = None


def _checked(settings: Mapping[str, Any], name: str, world_size: int) -> dict[str, object]:
    """Return the settings that must be equal on all ranks. Raises UsageError if one is wrong."""
    layout = settings["layout"]
    if not isinstance(layout, ExchangeLayout):
        raise UsageError(f"{name}: layout={layout!r}; needed: an ExchangeLayout")
    layout.check(world_size)
    for key in ("output_dtype", "forward_wire", "backward_wire"):
        if settings[key] not in DTYPES:
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
