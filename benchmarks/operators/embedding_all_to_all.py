"""Pooled lookup + All-to-All against FBGEMM's lookup and NCCL, as TorchRec runs them.

The contestants of a cell read and update the same tables:

* baseline: FBGEMM's table-batched embedding (TBE), then TorchRec's PooledEmbeddingsAllToAll, or, for row-wise tables, its
  PooledEmbeddingsReduceScatter. For every cell the fastest settings are sought that a user has;
* copy: the same TBE, then ``dlrm_fused.pooled_all_to_all``: a copy into the peers' memory;
* fused: ``dlrm_fused.embedding_all_to_all``; without GPUs and TRITON_INTERPRET=1, the same as copy;
* lookup: the TBE alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, set_use_sync_collectives
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter

from benchmarks.common.harness import Work, World, relative_error, synchronize, time_interleaved
from benchmarks.operators.case import TIMEOUT_SECONDS, Case, Operator, Pass
from benchmarks.operators.embedding_all_to_all_stress import works
from benchmarks.operators.embedding_lookups import (
    Cell,
    Lookup,
    LookupDrawer,
    full_cells,
    row_wise_cells,
    small_cells,
    table_rows,
    tiny_cells,
    tuned_cells,
)
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
# Outputs of a captured pass are never given back: memory for those of two graphs is kept for cells with small outputs only.
_GRAPH_OUTPUT_BYTES = 16e6
_SAMPLED_ROWS, _UNTOUCHED_ROWS = 1 << 20, 1 << 16
# The time in which the baseline's settings are chosen.
_SECONDS_OF_CHOICE = 0.1
# Largest relative error against the baseline. Weights of fp16 are rounded stochastically: one unit of the last place.
TOLERANCES = {"output": 1e-5, "weights": 1e-4, "weights of fp16": 2**-10, "momentum": 1e-4}

Forward = Callable[[Lookup], Tensor]


class Tables:
    """The tables of this rank in FBGEMM's module, which all contestants share."""

    def __init__(self, cell: Cell, device: torch.device, pooling: PoolingMode = PoolingMode.SUM) -> None:
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
            pooling_mode=pooling,
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
        """Describe this memory as the fused operator wants it."""
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
    """The settings by which a user of TorchRec may gain speed, and of which the best is not known beforehand."""

    use_experimental_tbe: bool = False
    synchronous_collectives: bool = False

    def apply(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        tbe.is_experimental = self.use_experimental_tbe
        set_use_sync_collectives(self.synchronous_collectives)


def new_workspace(world: World, cell: Cell, name: str, *, held_outputs: int) -> EmbeddingWorkspace:
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
        name=name,
        gradient_scale=1 / world.size if get_gradient_division() else 1.0,
        timeout_seconds=TIMEOUT_SECONDS,
        held_outputs=held_outputs,
    )


