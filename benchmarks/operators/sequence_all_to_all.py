"""Unpooled lookup + All-to-All against FBGEMM's lookup and NCCL, as TorchRec runs them.

The contestants of a cell read and update the same tables, from ids that are with their owners. All ranks know already how many
ids they ask for, as after each sharder's input dist:

* baseline: FBGEMM's table-batched embedding (TBE), then TorchRec's output dist of an EmbeddingCollection, with the fastest of
  the settings that a user has;
* copy: the same TBE, then the output dist of ``FusedEmbeddingCollectionSharder``;
* fused: that output dist with the lookup in its kernel; without GPUs and TRITON_INTERPRET=1, the same as copy;
* lookup: the TBE alone.

``pooling`` of a cell is the number of ids of a sample in each table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common.harness import Work, World
from benchmarks.operators import stress
from benchmarks.operators.case import TIMEOUT_SECONDS, Operator
from benchmarks.operators.embedding_all_to_all import LOOKUPS, SEED, EmbeddingCase, Forward
from benchmarks.operators.embedding_lookups import DISTRIBUTIONS, Cell, Lookup
from dlrm_fused.compat.torch import wait_for_collective
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, reference, sequence_all_to_all
from dlrm_fused.sharding.fbgemm_tables import FbgemmTables
from dlrm_fused.sharding.sequence_sharder import ExchangedCounts, FusedSequenceDist, keep_counts
from dlrm_fused.symmetric.device import uses_kernels

# Ids of a sample in each table, and samples of all ranks.
SIZES = ((8, 8192), (100, 2048), (512, 512), (2048, 128))
DIMS = (64, 256)
TABLES = 2
# A piece of work of the stress test has so many.
FEATURES = 3


class SequenceCase(EmbeddingCase):
    """A cell on this rank."""

    rivals = ("baseline", "copy", "lookup")
    pooling = PoolingMode.NONE
    can_be_captured = False

    @cached_property
    def contexts(self) -> dict[int, SequenceShardingContext]:
        """By the address of a lookup's indices, TorchRec's context of its batch."""
        return {lookup.indices.data_ptr(): self.context_of(lookup) for lookup in self.lookups}

    @cached_property
    def features(self) -> dict[int, KeyedJaggedTensor]:
        """By the same, the ids as TorchRec's input dist leaves them."""
        keys = [str(table) for table in range(self.cell.tables)]
        return {own.indices.data_ptr(): KeyedJaggedTensor(keys, own.indices, offsets=own.offsets) for own in self.lookups}

    def context_of(self, lookup: Lookup) -> SequenceShardingContext:
        """Collective."""
        lengths = lookup.offsets.diff().view(self.cell.tables, -1)
        sent = [int(part.sum()) for part in lengths.split(self.batches, dim=1)]
        received = [of_owner[self.world.rank] for of_owner in self.world.gather(sent)]
        permutation = None
        if self.cell.row_wise:  # buckets are undone, by which permutation does not matter to the time
            permutation = torch.randperm(sum(received), device=self.world.device)
        context = SequenceShardingContext(
            batch_size_per_rank=self.batches,
            input_splits=received,
            output_splits=sent,
            unbucketize_permute_tensor=permutation,
            lengths_after_input_dist=lengths,
        )
        keep_counts(context, ExchangedCounts(received, self.world.group, self.world.device))
        return context

    def draw_gradients(self, generator: torch.Generator) -> None:
        most = max(max(sum(own.input_splits), sum(own.output_splits)) for own in self.contexts.values())
        self.gradient = torch.randn(most, self.cell.dim, generator=generator, device=self.world.device)

    def gradient_of(self, name: str, lookup: Lookup) -> Tensor:
        context = self.contexts[lookup.indices.data_ptr()]
        return self.gradient[: sum(context.output_splits if name == "lookup" else context.input_splits)]

    def choose_forwards(self) -> dict[str, Forward]:
        tbe, group, device = self.tables.tbe, self.world.group, self.world.device

        def library(lookup: Lookup) -> Tensor:
            rows: Tensor = tbe(lookup.indices, lookup.offsets)
            return rows

        def workspace(name: str) -> SequenceWorkspace:
            named = f"benchmark: {name}"
            return SequenceWorkspace(self.world.symmetric, self.cell.dim, name=named, timeout_seconds=TIMEOUT_SECONDS)

        dists: dict[str, Any] = {"fused": FusedSequenceDist(workspace("copy"), group)}
        # A machine without kernels has one way only.
        if uses_kernels(device):
            dists["copy"] = dists["fused"]
            dists["fused"] = FusedSequenceDist(workspace("fused"), group, FbgemmTables([tbe], checks_bounds=False))
        if self.cell.row_wise:
            dists["baseline"] = RwSequenceEmbeddingDist(group, self.cell.tables, device)
        else:
            dists["baseline"] = TwSequenceEmbeddingDist(group, [self.cell.tables] * self.world.size, device)
        by_kernels = dists["fused"].look_up if "copy" in dists else None

        def delivered(by: str) -> Forward:
            def forward(lookup: Lookup) -> Tensor:
                key = lookup.indices.data_ptr()
                look_up = by_kernels if by == "fused" else None
                rows = library(lookup) if look_up is None else look_up(self.features[key])
                found: Tensor = dists[by](rows, self.contexts[key]).wait()
                # TorchRec's synchronous collectives end when their results are read.
                return wait_for_collective(found) if by == "baseline" else found

            return forward

        return {**{name: delivered(name) for name in dists}, "lookup": library}

    def phases(self, stage: str) -> Sequence[Work]:
        rows = sum(lookup.indices.numel() for lookup in self.lookups) / LOOKUPS
        of_rank = [context.output_splits for context in self.contexts.values()]
        remote = sum(sum(sent) - sent[self.world.rank] for sent in of_rank) / LOOKUPS
        row_bytes, distinct = 4.0 * self.cell.dim, float(self.touched.numel())
        phases = [Work(0, (distinct + rows) * row_bytes + 8 * rows, remote * row_bytes)]
        if stage.endswith("training"):
            phases.append(Work(0, (2 * distinct + rows) * row_bytes + 8 * rows + 8 * distinct, remote * row_bytes))
        return phases


