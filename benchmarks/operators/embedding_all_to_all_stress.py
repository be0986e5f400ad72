"""Works of the stress test of embedding + All-to-All: lookup, backward pass and a step of rowwise Adagrad of uneven batches.

Each rank holds tables of several features, slices of columns, and rows of tables that all ranks share. A piece of work begins
with the same tables each time, so that all it gives is known from the first time, when it was compared with plain torch: the
output, also after it has been held for some time, all weights and momenta after the step, and the gradients of per-sample
weights. Of each batch a second piece is a lookup alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.harness import World, relative_error
from benchmarks.operators.case import TIMEOUT_SECONDS
from benchmarks.operators.stress import Work
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    ExchangeLayout,
    LocalTables,
    LookupLayout,
    RowwiseAdagrad,
    embedding_all_to_all,
    reference,
)
from dlrm_fused.symmetric.device import uses_kernels

LEARNING_RATE, EPSILON = 0.1, 1e-6
# Against plain torch: fp32 sums in another order, then one rounding of fp16 tables.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-9}
_SEED = 1


@dataclass(frozen=True)
class Size:
    """Numbers of tables and bags on every rank."""

    rows: int
    dims: tuple[int, int, int]
    largest_batch: int
    longest_bag: int
    batches: int


FULL = Size(rows=20_000, dims=(128, 64, 32), largest_batch=512, longest_bag=8, batches=8)
TINY = Size(rows=11, dims=(8, 4, 4), largest_batch=3, longest_bag=3, batches=3)


@dataclass(frozen=True)
class Features:
    """One lookup of a rank."""

    dims: tuple[int, ...]  # of its tables
    feature_tables: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    mean: bool = False
    weighted: bool = False
    row_wise: bool = False

    @property
    def feature_dims(self) -> tuple[int, ...]:
        return tuple(self.dims[table] for table in self.feature_tables)


def features_of(rank: int, ranks: int, size: Size) -> list[Features]:
    """The lookups of a rank; the last of three ranks or more has no tables of its own."""
    wide, middle, narrow = size.dims
    shared = Features((middle,), (0,), row_wise=True)
    if ranks > 2 and rank == ranks - 1:
        return [shared]
    return [
        Features((wide, middle), (0, 1, 0), weighted=rank % 2 == 0),
        Features((narrow,), (0,), dtype=torch.float16, index_dtype=torch.int32, mean=True),  # a slice of columns
        shared,
    ]


def layout_of(ranks: int, size: Size) -> ExchangeLayout:
    """Columns of the output, rank by rank, with the shared ones at the end."""
    lookups, begin = [], 0
    for rank in range(ranks):
        own = []
        for features in features_of(rank, ranks, size):
            if not features.row_wise:
                columns = tuple(itertools.accumulate(features.feature_dims[:-1], initial=begin))
                begin += sum(features.feature_dims)
                own.append(LookupLayout(columns, features.feature_dims))
        lookups.append(own)
    shared = LookupLayout((begin,), (size.dims[1],), row_wise=True)
    return ExchangeLayout(tuple((*own, shared) for own in lookups), begin + size.dims[1])


def generator_of(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash((_SEED, *key)) % 2**62)


class Stage:
    """The tables of this rank, as they are at the beginning, and the workspace of all batches. Collective."""

    def __init__(self, world: World, size: Size) -> None:
        self.world, self.size = world, size
        self.features = features_of(world.rank, world.size, size)
        generator = generator_of(world.rank)
        self.tables = [self.draw_tables(features, generator) for features in self.features]
        self.state = [part for tables in self.tables for part in (tables.weights, momentum_of(tables))]
        self.start = [part.clone() for part in self.state]
        self.workspace = EmbeddingWorkspace(
            world.symmetric,
            layout_of(world.size, size),
            name="stress",
            gradient_scale=1 / world.size,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self.workspace.attach_tables(self.tables)

    def draw_tables(self, features: Features, generator: torch.Generator) -> LocalTables:
        rows, device = self.size.rows, self.world.device
        weights = torch.rand(rows * sum(features.dims), generator=generator) - 0.5
        momentum = torch.rand(rows * len(features.dims), generator=generator)
        return LocalTables(
            weights=weights.to(device, features.dtype),
            offsets=tuple(rows * dim for dim in itertools.accumulate(features.dims[:-1], initial=0)),
            rows=(rows,) * len(features.dims),
            dims=features.dims,
            feature_tables=features.feature_tables,
            mean=features.mean,
            optimizer=RowwiseAdagrad(momentum.to(device), torch.tensor(LEARNING_RATE), EPSILON),
            stochastic_rounding=False,
        )

    def reset(self) -> None:
        """Put the tables back."""
        for part, start in zip(self.state, self.start, strict=True):
            part.copy_(start)


def momentum_of(tables: LocalTables) -> Tensor:
    assert isinstance(tables.optimizer, RowwiseAdagrad)
    return tables.optimizer.momentum


class Batch:
    """Inputs of a lookup on this rank."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, size, world = stage, stage.size, stage.world
        sizes = torch.randint(0, size.largest_batch + 1, (world.size,), generator=generator_of(number)).tolist()
        sizes[number % world.size] = size.largest_batch
        self.sizes: list[int] = sizes
        generator = generator_of(number, world.rank)
        drawn = [self.draw(features, generator) for features in stage.features]
        self.indices, self.offsets, self.weights = (list(own) for own in zip(*drawn, strict=True))
        columns = stage.workspace.layout.columns
        gradients = [torch.randn(batch, columns, generator=generator_of(number, r, 1)) for r, batch in enumerate(sizes)]
        self.gradient, self.upstream = gradients[world.rank].to(world.device), torch.cat(gradients).to(world.device)

    def draw(self, features: Features, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, offsets and per-sample weights, which are empty where there are none."""
        size, device = self.stage.size, self.stage.world.device
        bags = len(features.feature_tables) * sum(self.sizes)
        lengths = torch.randint(0, size.longest_bag + 1, (bags,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        drawn = torch.randint(0, size.rows, (int(ends[-1]),), generator=generator)
        factors = torch.rand(len(drawn) if features.weighted else 0, generator=generator) + 0.5
        return drawn.to(device, features.index_dtype), ends.to(device, features.index_dtype), factors.to(device)

    def look_up(self, weights: Sequence[Tensor]) -> Tensor:
        return embedding_all_to_all(self.stage.workspace, self.indices, self.offsets, list(weights), self.sizes)

    @torch.no_grad()
    def evaluate(self, delay: Callable[[], None]) -> list[Tensor]:
        """The output of a lookup alone."""
        self.stage.reset()
        output = self.look_up(self.weights)
        delay()
        return [output]

    def train(self, delay: Callable[[], None]) -> list[Tensor]:
        """The output, the tables after a step, and gradients of per-sample weights."""
        self.stage.reset()
        leaves = [weights.clone().requires_grad_(weights.numel() > 0) for weights in self.weights]
        output = self.look_up(leaves)
        delay()
        output.backward(self.gradient)
        delay()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [output.detach(), *(part.clone() for part in self.stage.state), *gradients]

    def output_of_reference(self) -> Tensor:
        stage = self.stage
        group, layout = stage.workspace.group.process_group, stage.workspace.layout
        lookups = (self.indices, self.offsets, self.weights, self.sizes)
        return reference(group, layout, stage.tables, *lookups, stage.world.device)

    @torch.no_grad()
    def expected(self) -> list[Tensor]:
        """As far as plain torch says it: the output, and weights and momenta after the step."""
        self.stage.reset()
        updated = [part for lookup in range(len(self.stage.tables)) for part in self.updated(lookup)]
        return [self.output_of_reference(), *updated]

    def updated(self, lookup: int) -> tuple[Tensor, Tensor]:
        """Weights and momentum after one step, in float64: of one table behind the other."""
        tables, columns = self.stage.tables[lookup], self.stage.workspace.own_lookups[lookup].columns
        indices, offsets, weights = self.indices[lookup], self.offsets[lookup], self.weights[lookup]
        bags, rows, ranks = len(self.upstream), self.stage.size.rows, self.stage.world.size
        sums = [torch.zeros(rows, dim, dtype=torch.float64, device=indices.device) for dim in tables.dims]
        for feature, table in enumerate(tables.feature_tables):
            bounds = offsets[feature * bags : (feature + 1) * bags + 1].long()
            lengths = bounds.diff()
            own = slice(int(bounds[0]), int(bounds[-1]))
            of_bags = self.upstream[:, columns[feature] : columns[feature] + tables.dims[table]].double() / ranks
            if tables.mean:
                of_bags = of_bags / lengths.clamp(min=1)[:, None]
            of_rows = of_bags.repeat_interleave(lengths, dim=0)
            if weights.numel():
                of_rows = of_rows * weights[own, None]
            sums[table].index_add_(0, indices[own].long(), of_rows)
        squares = torch.stack([total.square().mean(1) for total in sums])
        momentum = momentum_of(tables).double().view(len(sums), -1) + squares
        steps = [LEARNING_RATE / (own.sqrt() + EPSILON)[:, None] * total for own, total in zip(momentum, sums, strict=True)]
        return tables.weights.double() - torch.cat([step.flatten() for step in steps]), momentum.flatten()

    def check(self, first: Sequence[Tensor]) -> tuple[float, bool]:
        """Outputs, and tables if there was a step, against plain torch."""
        expected = self.expected()
        pairs = list(zip(first, expected[: len(first)], strict=False))
        errors = [(relative_error(*pair), TOLERANCE[pair[0].dtype]) for pair in pairs]
        return max(error for error, _ in errors), all(error <= tolerance for error, tolerance in errors)


def works(world: World, *, tiny: bool) -> Sequence[Work]:
    """Collective.

    Raises:
        SystemExit: without kernels: the operator has no other way.
    """
    if not uses_kernels(world.device):
        raise SystemExit("the kernels need a GPU, or TRITON_INTERPRET=1")
    stage = Stage(world, TINY if tiny else FULL)
    # Hosts of several ranks add up what row-wise tables give in another order than one host.
    tolerance = TOLERANCE[torch.float32] if max(map(len, world.symmetric.hosts.ranks)) > 1 else None
    found = []
    for number in range(stage.size.batches):
        batch = Batch(stage, number)
        for kind, compute in (("training", batch.train), ("evaluation", batch.evaluate)):
            description: dict[str, Any] = {"kind": kind, "batch_sizes": batch.sizes}
            name = f"batch {number}, {kind}"
            work = Work(name, stage.workspace, compute, batch.check, description, tolerance_to_one_host=tolerance)
            found.append(replace(work, in_graph=False, is_compiled_ahead=False, is_held=True))
    return found
