"""Fused embedding + All-to-All against FBGEMM's lookup and NCCL, as TorchRec runs them.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.embedding_all_to_all.benchmark --output results.json
        [--cells tiny|small|full] [--stage forward|training|row_wise|all] [--match REGEX] [--seconds-budget 400] [--graphs]

Each cell is timed for three candidates, which read and update the same tables:

* baseline: FBGEMM's table-batched embedding (TBE), then TorchRec's PooledEmbeddingsAllToAll (NCCL and its concatenation), or
  PooledEmbeddingsReduceScatter for row-wise tables. For every cell the fastest settings are sought that a user has:
  ``use_experimental_tbe`` and TorchRec's synchronous collectives, each on or off;
* TBE + copy: the same TBE, then ``dlrm_fused.pooled_all_to_all``: a copy into the peers' memory;
* fused: ``dlrm_fused.embedding_all_to_all``.

Before it is timed, every candidate's result is compared with the baseline's, in training also weights and momentum after one
step from the same start; cells with a mismatch are reported as failed. The floor of a cell is the time in which its bytes can
be moved at the speed of plain copies, measured in the same run. On a machine without GPUs, where the fused kernels need
``TRITON_INTERPRET=1``, "fused" is FBGEMM's lookup and ``pooled_all_to_all``: that tests this script, not the speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, set_use_sync_collectives
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter

from benchmarks.common.benchmark_command import benchmark_parser
from benchmarks.common.harness import (
    Ceilings,
    Report,
    Timing,
    World,
    captured,
    describe_run,
    measure_ceilings,
    open_world,
    relative_error,
    synchronize,
    time_interleaved,
)
from benchmarks.embedding_all_to_all.cells import CELLS, Cell, Lookup, LookupDrawer, row_wise_cells, table_rows
from benchmarks.embedding_all_to_all.report import REPORT
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    ExchangeLayout,
    LocalTables,
    LookupLayout,
    RowwiseAdagrad,
    embedding_all_to_all,
    pooled_all_to_all,
)
from dlrm_fused.symmetric.device import uses_kernels

LEARNING_RATE, EPSILON = 0.01, 1e-8
SEED = 20
# Lookups that take turns, so that the L2 cache does not hold what is looked up.
LOOKUPS = 3
TIMEOUT_SECONDS = 60.0
# Outputs of a captured pass are never given back: memory for those of two graphs is kept for cells with small outputs only.
GRAPH_MICROSECONDS, GRAPH_OUTPUT_BYTES = 50.0, 16e6
SAMPLED_ROWS, UNTOUCHED_ROWS = 1 << 20, 1 << 16
# Largest relative error against the baseline. Weights of fp16 are rounded stochastically: one unit of the last place.
TOLERANCE = {"output": 1e-5, "weights": 1e-4, "weights of fp16": 2**-10, "momentum": 1e-4}

Forward = Callable[[Lookup], Tensor]


class Tables:
    """The tables of this rank in FBGEMM's module, which all candidates share."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.rows, self.dim, self.count = cell.rows, cell.dim, cell.tables
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(cell.rows, cell.dim, *place)] * cell.tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=EPSILON,
            weights_precision={"fp32": SparseType.FP32, "fp16": SparseType.FP16}[cell.dtype],
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
        )
        self.weights = self.tbe.weights_dev if on_gpu else self.tbe.weights_host
        self.momentum = self.tbe.momentum1_dev if on_gpu else self.tbe.momentum1_host

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Random weights and momentum, the same for the same seed."""
        generator = torch.Generator(self.weights.device).manual_seed(seed)
        self.weights.detach().uniform_(-0.05, 0.05, generator=generator)
        self.momentum.detach().uniform_(0.01, 0.02, generator=generator)

    def local(self) -> LocalTables:
        """The same memory, as the fused operator wants it described."""
        return LocalTables(
            weights=self.weights.detach(),
            offsets=tuple(self.tbe.weights_physical_offsets),
            rows=(self.rows,) * self.count,
            dims=(self.dim,) * self.count,
            feature_tables=tuple(range(self.count)),
            mean=False,
            optimizer=RowwiseAdagrad(self.momentum.detach(), self.tbe.learning_rate_tensor, EPSILON),
            stochastic_rounding=self.tbe.stochastic_rounding,
        )

    def state_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [n, dim], momentum [n]) of rows numbered across tables; copies."""
        return self.weights.detach().view(-1, self.dim)[rows], self.momentum.detach()[rows]