def all_cells() -> list[Cell]:
    """16 cells, table-wise, and every third of them row-wise."""
    drawn = itertools.product(SIZES, DIMS, DISTRIBUTIONS)
    cells = [Cell(TABLES, bags, ids, dim, "fp32", kind) for (ids, bags), dim, kind in drawn]
    return [*cells, *(Cell(TABLES, c.bags, c.pooling, c.dim, "fp32", c.indices, True) for c in cells[::3])]


def tiny_cells() -> list[Cell]:
    return [
        Cell(2, 12, 3, 8, "fp32", "uniform", largest_rows=500),
        Cell(2, 12, "jagged", 16, "fp32", "zipf", largest_rows=500),
        Cell(2, 12, 5, 8, "fp32", "uniform", True, largest_rows=500),
    ]


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Rows and gradients of some batches, which share a workspace. Collective."""
    width = 8 if tiny else 128
    workspace = SequenceWorkspace(world.symmetric, width, name="stress: sequences", timeout_seconds=TIMEOUT_SECONDS)
    return [
        _stressed(world, workspace, most, number) for number, most in enumerate((0, 3, 9) if tiny else (0, 100, 5_000, 30_000))
    ]


def _stressed(world: World, workspace: SequenceWorkspace, most: int, number: int) -> stress.Work:
    """One batch, in which ranks ask each other for up to ``most`` rows."""
    generator = torch.Generator().manual_seed(SEED + number)
    # By owner, feature and asking rank, which has one sample.
    lengths = torch.randint(0, most // FEATURES + 1, (world.size, FEATURES, world.size), generator=generator)
    counts: list[list[int]] = lengths.sum(dim=1).T.tolist()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[world.rank].flatten().cumsum(0)]).to(world.device)
    arguments = offsets, [1] * world.size, counts
    own = torch.Generator(world.device).manual_seed(SEED + world.rank)
    sent, received = sum(asked[world.rank] for asked in counts), sum(counts[world.rank])
    rows = torch.randn(sent, workspace.width, generator=own, device=world.device, requires_grad=True)
    gradient = torch.randn(received, workspace.width, generator=own, device=world.device)

    def both_ways(exchange: Callable[[], Tensor], delay: Callable[[], None]) -> list[Tensor]:
        output = exchange()
        delay()
        (of_rows,) = torch.autograd.grad(output, rows, gradient)
        return [output.detach(), of_rows]

    def check(found: Sequence[Tensor]) -> tuple[float, bool]:
        expected = both_ways(lambda: reference(world.group, rows, *arguments), lambda: None)
        differing = sum(int(stress.count_differing(*pair)) for pair in zip(found, expected, strict=True))
        return float(differing), differing == 0

    return stress.Work(
        f"up to {most} rows",
        workspace,
        lambda delay: both_ways(lambda: sequence_all_to_all(workspace, rows, *arguments), delay),
        check,
        {"most_rows": most, "counts": counts},
        in_graph=False,
        is_held=True,
    )


OPERATOR = Operator(
    open=SequenceCase,
    sets={"tiny": tiny_cells, "all": all_cells},
    stages=lambda cell: ["sequence_forward", "sequence_training"],
    works=works,
)
