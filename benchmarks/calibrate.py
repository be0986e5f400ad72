"""Rates of one rank for ``python -m dlrm_fused.scaleout``: products, elementwise kernels, lookups, updates, launches.

    python -m benchmarks.calibrate --output h100.json
    python -m benchmarks.calibrate --device cpu --config configs/synthetic.yaml --gbits-per-second 0.25 1 4 --output cpu.json \
        embedding.optimizer.kind=sgd

Half of the measurements are left out of the fit; ``held_out`` has the relative error of each of these. On a GPU, kernels are
replayed from a CUDA graph, as the trainer replays its dense part. Lookups and updates are those of the tables of ``--config``,
with settings of the trainer after it, since popular rows are in caches: FBGEMM's, and on GPUs those of ``comm=fused``. With
several GPUs NCCL's collectives and the stores of kernels are measured on all of them, beside ``--nvlink-gb-per-second``. With
``--gbits-per-second`` gloo's collectives are measured, between two network namespaces on such links; this needs root.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.common.environment import device_name
from benchmarks.common.harness import World, describe_run, open_world, seconds_of, synchronize
from benchmarks.common.network import obstacle
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.scaleout import links, tables
from dlrm_fused.config import Config, load_config
from dlrm_fused.errors import ConfigError
from dlrm_fused.scaleout.dense_trace import Kernel
from dlrm_fused.scaleout.machine import Machine

_CALLS_OF_A_COLLECTIVE = 20
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Point = TypeVar("Point")
# Work (operations or bytes) and seconds.
Points = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--config", default="configs/criteo_1tb_dcnv2_synthetic.yaml", help="of the trainer, for its tables")
    parser.add_argument("settings", nargs="*", help="of the trainer, key=value")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--gbits-per-second", type=float, nargs="*", default=[], help="of links; none: all of a link is reached"
    )
    parser.add_argument("--nvlink-gb-per-second", type=float, default=450, help="of a GPU, in one direction")
    options = parser.parse_intermixed_args()
    if options.gbits_per_second and (reason := obstacle()):
        raise SystemExit(f"--gbits-per-second: this machine cannot have several hosts: {reason}")
    try:
        config = load_config(options.config, options.settings)
    except ConfigError as error:
        raise SystemExit(f"calibrate: {error}") from None
    torch.backends.cuda.matmul.allow_tf32 = False
    with open_world(on_gpus=options.device == "cuda") as world:
        calibrate(world, config, options)


def calibrate(world: World, config: Config, options: argparse.Namespace) -> None:
    """Measure, fit, and write the report."""
    device = world.device
    scale = 1 if device.type == "cuda" else 64  # CPUs are so much slower
    launch = _elementwise(world, [4])[0][1]
    lines = _lines(world, scale, config)
    on_links: dict[str, dict[str, Points]] = {"links": {}, "NVLink": {}}
    if options.gbits_per_second:
        on_links["links"] = links.between_hosts(options.gbits_per_second)
    if device.type == "cuda" and (gpus := torch.cuda.device_count()) > 1:
        on_links["NVLink"] = links.within_a_host(gpus, options.nvlink_gb_per_second * 1e9)
    for link, points_of in on_links.items():
        lines |= {f"{name} on {link}": points for name, points in points_of.items()}
    fits = {name: fit_line(*zip(*_fitted(points), strict=True)) for name, points in lines.items()}
    held_out = {name: _errors(_left_out(points), *fits[name]) for name, points in lines.items()}

    # Not in bf16 on CPUs, many of which emulate it.
    dtypes = _DTYPES if device.type == "cuda" else {"fp32": torch.float32}
    products = {name: _products(world, dtype, scale) for name, dtype in dtypes.items()}
    peaks = {name: _peak_and_half(_fitted(points), launch, fits["memory"][1]) for name, points in products.items()}
    machine = Machine(
        name=device_name(device),
        launch=launch,
        memory=fits["memory"][1],
        products={name: peak for name, (peak, _) in peaks.items()},
        half_products={name: half for name, (_, half) in peaks.items()},
        lookup=fits["lookup"][1],
        update=fits["update"][1],
        optimizer=fits["optimizer"][1],
        collective=_collective(world),
        link_shares={name: min(1.0, fits[f"{name} on links"][1]) for name in on_links["links"]},
        nvlink_shares={name: min(1.0, fits[f"{name} on NVLink"][1]) for name in on_links["NVLink"]},
        fused_speeds={
            name: fits[f"fused {name}"][1] / fits[other][1]
            for name, other in (("lookup", "lookup"), ("update", "update"), ("sort", "update"))
            if f"fused {name}" in fits
        },
    )
    for name, measured in products.items():
        held_out[f"products {name}"] = [machine.seconds(kernel, name) / seconds - 1 for kernel, seconds in _left_out(measured)]
    report = {
        **describe_run(world, options.commit),
        "measured": {
            **{name: [list(point) for point in points] for name, points in lines.items()},
            **{
                f"products {name}": [[kernel.flops, kernel.bytes, seconds] for kernel, seconds in measured]
                for name, measured in products.items()
            },
        },
        "held_out": held_out,
        "machine": asdict(machine),
    }
    write_results(options.output, report)
    for name, errors in held_out.items():
        print(f"{name}: median error on held-out sizes {100 * statistics.median(map(abs, errors)):.1f}%")


def _lines(world: World, scale: int, config: Config) -> dict[str, Points]:
    """Measure what takes a fixed time and one that grows with its bytes."""
    # Sizes beyond the L2 cache of a GPU.
    lines = {"memory": _elementwise(world, [(2**28 if scale == 1 else 2**25) // 4 * quarters for quarters in range(4, 16)])}
    measure_tables = partial(tables.measure, world, config, [8192 // scale * eighths for eighths in range(1, 9)])
    lines |= measure_tables()
    if world.device.type == "cuda":
        lines |= {f"fused {name}": points for name, points in measure_tables(is_fused=True).items()}
    lines["optimizer"] = _optimizer(world, [(2**26 // scale) * eighths // 8 for eighths in range(2, 10)])
    return lines


def fit_line(work: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a fixed time and a rate: seconds = fixed + work / rate, by least squares of the relative errors.

    Returns:
        fixed seconds, not below 0, and the work of a second.
    """
    x, y = np.asarray(work, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    terms: NDArray[np.float64] = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    fixed, slope = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(fixed), 1 / float(slope)


def _fitted(points: Sequence[Point]) -> list[Point]:
    """Every other one; in the next four the others: of two products with as many operations, not always the same shape."""
    return [point for number, point in enumerate(points) if (number + number // 4) % 2 == 0]


def _left_out(points: Sequence[Point]) -> list[Point]:
    return [point for number, point in enumerate(points) if (number + number // 4) % 2]


def _errors(points: Points, fixed: float, rate: float) -> list[float]:
    """Return the errors of the fit: predicted over measured, less 1."""
    return [(fixed + work / rate) / seconds - 1 for work, seconds in points]


def _peak_and_half(measured: Sequence[tuple[Kernel, float]], launch: float, memory: float) -> tuple[float, float]:
    """Return both numbers of :class:`Machine`, from the products that memory does not bound."""
    bound = [(kernel.flops, seconds) for kernel, seconds in measured if kernel.bytes / memory < seconds / 2]
    fixed, peak = fit_line(*zip(*bound, strict=True))
    return peak, max(0.0, fixed - launch) * peak


def _elementwise(world: World, sizes: Sequence[int]) -> Points:
    """Bytes read and written by ``a + b``."""
    points = []
    for size in sizes:
        a, b, result = (torch.ones(size // 4, device=world.device) for _ in range(3))
        points.append((3.0 * a.nbytes, seconds_of(world, partial(torch.add, a, b, out=result), in_graph=True)))
    return points


def _products(world: World, dtype: torch.dtype, scale: int) -> list[tuple[Kernel, float]]:
    """Layers of the models here, the last of them of experts and Transformers: rows of a batch, inputs, outputs."""
    shapes = [
        (rows // scale * 2, inputs, outputs)
        for rows in (2048, 8192, 32768)
        for inputs, outputs in (
            *((128, 256), (512, 256), (512, 512), (3456, 512), (512, 3456), (1024, 1024), (3456, 1024)),
            *((4096, 2048), (2048, 4096), (4096, 4096)),
        )
    ]
    measured = []
    for rows, inputs, outputs in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
        a, b = (torch.randn(shape, device=world.device, dtype=dtype) for shape in ((rows, inputs), (inputs, outputs)))
        moved = float(a.nbytes + b.nbytes + rows * outputs * a.element_size())
        seconds = seconds_of(world, partial(torch.matmul, a, b), in_graph=True)
        measured.append((Kernel("mm", 2.0 * rows * inputs * outputs, moved), seconds))
    return measured


def _optimizer(world: World, sizes: Sequence[int]) -> Points:
    """Bytes read and written by Adam in one pass; by the number of parameters."""
    points = []
    for size in sizes:
        weight = torch.nn.Parameter(torch.zeros(size, device=world.device))
        weight.grad = torch.ones_like(weight)
        adam = torch.optim.Adam([weight], fused=True)
        points.append((7.0 * weight.nbytes, seconds_of(world, adam.step)))
    return points


def _collective(world: World) -> float:
    """Seconds of an AllReduce of one number that goes nowhere, with its launch: what starting one takes."""
    number, seconds = torch.ones(1, device=world.device), []
    for _ in range(10):
        synchronize(world.device)
        began = time.perf_counter()
        for _ in range(_CALLS_OF_A_COLLECTIVE):
            dist.all_reduce(number)
        synchronize(world.device)
        seconds.append((time.perf_counter() - began) / _CALLS_OF_A_COLLECTIVE)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