@dataclass(frozen=True)
class BaselineSettings:
    """What a user of TorchRec can choose for speed, where it is not clear beforehand what is best."""

    use_experimental_tbe: bool = False
    synchronous_collectives: bool = False

    def apply(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        tbe.is_experimental = self.use_experimental_tbe
        set_use_sync_collectives(self.synchronous_collectives)


def describe_baseline() -> dict[str, Any]:
    """The settings that are the same for all cells."""
    return {
        "lookup": "fbgemm_gpu SplitTableBatchedEmbeddingBagsCodegen, one module for all tables of a rank",
        "optimizer": "EXACT_ROWWISE_ADAGRAD, in the backward pass",
        "pooling": "sum",
        "output_dtype": "fp32",
        "bounds_check_mode": "NONE",
        "indices_and_offsets": "int64",
        "stochastic_rounding_of_fp16": True,
        "table_wise": "torchrec PooledEmbeddingsAllToAll, no codecs",
        "row_wise": "torchrec PooledEmbeddingsReduceScatter, no codecs",
        "gradient_division": get_gradient_division(),
        "by_cell": "use_experimental_tbe and synchronous_collectives: the faster of on and off",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_", "FBGEMM_"))},
    }


def baseline(world: World, cell: Cell, tables: Tables) -> Forward:
    if cell.row_wise:
        scatter = PooledEmbeddingsReduceScatter(world.group)
        return lambda lookup: scatter(tables.tbe(lookup.indices, lookup.offsets)).wait()
    workspace = PooledEmbeddingsAllToAll(world.group, [cell.width] * world.size, world.device)
    return lambda lookup: workspace(tables.tbe(lookup.indices, lookup.offsets)).wait()


_numbers = itertools.count()


def new_workspace(world: World, cell: Cell, *, held_outputs: int) -> EmbeddingWorkspace:
    """Collective."""
    dims = (cell.dim,) * cell.tables
    lookups = []
    for rank in range(world.size):
        first = 0 if cell.row_wise else rank * cell.width
        columns = tuple(first + table * cell.dim for table in range(cell.tables))
        lookups.append((LookupLayout(columns, dims, cell.row_wise),))
    return EmbeddingWorkspace(
        world.symmetric,
        ExchangeLayout(tuple(lookups), cell.columns(world.size)),
        name=f"benchmark {next(_numbers)}",
        gradient_scale=1 / world.size if get_gradient_division() else 1.0,
        timeout_seconds=TIMEOUT_SECONDS,
        held_outputs=held_outputs,
    )


def copied(world: World, cell: Cell, tables: Tables, workspace: EmbeddingWorkspace) -> Forward:
    batches = [cell.bags // world.size] * world.size
    return lambda lookup: pooled_all_to_all(workspace, [tables.tbe(lookup.indices, lookup.offsets)], batches)


def fused(world: World, cell: Cell, tables: Tables, workspace: EmbeddingWorkspace) -> Forward:
    batches = [cell.bags // world.size] * world.size
    workspace.attach_tables([tables.local()])
    return lambda lookup: embedding_all_to_all(workspace, [lookup.indices], [lookup.offsets], [], batches)


class CellRun:
    """One cell on this rank: inputs, candidates, checks and times. Everything is collective."""

    def __init__(self, world: World, cell: Cell, tables: Tables, options: argparse.Namespace) -> None:
        self.world, self.cell, self.tables = world, cell, tables
        self.seconds = options.seconds_per_cell
        self.experimental_tbe = options.experimental_tbe
        drawer = LookupDrawer(cell, world.rank, world.size, world.device, SEED)
        self.lookups = [drawer.draw() for _ in range(LOOKUPS)]
        self.touched = table_rows(cell, self.lookups[0])
        generator = torch.Generator(world.device).manual_seed(SEED + world.rank)
        batch, columns = cell.bags // world.size, cell.columns(world.size)
        self.gradient = torch.randn(batch, columns, generator=generator, device=world.device)
        self.pooled_gradient = torch.randn(cell.bags, cell.width, generator=generator, device=world.device)
        self.graphs = options.graphs and world.device.type == "cuda" and self.gradient.nbytes < GRAPH_OUTPUT_BYTES
        held_outputs = 2 + (2 * LOOKUPS if self.graphs else 0)
        self.forwards: dict[str, Forward] = {"baseline": baseline(world, cell, tables)}
        # A machine without kernels has one way only.
        other = {"copy": copied, "fused": fused} if uses_kernels(world.device) else {"fused": copied}
        for name, candidate in other.items():
            self.forwards[name] = candidate(world, cell, tables, new_workspace(world, cell, held_outputs=held_outputs))
        self.forwards["lookup"] = lambda lookup: tables.tbe(lookup.indices, lookup.offsets)

    def pass_of(self, name: str, training: bool) -> Callable[[], None]:
        """All lookups once, by one candidate."""
        forward = self.forwards[name]
        gradient = self.pooled_gradient if name == "lookup" else self.gradient

        def train() -> None:
            for lookup in self.lookups:
                forward(lookup).backward(gradient)

        @torch.no_grad()
        def evaluate() -> None:
            for lookup in self.lookups:
                forward(lookup)

        return train if training else evaluate

    def choose_baseline(self, training: bool) -> tuple[BaselineSettings, dict[str, float]]:
        """The fastest settings, by a short measurement, and the microseconds of all."""
        choices = [BaselineSettings(False, synchronous) for synchronous in (False, True)]
        if self.world.device.type == "cuda" and self.experimental_tbe:
            choices += [replace(choice, use_experimental_tbe=True) for choice in choices]
        choices = [choice for choice in choices if self.is_supported(choice)]
        run = self.pass_of("baseline", training)

        def with_settings(settings: BaselineSettings) -> Callable[[], None]:
            def call() -> None:
                settings.apply(self.tables.tbe)
                run()

            return call

        calls = {str(choice): with_settings(choice) for choice in choices}
        timings = time_interleaved(self.world, calls, self.seconds / 4, rounds=(3, 10))
        best = min(choices, key=lambda choice: timings[str(choice)].microseconds)
        best.apply(self.tables.tbe)
        return best, {str(choice): timings[str(choice)].microseconds / LOOKUPS for choice in choices}

    def is_supported(self, settings: BaselineSettings) -> bool:
        """Whether FBGEMM and TorchRec have these settings for the cell's tables."""
        settings.apply(self.tables.tbe)
        error = ""
        try:
            self.forwards["baseline"](self.lookups[0])
        except (RuntimeError, NotImplementedError, AssertionError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        errors = [other for other in self.world.gather(error) if other]
        if errors:
            self.world.log(f"{self.cell.name}: {settings}: {errors[0].splitlines()[0]}")
        return not errors

    def errors(self, training: bool) -> dict[str, float]:
        """Largest relative errors of the candidates' results on any rank, by what is compared and the candidate."""
        others = [name for name in self.forwards if name not in ("baseline", "lookup")]
        errors: dict[str, float] = {}
        self.tables.fill(SEED)
        with torch.no_grad():
            for lookup in self.lookups:
                expected = self.forwards["baseline"](lookup).clone()
                for name in others:
                    key = f"output of {name}"
                    errors[key] = max(errors.get(key, 0.0), relative_error(self.forwards[name](lookup), expected))
        if training:
            rows = self.sampled_rows()
            weights, momentum = self.state_after_step("baseline", rows)
            for name in others:
                its_weights, its_momentum = self.state_after_step(name, rows)
                errors[f"weights of {name}"] = relative_error(its_weights, weights)
                errors[f"momentum of {name}"] = relative_error(its_momentum, momentum)
        every_rank = self.world.gather(errors)
        return {key: max(own[key] for own in every_rank) for key in errors}

    def sampled_rows(self) -> Tensor:
        """Rows of the first lookup, and others; numbered across tables."""
        generator = torch.Generator(self.world.device).manual_seed(SEED)
        device, count = self.world.device, self.touched.numel()
        touched = self.touched[torch.randperm(count, generator=generator, device=device)[:SAMPLED_ROWS]]
        total = self.tables.rows * self.tables.count
        return torch.cat([touched, torch.randint(0, total, (UNTOUCHED_ROWS,), generator=generator, device=device)])

    def state_after_step(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and momentum of the rows after one training step from the same start."""
        self.tables.fill(SEED)
        self.forwards[name](self.lookups[0]).backward(self.gradient)
        synchronize(self.world.device)
        return self.tables.state_of(rows)

    def passes(self, errors: Mapping[str, float]) -> bool:
        """Whether all errors are within their tolerance."""
        return all(error <= self.tolerance(key.split(" of ")[0]) for key, error in errors.items())

    def tolerance(self, what: str) -> float:
        return TOLERANCE["weights of fp16" if what == "weights" and self.cell.dtype == "fp16" else what]

    def times(self, training: bool) -> tuple[dict[str, Timing], dict[str, Any]]:
        """Timings of all lookups together, and how they were taken."""
        runs = {name: self.pass_of(name, training) for name in self.forwards}
        timings = time_interleaved(self.world, runs, self.seconds)
        remarks: dict[str, Any] = {"timed": "bursts"}
        if self.graphs and timings["fused"].microseconds / LOOKUPS < GRAPH_MICROSECONDS:
            replays = {}
            for name, run in runs.items():
                replay, problem = captured(self.world, run)
                if replay is None:
                    remarks["no_graph"] = f"{name}: {problem}"
                    break
                replays[name] = replay
            else:
                remarks = {"timed": "graphs", "bursts_us": {n: t.microseconds / LOOKUPS for n, t in timings.items()}}
                timings = time_interleaved(self.world, replays, self.seconds)
        return timings, remarks

    def floors(self, ceilings: Ceilings, training: bool) -> dict[str, float]:
        """Least times, by what the slowest rank has to move, in microseconds."""
        lookups = sum(lookup.indices.numel() for lookup in self.lookups) / LOOKUPS
        distinct = float(self.touched.numel())
        memory, links = [self.cell.forward_bytes(lookups, distinct)], [self.forward_link_bytes()]
        if training:
            memory.append(self.cell.backward_bytes(lookups, distinct))
            links.append(self.cell.link_bytes(self.world.size))
        own = {
            "lookups": lookups,
            "distinct_rows": distinct,
            "memory_bytes": sum(memory),
            "link_bytes": sum(links),
            "floor_us": sum(ceilings.transfer_microseconds(*phase) for phase in zip(memory, links, strict=True)),
            "link_us": ceilings.transfer_microseconds(0, sum(links)),
            "link_by_stores_us": sum(links) / ceilings.peer_stores / 1e3,
        }
        every_rank = self.world.gather(own)
        return {key: max(rank[key] for rank in every_rank) for key in own}

    def forward_link_bytes(self) -> float:
        """Bytes that this rank has to send in the forward pass. An empty partial sum needs one that says so."""
        link = self.cell.link_bytes(self.world.size)
        if not self.cell.row_wise:
            return link
        filled = sum(float((lookup.offsets.diff() > 0).double().mean()) for lookup in self.lookups) / LOOKUPS
        return link * (filled + 1 / (4 * self.cell.dim))

    def result(self, ceilings: Ceilings, training: bool) -> dict[str, Any]:
        """One line of the report."""
        settings, by_settings = self.choose_baseline(training)
        errors = self.errors(training)
        timings, remarks = self.times(training)
        floors = self.floors(ceilings, training)
        microseconds = {name: timing.microseconds / LOOKUPS for name, timing in timings.items()}
        fused_us, lookup_us = microseconds["fused"], microseconds["lookup"]
        copy_us = microseconds.get("copy")
        return {
            "errors": errors,
            "passed": self.passes(errors),
            "baseline_us": microseconds["baseline"],
            "copy_us": copy_us,
            "fused_us": fused_us,
            "lookup_us": lookup_us,
            "ratio": fused_us / microseconds["baseline"],
            "ratio_to_defaults": fused_us / by_settings[str(BaselineSettings())],
            "ratio_to_copy": fused_us / copy_us if copy_us else None,
            **floors,
            "fused_over_floor": fused_us / floors["floor_us"],
            "overlap": fused_us / max(lookup_us, floors["link_us"]),
            "overlap_of_stores": fused_us / max(lookup_us, floors["link_by_stores_us"]),
            "baseline_settings": asdict(settings),
            "baseline_choices_us": by_settings,
            "spread": {name: timing.spread for name, timing in timings.items()},
            "by_rank_us": {name: [t / LOOKUPS for t in timing.by_rank] for name, timing in timings.items()},
            **remarks,
        }


class Run:
    """All cells, and the report that is written after each."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        head = {
            **describe_run(world, options.commit),
            "baseline": describe_baseline(),
            "timing": {"lookups_in_turn": LOOKUPS, "tolerances": TOLERANCE},
        }
        self.ceilings = measure_ceilings(world)
        head["ceilings"] = {"unit": "GB/s of a rank", **asdict(self.ceilings)}
        self.report = Report(
            world,
            options.output,
            head,
            summarize=REPORT.summarize,
            line=lambda cell: f"{cell['stage']:<17} {REPORT.line(cell)}",
            seconds_budget=options.seconds_budget,
        )
        world.log(json.dumps(head, indent=2))

    def work(self) -> None:
        for cells in self.groups():
            tables = None
            for cell in cells:
                if not self.report.has_time(cell.name):
                    continue
                # The tables are made for the first cell that runs.
                tables = tables or self.report.attempt(entry(cell, False), partial(Tables, cell, self.world.device))
                if tables is not None:
                    self.measure(cell, tables)
            del tables
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        self.report.write()
        self.world.log(REPORT.table(self.report.content))

    def groups(self) -> list[list[Cell]]:
        """Cells that share tables, in an order that leaves a fair sample when time runs out."""
        stage, cells = self.options.stage, CELLS[self.options.cells]()
        wanted = cells if stage != "row_wise" else []
        wanted = wanted + (row_wise_cells(cells) if stage in ("row_wise", "all") else [])
        by_tables: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in wanted:
            if re.search(self.options.match, cell.name):
                by_tables.setdefault((cell.tables, cell.dim, cell.dtype, cell.rows), []).append(cell)
        groups = list(by_tables.values())
        random.Random(SEED).shuffle(groups)
        return groups

    def measure(self, cell: Cell, tables: Tables) -> None:
        run = self.report.attempt(entry(cell, False), partial(CellRun, self.world, cell, tables, self.options))
        if run is None:
            return
        for training in (False, True):
            wanted = {"forward": not training, "training": training}.get(self.options.stage, True)
            if wanted:
                result = self.report.attempt(entry(cell, training), partial(run.result, self.ceilings, training))
                if result is not None:
                    self.report.add({**entry(cell, training), **result})


def entry(cell: Cell, training: bool) -> dict[str, Any]:
    """What the report of a cell begins with."""
    stage = ("row_wise_" if cell.row_wise else "") + ("training" if training else "forward")
    shape = {**asdict(cell), "rows": cell.rows}
    del shape["largest_rows"]
    return {"name": cell.name, "stage": stage, **shape}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, CELLS, "full", 0.5)
    parser.add_argument("--stage", choices=["forward", "training", "row_wise", "all"], default="all")
    parser.add_argument(
        "--graphs", action="store_true", help=f"time cells below {GRAPH_MICROSECONDS:.0f} us as CUDA graphs, all candidates"
    )
    parser.add_argument(
        "--experimental-tbe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="try FBGEMM's use_experimental_tbe for the baseline",
    )
    options = parser.parse_args(arguments)
    with open_world(options.slices_by, options.ranks_per_host) as world:
        if world.size not in (2, 4, 8):
            parser.error(f"{world.size} ranks: the bags of the cells are divided evenly among 2, 4 or 8")
        Run(world, options).work()


if __name__ == "__main__":
    main()
