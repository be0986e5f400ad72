"""Does the fused embedding stage give the same bits whatever the ranks' delays, and an error when a rank is killed?

    torchrun --standalone --nproc-per-node=4 -m benchmarks.embedding_all_to_all.stress --epochs 10000 --output stress.json
        [--tiny] [--slices-by messages --ranks-per-host 2]
    python -m benchmarks.embedding_all_to_all.stress --ranks 4 --kill-rank 2 --kill-after 3 --output killed.json

Each rank holds tables of several features, slices of columns, and rows of tables that all ranks share. An epoch is a lookup, a
backward pass and a step of rowwise Adagrad, or, every fifth time, a lookup alone, of one of some prepared batches of uneven
sizes, with random delays on the device before, between and after, different on each rank. Every epoch begins with the same
tables, so that all it gives is known from the first time, when it was compared with a computation in plain torch: the output,
also after it has been held for some epochs, the gradients of per-sample weights, and all weights and momenta after the step.
They are compared on the device, bit for bit; the host reads the number of mismatches at the end.

With ``--slices-by messages --ranks-per-host 2`` every two ranks are a host. Then the first results are also compared, bit for
bit, with those of all ranks on one host. But hosts of several ranks add up what row-wise tables give in another order: of these
columns the relative difference is reported.

With ``--kill-rank`` that rank kills itself in the middle of an epoch. Each other rank writes ``<output>.rank<r>.json``: its
error, after how many seconds it came, and whether its device still works off what it is given. The processes are started by
this script: torchrun would end those that are left.

Without GPUs it needs ``TRITON_INTERPRET=1``. Exit status 1 says that something was not as it must be.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import killed_rank
from benchmarks.common.harness import World, describe_run, relative_error, synchronize
from benchmarks.common.random_delays import RandomDelays
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    ExchangeLayout,
    LookupLayout,
    embedding_all_to_all,
    reference,
)
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables, RowwiseAdagrad
from dlrm_fused.symmetric.device import uses_kernels

LEARNING_RATE, EPSILON = 0.1, 1e-6
# Against plain torch: fp32 sums in another order, then one rounding of fp16 tables.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-9}
HELD_EPOCHS = 3
EVALUATION_EVERY = 5
CHECKS = ("output", "output_held", "tables", "weight_gradients")
# The longest delays are rare.
LONG_DELAY_EVERY, LONG_DELAY = 100, 20
_ALIGNMENT = 256  # bytes between tensors of the state


@dataclass(frozen=True)
class Size:
    """Of tables and batches, on every rank; delays in microseconds."""

    rows: int
    dims: tuple[int, int, int]
    largest_batch: int
    longest_bag: int
    batches: int
    delay: float


FULL = Size(rows=20_000, dims=(128, 64, 32), largest_batch=512, longest_bag=8, batches=8, delay=300.0)
TINY = Size(rows=11, dims=(8, 4, 4), largest_batch=3, longest_bag=3, batches=3, delay=2_000.0)


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


@dataclass(frozen=True)
class Batch:
    """What a rank looks up, and what must come of it: known from the first time."""

    sizes: list[int]
    indices: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]  # of samples, empty where there are none
    gradient: Tensor
    output: Tensor
    state: Tensor
    weight_gradients: Tensor


class Stress:
    """The tables of this rank, its batches, and epochs over them. Collective."""

    def __init__(self, world: World, size: Size, seed: int, epochs: int) -> None:
        self.world, self.size, self.seed = world, size, seed
        self.features = features_of(world.rank, world.size, size)
        self.tables, self.state = self._make_tables()
        self.start = self.state.clone()
        self.workspace = EmbeddingWorkspace(
            world.symmetric,
            layout_of(world.size, size),
            name="stress",
            gradient_scale=1 / world.size,
            timeout_seconds=60.0,
        )
        self.workspace.attach_tables(self.tables)
        self.mismatches = torch.zeros(epochs, len(CHECKS), dtype=torch.int64, device=world.device)
        self.delays = RandomDelays(
            world.device, seed + 1 + world.rank, size.delay, long_every=LONG_DELAY_EVERY, long_factor=LONG_DELAY
        )
        self.held: deque[tuple[Tensor, Batch]] = deque()
        self.largest_error = 0.0
        self.batches = [self._make_batch(number) for number in range(size.batches)]

    def _generator(self, *key: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self.seed, *key)) % 2**62)

    def _make_tables(self) -> tuple[list[LocalTables], Tensor]:
        """Weights and momenta of all lookups as views of one tensor of bytes."""
        rows, device = self.size.rows, self.world.device
        elements = [(rows * sum(features.dims), features.dtype) for features in self.features]
        elements += [(rows * len(features.dims), torch.float32) for features in self.features]
        sizes = [-(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for count, dtype in elements]
        begins = list(itertools.accumulate(sizes, initial=0))
        state = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
        parts = [
            state[begin : begin + count * dtype.itemsize].view(dtype)
            for begin, (count, dtype) in zip(begins, elements, strict=False)
        ]
        generator, tables = self._generator(self.world.rank), []
        weights, momenta = parts[: len(self.features)], parts[len(self.features) :]
        for features, weight, momentum in zip(self.features, weights, momenta, strict=True):
            weight.copy_(torch.rand(weight.shape, generator=generator) - 0.5)
            momentum.copy_(torch.rand(momentum.shape, generator=generator))
            tables.append(
                LocalTables(
                    weights=weight,
                    offsets=tuple(rows * dim for dim in itertools.accumulate(features.dims[:-1], initial=0)),
                    rows=(rows,) * len(features.dims),
                    dims=features.dims,
                    feature_tables=features.feature_tables,
                    mean=features.mean,
                    optimizer=RowwiseAdagrad(momentum, torch.tensor(LEARNING_RATE), EPSILON),
                    stochastic_rounding=False,
                )
            )
        return tables, state

    def _make_batch(self, number: int) -> Batch:
        """Draw a batch; make the epoch that the others are compared with, and compare it with plain torch."""
        world, size = self.world, self.size
        sizes = torch.randint(0, size.largest_batch + 1, (world.size,), generator=self._generator(number)).tolist()
        sizes[number % world.size] = size.largest_batch
        generator = self._generator(number, world.rank)
        indices, offsets, weights = [], [], []
        for features in self.features:
            lengths = torch.randint(0, size.longest_bag + 1, (len(features.feature_tables) * sum(sizes),), generator=generator)
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            drawn = torch.randint(0, size.rows, (int(ends[-1]),), generator=generator)
            factors = torch.rand(len(drawn) if features.weighted else 0, generator=generator) + 0.5
            indices.append(drawn.to(world.device, features.index_dtype))
            offsets.append(ends.to(world.device, features.index_dtype))
            weights.append(factors.to(world.device))
        columns = self.workspace.layout.columns
        gradients = [torch.randn(batch, columns, generator=self._generator(number, r, 1)) for r, batch in enumerate(sizes)]
        gradient = gradients[world.rank].to(world.device)

        group, layout = self.workspace.group.process_group, self.workspace.layout
        with torch.no_grad():
            expected_output = reference(group, layout, self.tables, indices, offsets, weights, sizes, world.device)
        expected_tables = [
            self._updated(i, torch.cat(gradients).to(world.device), indices[i], offsets[i], weights[i])
            for i in range(len(self.features))
        ]
        leaves = [factors.clone().requires_grad_(factors.numel() > 0) for factors in weights]
        output = embedding_all_to_all(self.workspace, indices, offsets, leaves, sizes)
        output.backward(gradient)
        self.workspace.raise_fault()
        errors = [(relative_error(output.detach(), expected_output), torch.float32)]
        for tables, (new_weights, momentum) in zip(self.tables, expected_tables, strict=True):
            assert isinstance(tables.optimizer, RowwiseAdagrad)
            errors.append((relative_error(tables.weights, new_weights), tables.weights.dtype))
            errors.append((relative_error(tables.optimizer.momentum, momentum), torch.float32))
        wrong = [error for error, dtype in errors if error > TOLERANCE[dtype]]
        wrong_ranks = [rank for rank, own in enumerate(world.gather(wrong)) if own]
        if wrong_ranks:
            raise SystemExit(f"batch {number}: ranks {wrong_ranks} differ from plain torch; rank {world.rank}: {wrong}")
        self.largest_error = max(self.largest_error, *(error for error, dtype in errors if dtype == torch.float32))
        batch = Batch(
            sizes, indices, offsets, weights, gradient, output.detach().clone(), self.state.clone(), _gradients(leaves)
        )
        self.state.copy_(self.start)
        return batch

    def _updated(
        self, lookup: int, upstream: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights and momentum after one step, in float64: of one table behind the other."""
        tables, layout = self.tables[lookup], self.workspace.own_lookups[lookup]
        optimizer, bags = tables.optimizer, len(upstream)
        assert isinstance(optimizer, RowwiseAdagrad)
        sums = [torch.zeros(self.size.rows, dim, dtype=torch.float64, device=upstream.device) for dim in tables.dims]
        for feature, table in enumerate(tables.feature_tables):
            bounds = offsets[feature * bags : (feature + 1) * bags + 1].long()
            lengths = bounds.diff()
            own = slice(int(bounds[0]), int(bounds[-1]))
            column = layout.columns[feature]
            of_bags = upstream[:, column : column + tables.dims[table]].double() / self.world.size
            if tables.mean:
                of_bags = of_bags / lengths.clamp(min=1)[:, None]
            of_rows = of_bags.repeat_interleave(lengths, dim=0)
            if weights.numel():
                of_rows = of_rows * weights[own, None]
            sums[table].index_add_(0, indices[own].long(), of_rows)
        momentum = optimizer.momentum.double().view(len(sums), -1) + torch.stack([total.square().mean(1) for total in sums])
        steps = [LEARNING_RATE / (own.sqrt() + EPSILON)[:, None] * total for own, total in zip(momentum, sums, strict=True)]
        return tables.weights.double() - torch.cat([step.flatten() for step in steps]), momentum.flatten()

    def epoch(self, number: int) -> None:
        """One epoch, and what it gave compared with the first time. The host does not wait for the device."""
        batch = self.batches[random.Random(self.seed + number).randrange(len(self.batches))]
        found = self.mismatches[number % len(self.mismatches)]
        is_evaluation = number % EVALUATION_EVERY == EVALUATION_EVERY - 1
        leaves = [weights.clone().requires_grad_(weights.numel() > 0) for weights in batch.weights]
        self.delays.delay()
        with torch.set_grad_enabled(not is_evaluation):
            output = embedding_all_to_all(self.workspace, batch.indices, batch.offsets, leaves, batch.sizes)
        found[0] += _differing(output, batch.output)
        self.delays.delay()
        if not is_evaluation:
            output.backward(batch.gradient)
            self.delays.delay()
            found[2] += _differing(self.state, batch.state)
            found[3] += _differing(_gradients(leaves), batch.weight_gradients)
            self.state.copy_(self.start)
        self.held.append((output.detach(), batch))
        if len(self.held) > HELD_EPOCHS:
            held, of_batch = self.held.popleft()
            found[1] += _differing(held, of_batch.output)


