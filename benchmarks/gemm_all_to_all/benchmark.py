"""Fused GEMM + All-to-All against cuBLAS and NCCL, and the expert layer against an unfused one.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemm_all_to_all.benchmark --output results.json
        [--cells tiny|full|few] [--stage op|gemm|layer|all] [--match REGEX] [--seconds-budget 400]

bf16. In each stage the contestants take turns, with the same operands:

* op: ``dlrm_fused.gemm_all_to_all``, as it chooses its schedule and with the other ones, against cuBLAS, then NCCL's
  all_to_all_single, both into memory that is allocated before; and cuBLAS alone. What lasts less than 50 us is timed in CUDA
  graphs. Different operands take turns, so that the L2 cache does not hold them. Results are compared with fp64.
* gemm: the operator's kernel without communication against cuBLAS; one rank will do. GPUs only.
* layer: a router and experts that all ranks share, forward, and forward with backward: ``dlrm_fused.ops.moe`` against
  its reference: counts through the host, all_to_all_single, torch's grouped GEMM. The same router. Outputs and gradients
  are compared with the reference in fp32.

A cell whose results are wrong is reported as failed. The floor of a cell is the time of its flops at the speed of a large
cuBLAS product, of its bytes at that of plain copies, or of what it sends at that of plain stores or copies to the peers,
whichever is longest; all measured in the same run. Without GPUs everything runs through shared memory and gloo: that tests
this script, not the speed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.benchmark_command import benchmark_parser
from benchmarks.common.harness import (
    Report,
    World,
    compile_ahead,
    describe_run,
    measure_ceilings,
    measure_teraflops,
    open_world,
)
from benchmarks.gemm_all_to_all.cells import DTYPE, LAYER_CELLS, LAYER_TOLERANCE, PRODUCT_CELLS, TOLERANCE, Layer, Product
from benchmarks.gemm_all_to_all.products import FusedProduct, ProductAlone, ProductRun, new_workspace
from benchmarks.gemm_all_to_all.report import REPORT
from benchmarks.moe.layers import LayerRun
from dlrm_fused.ops.gemm_all_to_all import gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm


class Run:
    """All cells, and the report that is written after each."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.on_gpu = world.device.type == "cuda"
        self.ceilings = measure_ceilings(world)
        self.teraflops = measure_teraflops(world, DTYPE)
        head = {
            **describe_run(world, options.commit),
            "ceilings": {"unit": "GB/s of a rank", **asdict(self.ceilings), "teraflops": self.teraflops},
            "dtype": str(DTYPE).removeprefix("torch."),
            "tolerances": {"products": TOLERANCE, "layers": LAYER_TOLERANCE},
        }
        world.log(json.dumps(head, indent=2))
        self.report = Report(
            world,
            options.output,
            head,
            summarize=REPORT.summarize,
            line=lambda cell: f"{cell['stage']:<14} {REPORT.line(cell)}",
            seconds_budget=options.seconds_budget,
        )

    def work(self) -> None:
        is_asked_for = re.compile(self.options.match).search
        products = [cell for cell in PRODUCT_CELLS[self.options.cells]() if is_asked_for(cell.name)]
        layers = [cell for cell in LAYER_CELLS[self.options.cells]() if is_asked_for(cell.name)]
        wanted = self.options.stage
        if products and wanted in ("op", "all"):
            self.measure_op(products)
        if products and wanted in ("gemm", "all") and self.on_gpu:
            self.measure_gemm(products)
        if wanted in ("layer", "all"):
            self.measure_layers(layers)
        self.report.write()
        self.world.log(REPORT.table(self.report.content))

    def measure_op(self, cells: Sequence[Product]) -> None:
        if self.on_gpu:
            self.compile_op(cells)
            self.world.free_symmetric_memory()
        for cell in cells:
            self.measure(cell, "op", partial(self.run_product, FusedProduct, cell))
            self.world.free_symmetric_memory()

    def compile_op(self, cells: Sequence[Product]) -> None:
        """The kernels of all cells, before the first is timed."""
        workspace = new_workspace(self.world, "compilation", max(cell.m for cell in cells), max(cell.n for cell in cells))

        def call(cell: Product, schedule: str) -> None:
            gemm_all_to_all(workspace, *self.empty_operands(cell), schedule=schedule)

        compile_ahead(self.world, [partial(call, cell, schedule) for cell in cells for schedule in ("kernel", "chunks")])

    def measure_gemm(self, cells: Sequence[Product]) -> None:
        def call(cell: Product) -> None:
            gemm(*self.empty_operands(cell), torch.empty(cell.m, cell.n, dtype=DTYPE, device=self.world.device))

        compile_ahead(self.world, [partial(call, cell) for cell in cells])
        for cell in cells:
            self.measure(cell, "gemm", partial(self.run_product, ProductAlone, cell))

    def run_product(self, kind: type[ProductRun], cell: Product) -> dict[str, Any]:
        return kind(self.world, cell, self.options.seconds_per_cell).result(self.ceilings, self.teraflops)

    def measure_layers(self, cells: Sequence[Layer]) -> None:
        for cell in cells:
            self.measure_layer(cell)
            self.world.free_symmetric_memory()

    def measure_layer(self, cell: Layer) -> None:
        run: LayerRun | None = None

        def work(training: bool) -> dict[str, Any]:
            nonlocal run
            if run is None:
                run = LayerRun(self.world, cell, self.options.seconds_per_cell)
                compile_ahead(self.world, [run.step])
            return run.result(self.ceilings, self.teraflops, training=training)

        for stage, training in {"layer_forward": False, "layer_training": True}.items():
            self.measure(cell, stage, partial(work, training))

    def measure(self, cell: Product | Layer, stage: str, work: Callable[[], dict[str, Any]]) -> None:
        """One entry of the report."""
        if not self.report.has_time(f"{stage} {cell.name}"):
            return
        entry = {"name": cell.name, "stage": stage, **asdict(cell)}
        result = self.report.attempt(entry, work)
        if result is not None:
            self.report.add({**entry, **result})
        if self.on_gpu:
            torch.cuda.empty_cache()

    def empty_operands(self, cell: Product) -> tuple[Tensor, Tensor]:
        x, weight = (torch.empty(rows, cell.k, dtype=DTYPE, device=self.world.device) for rows in (cell.m, cell.n))
        return x, weight


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, PRODUCT_CELLS, "full", 0.3)
    parser.add_argument("--stage", choices=["op", "gemm", "layer", "all"], default="all")
    options = parser.parse_args(arguments)
    with open_world(options.slices_by, options.ranks_per_host) as world:
        Run(world, options).work()


if __name__ == "__main__":
    main()