class EmbeddingCase(Case):
    """A cell on this rank."""

    cell: Cell
    calls = LOOKUPS
    baseline, alone = "baseline", "lookup"
    rivals: Sequence[str] = ("baseline", "copy", "lookup")
    pooling = PoolingMode.SUM

    def __init__(self, world: World, cell: Cell) -> None:
        """Raises ValueError if the bags of the cell cannot be divided evenly among the ranks."""
        super().__init__(world, cell)
        batch, rest = divmod(cell.bags, world.size)
        if rest:
            raise ValueError(f"{world.size} ranks: the {cell.bags} bags of the cell are not divided evenly among them")
        self.tables = Tables(cell, world.device, self.pooling)
        drawer = LookupDrawer(cell, world.rank, world.size, world.device, SEED)
        self.lookups = [drawer.draw() for _ in range(LOOKUPS)]
        self.touched = table_rows(cell, self.lookups[0])
        self.batches = [batch] * world.size
        self.draw_gradients(torch.Generator(world.device).manual_seed(SEED + world.rank))
        self.settings, self.choices_us = BaselineSettings(), dict[str, float]()
        self.forwards = self.choose_forwards()

    def draw_gradients(self, generator: torch.Generator) -> None:
        cell, world = self.cell, self.world
        self.gradient = torch.randn(self.batches[0], cell.columns(world.size), generator=generator, device=world.device)
        self.pooled_gradient = torch.randn(cell.bags, cell.width, generator=generator, device=world.device)
        self.can_be_captured = self.gradient.nbytes < _GRAPH_OUTPUT_BYTES

    def gradient_of(self, name: str, lookup: Lookup) -> Tensor:
        """The gradient of what a contestant gives."""
        return self.pooled_gradient if name == "lookup" else self.gradient

    def choose_forwards(self) -> dict[str, Forward]:
        """By contestant, the one first whose time decides about graphs."""
        tbe, held = self.tables.tbe, 2 + (2 * LOOKUPS if self.can_be_captured else 0)

        def library(lookup: Lookup) -> Tensor:
            pooled: Tensor = tbe(lookup.indices, lookup.offsets)
            return pooled

        copied = new_workspace(self.world, self.cell, "benchmark: copy", held_outputs=held)
        forwards: dict[str, Forward] = {"fused": lambda own: pooled_all_to_all(copied, [library(own)], self.batches)}
        # A machine without kernels has one way only.
        if uses_kernels(self.world.device):
            fused = new_workspace(self.world, self.cell, "benchmark: fused", held_outputs=held)
            fused.attach_tables([self.tables.local()])
            forwards["copy"] = forwards["fused"]
            forwards["fused"] = lambda own: embedding_all_to_all(fused, [own.indices], [own.offsets], [], self.batches)
        if self.cell.row_wise:
            exchange = PooledEmbeddingsReduceScatter(self.world.group)
        else:
            exchange = PooledEmbeddingsAllToAll(self.world.group, [self.cell.width] * self.world.size, self.world.device)
        return {**forwards, "baseline": lambda lookup: exchange(library(lookup)).wait(), "lookup": library}

    def passes(self, stage: str) -> dict[str, Pass]:
        training = stage.endswith("training")
        self.choose_baseline(training)
        return {name: self.pass_of(name, training) for name in self.forwards}

    def own_pass(self, *, training: bool) -> Pass:
        return self.pass_of("fused", training)

    def pass_of(self, name: str, training: bool) -> Pass:
        """All lookups once, by one contestant."""
        forward = self.forwards[name]

        def train() -> None:
            for lookup in self.lookups:
                forward(lookup).backward(self.gradient_of(name, lookup))

        @torch.no_grad()
        def evaluate() -> None:
            for lookup in self.lookups:
                forward(lookup)

        return train if training else evaluate

    def choose_baseline(self, training: bool) -> None:
        """Apply the fastest settings, by a short measurement."""
        choices = [BaselineSettings(False, synchronous) for synchronous in (False, True)]
        if self.world.device.type == "cuda":
            choices += [replace(choice, use_experimental_tbe=True) for choice in choices]
        choices = [choice for choice in choices if self.is_supported(choice)]
        run = self.pass_of("baseline", training)

        def with_settings(settings: BaselineSettings) -> Pass:
            def call() -> None:
                settings.apply(self.tables.tbe)
                run()

            return call

        calls = {str(choice): with_settings(choice) for choice in choices}
        timings = time_interleaved(self.world, calls, _SECONDS_OF_CHOICE, rounds=(3, 10))
        self.choices_us = {name: timing.microseconds / LOOKUPS for name, timing in timings.items()}
        self.settings = min(choices, key=lambda choice: self.choices_us[str(choice)])
        self.settings.apply(self.tables.tbe)

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

    def check(self, stage: str) -> dict[str, Any]:
        """Outputs, in training also weights and momentum after one step from the same start, against the baseline's."""
        others = [name for name in self.forwards if name not in ("baseline", "lookup")]
        errors: dict[str, float] = {}
        self.tables.fill(SEED)
        with torch.no_grad():
            for lookup in self.lookups:
                expected = self.forwards["baseline"](lookup).clone()
                for name in others:
                    key = f"output of {name}"
                    errors[key] = max(errors.get(key, 0.0), relative_error(self.forwards[name](lookup), expected))
        if stage.endswith("training"):
            rows = self.sampled_rows()
            weights, momentum = self.state_after_step("baseline", rows)
            for name in others:
                its_weights, its_momentum = self.state_after_step(name, rows)
                errors[f"weights of {name}"] = relative_error(its_weights, weights)
                errors[f"momentum of {name}"] = relative_error(its_momentum, momentum)
        every_rank = self.world.gather(errors)
        errors = {key: max(own[key] for own in every_rank) for key in errors}
        return {"passed": all(error <= self.tolerance(key.split(" of ")[0]) for key, error in errors.items()), "errors": errors}

    def tolerance(self, what: str) -> float:
        return TOLERANCES["weights of fp16" if what == "weights" and self.cell.dtype == "fp16" else what]

    def sampled_rows(self) -> Tensor:
        """Rows of the first lookup, and others; numbered across tables."""
        generator = torch.Generator(self.world.device).manual_seed(SEED)
        device, count = self.world.device, self.touched.numel()
        touched = self.touched[torch.randperm(count, generator=generator, device=device)[:_SAMPLED_ROWS]]
        total = self.tables.rows * self.tables.count
        return torch.cat([touched, torch.randint(0, total, (_UNTOUCHED_ROWS,), generator=generator, device=device)])

    def state_after_step(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and momentum of the rows after one training step from the same start."""
        self.tables.fill(SEED)
        self.forwards[name](self.lookups[0]).backward(self.gradient_of(name, self.lookups[0]))
        synchronize(self.world.device)
        return self.tables.state_of(rows)

    def phases(self, stage: str) -> Sequence[Work]:
        lookups = sum(lookup.indices.numel() for lookup in self.lookups) / LOOKUPS
        distinct, link = float(self.touched.numel()), self.cell.link_bytes(self.world.size)
        filled = sum(float((lookup.offsets.diff() > 0).double().mean()) for lookup in self.lookups) / LOOKUPS
        # Row-wise, an empty partial sum is not sent; a byte for each bag says so.
        sent = link * (filled + 1 / (4 * self.cell.dim)) if self.cell.row_wise else link
        phases = [Work(0, self.cell.forward_bytes(lookups, distinct), sent)]
        if stage.endswith("training"):
            phases.append(Work(0, self.cell.backward_bytes(lookups, distinct), link))
        return phases

    def remarks(self, us: Mapping[str, float]) -> dict[str, Any]:
        return {
            "ratio_to_defaults": us["fused"] / self.choices_us[str(BaselineSettings())],
            "ratio_to_copy": us["fused"] / us["copy"] if "copy" in us else None,
            "baseline_settings": asdict(self.settings),
            "baseline_choices_us": self.choices_us,
        }


OPERATOR = Operator(
    open=EmbeddingCase,
    sets={
        "tiny": lambda: [*tiny_cells(), *row_wise_cells(tiny_cells())],
        "small": small_cells,
        "lookups": tuned_cells,
        "all": lambda: [*full_cells(), *row_wise_cells(full_cells())],
    },
    stages=lambda cell: ["row_wise_forward", "row_wise_training"] if cell.row_wise else ["forward", "training"],
    works=works,
)