def _gradients(leaves: Sequence[Tensor]) -> Tensor:
    """Those of all per-sample weights, one behind the other."""
    return torch.cat([torch.empty_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]).detach()


def _differing(found: Tensor, expected: Tensor) -> Tensor:
    """Number of elements whose bits differ."""
    if found.dtype != torch.uint8:
        found, expected = found.detach().view(torch.int32), expected.view(torch.int32)
    else:
        found, expected = found.view(torch.int64), expected.view(torch.int64)
    return (found != expected).sum()


def compared_with_one_host(stress: Stress) -> dict[str, Any]:
    """How the first results differ from those with all ranks on one host, for the report. Collective."""
    world = stress.world
    one_host = Stress(replace(world, symmetric=world.one_host), stress.size, stress.seed, epochs=1)
    # The shared table's columns are the last. Hosts of one rank each add up in the order of ranks, as one host does.
    hosts_have_sums = max(map(len, world.symmetric.hosts.ranks)) > 1
    copied = stress.workspace.layout.columns - (stress.size.dims[1] if hosts_have_sums else 0)
    elements = dict.fromkeys(("output", "tables", "weight_gradients"), 0)
    error = 0.0
    for own, other in zip(stress.batches, one_host.batches, strict=True):
        elements["output"] += int(_differing(own.output[:, :copied], other.output[:, :copied]))
        elements["tables"] += int(_differing(own.state, other.state))
        elements["weight_gradients"] += int(_differing(own.weight_gradients, other.weight_gradients))
        error = max(error, relative_error(own.output[:, copied:], other.output[:, copied:]))
    by_rank = world.gather(elements)
    return {
        "elements_unlike_one_host": {what: sum(own[what] for own in by_rank) for what in elements},
        "relative_error_to_one_host": max(world.gather(error)),
    }


def is_as_on_one_host(compared: Mapping[str, Any]) -> bool:
    """Whether the differences are allowed ones."""
    error = compared["relative_error_to_one_host"]
    return not any(compared["elements_unlike_one_host"].values()) and error <= TOLERANCE[torch.float32]


def run_epochs(world: World, options: argparse.Namespace) -> bool:
    """All epochs, and the report; whether there was no mismatch."""
    size = TINY if options.tiny else FULL
    stress = Stress(world, size, options.seed, options.epochs)
    world.log(f"{size.batches} batches agree with plain torch; largest relative error {stress.largest_error:.1e}")
    compared = compared_with_one_host(stress) if world.symmetric.hosts.are_many else {}
    if compared:
        world.log(f"differences from all ranks on one host: {compared}")
    synchronize(world.device)
    dist.barrier()
    began = time.perf_counter()
    for number in range(options.epochs):
        stress.epoch(number)
    synchronize(world.device)
    seconds = time.perf_counter() - began
    stress.workspace.raise_fault()
    by_rank = world.gather(stress.mismatches.sum(0).tolist())
    wrong_epochs = sorted(
        {epoch for own in world.gather(stress.mismatches.any(1).nonzero().flatten().tolist()) for epoch in own}
    )
    mismatches = {check: sum(own[i] for own in by_rank) for i, check in enumerate(CHECKS)}
    completed = world.gather(int(stress.workspace.forward_channel.state[0]))
    report = {
        **describe_run(world, options.commit),
        "hosts": world.symmetric.hosts.ranks,
        "epochs": options.epochs,
        "epochs_completed_by_the_channels": completed,
        "with_backward_pass_and_update": options.epochs - options.epochs // EVALUATION_EVERY,
        "seconds": round(seconds, 2),
        "mean_milliseconds": round(1e3 * seconds / max(1, options.epochs), 3),
        "batch_sizes": [batch.sizes for batch in stress.batches],
        "longest_delay_microseconds": size.delay * LONG_DELAY,
        "largest_relative_error_against_plain_torch": stress.largest_error,
        **compared,
        "elements_that_differ": mismatches,
        "epochs_with_a_mismatch": wrong_epochs[:100],
        "passed": not any(mismatches.values())
        and set(completed) == {options.epochs + size.batches}
        and (not compared or is_as_on_one_host(compared)),
    }
    if world.rank == 0:
        write_results(options.output, report)
    world.log(f"{options.epochs} epochs in {seconds:.1f} s, elements that differ: {mismatches}; passed: {report['passed']}")
    return bool(report["passed"])


def step(world: World, options: argparse.Namespace) -> Callable[[int], None]:
    """What is done again and again until a rank is lost. Collective."""
    stress = Stress(world, TINY if options.tiny else FULL, options.seed, 1)

    def epoch(number: int) -> None:
        stress.epoch(number)
        stress.workspace.raise_fault()

    return epoch


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10_000)
    add_report_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="small enough for compute-sanitizer and Triton's interpreter")
    parser.add_argument("--seed", type=int, default=1)
    killed_rank.add_options(parser)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    options.output = options.output.absolute()
    if not uses_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        raise SystemExit("the kernels need a GPU, or TRITON_INTERPRET=1")
    return killed_rank.run(options, run_epochs, step)


if __name__ == "__main__":
    sys.exit(main())
