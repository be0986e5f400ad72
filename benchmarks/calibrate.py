"""Rates of one rank for ``python -m dlrm_fused.scaleout``: products, elementwise kernels, lookups, updates, launches.

    python -m benchmarks.calibrate --output h100.json
    python -m benchmarks.calibrate --device cpu --gbits-per-second 0.25 1 4 --output cpu.json

Half of the measurements are left out of the fit; ``held_out`` has the relative error of each of these. On a GPU, kernels are
replayed from a CUDA graph, as the trainer replays its dense part; lookups and updates are FBGEMM's, of ids as often as in
generated data, and beside them those of ``comm=fused``. With several GPUs NCCL's collectives and the stores of kernels are
measured on all of them, beside ``--nvlink-gb-per-second``. With ``--gbits-per-second`` gloo's collectives are measured, between
two network namespaces on such links; this needs root.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from benchmarks.common.environment import describe_environment, device_name
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.scaleout import library_collectives
from benchmarks.scaleout.nvlink import measure as measure_nvlink
from dlrm_fused.compat.fbgemm import kernel_inputs
from dlrm_fused.config import Split, SyntheticConfig
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout, embedding_all_to_all
from dlrm_fused.scaleout.dense_part import Kernel
from dlrm_fused.scaleout.machine import Machine, as_json, fit_line
from dlrm_fused.sharding.fused_lookups import local_tables
from dlrm_fused.symmetric import symmetric_group

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ROUNDS = 7
_TABLES = 8  # of a rank
_MOST_CYCLES_PER_SECOND = 2e9  # of today's GPUs

Point = TypeVar("Point")
# Work (operations or bytes) and seconds.
Points = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--gbits-per-second", type=float, nargs="*", default=[], help="of links; none: all of a link is reached"
    )
    parser.add_argument("--nvlink-gb-per-second", type=float, default=450, help="of a GPU, in one direction")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)  # a rank on CPUs has a core
    scale = 1 if device.type == "cuda" else 64  # CPUs are so much slower

    launch = _elementwise(device, [4])[0][1]
    lines = _lines(device, scale)
    nvlink = measure_nvlink(gpus, options.nvlink_gb_per_second * 1e9) if (gpus := torch.cuda.device_count()) > 1 else {}
    links = library_collectives.measure(options.gbits_per_second) if options.gbits_per_second else {}
    on_links = {"links": links, "NVLink": nvlink}
    for link, points_of in on_links.items():
        lines |= {f"{name} on {link}": points for name, points in points_of.items()}
    fits = {name: fit_line(*zip(*_fitted(points), strict=True)) for name, points in lines.items()}
    held_out = {name: _errors(_left_out(points), *fits[name]) for name, points in lines.items()}

    # Not in bf16 on CPUs, many of which emulate it.
    dtypes = _DTYPES if device.type == "cuda" else {"fp32": torch.float32}
    products = {name: _products(device, dtype, scale) for name, dtype in dtypes.items()}
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
        collective=_collective(device),
        link_shares={name: min(1.0, fits[f"{name} on links"][1]) for name in on_links["links"]},
        nvlink_shares={name: min(1.0, fits[f"{name} on NVLink"][1]) for name in on_links["NVLink"]},
        fused_speeds={
            name: fits[f"fused {name}"][1] / fits[name][1] for name in ("lookup", "update") if f"fused {name}" in fits
        },
    )
    for name, measured in products.items():
        held_out[f"products {name}"] = [machine.seconds(kernel, name) / seconds - 1 for kernel, seconds in _left_out(measured)]
    report = {
        **describe_environment([device_name(device)], options.commit),
        "measured": {
            **{name: [list(point) for point in points] for name, points in lines.items()},
            **{
                f"products {name}": [[kernel.flops, kernel.bytes, seconds] for kernel, seconds in measured]
                for name, measured in products.items()
            },
        },
        "held_out": held_out,
        "machine": as_json(machine),
    }
    write_results(options.output, report)
    for name, errors in held_out.items():
        print(f"{name}: median error on held-out sizes {100 * statistics.median(map(abs, errors)):.1f}%")


def _lines(device: torch.device, scale: int) -> dict[str, Points]:
    """What takes a fixed time and one by its bytes."""
    # Sizes beyond the L2 cache of a GPU.
    tables = partial(_tables, device, [4, 6, 8, 12, 16, 24, 32], 65536 // scale, 10_000_000 // scale // _TABLES)
    lines = {"memory": _elementwise(device, [(2**28 if scale == 1 else 2**25) // 4 * quarters for quarters in range(4, 16)])}
    lines["lookup"], lines["update"] = tables(FbgemmTables)
    if device.type == "cuda":
        lines["fused lookup"], lines["fused update"] = tables(FusedTables)
    lines["optimizer"] = _optimizer(device, [(2**26 // scale) * eighths // 8 for eighths in range(2, 10)])
    return lines


def _fitted(points: Sequence[Point]) -> list[Point]:
    """Every other one; in the next four the others: of two products with as many operations, not always the same shape."""
    return [point for number, point in enumerate(points) if (number + number // 4) % 2 == 0]


def _left_out(points: Sequence[Point]) -> list[Point]:
    return [point for number, point in enumerate(points) if (number + number // 4) % 2]


def _errors(points: Points, fixed: float, rate: float) -> list[float]:
    """Of the fit: predicted over measured, less 1."""
    return [(fixed + work / rate) / seconds - 1 for work, seconds in points]


def _peak_and_half(measured: Sequence[tuple[Kernel, float]], launch: float, memory: float) -> tuple[float, float]:
    """Of :class:`Machine`, from the products that memory does not bound."""
    bound = [(kernel.flops, seconds) for kernel, seconds in measured if kernel.bytes / memory < seconds / 2]
    fixed, peak = fit_line(*zip(*bound, strict=True))
    return peak, max(0.0, fixed - launch) * peak


def _elementwise(device: torch.device, sizes: Sequence[int]) -> Points:
    """Bytes read and written by ``a + b``."""
    points = []
    for size in sizes:
        a, b, result = (torch.ones(size // 4, device=device) for _ in range(3))
        points.append((3.0 * a.nbytes, _seconds(device, partial(torch.add, a, b, out=result))))
    return points


def _products(device: torch.device, dtype: torch.dtype, scale: int) -> list[tuple[Kernel, float]]:
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
        a, b = torch.randn(rows, inputs, device=device, dtype=dtype), torch.randn(inputs, outputs, device=device, dtype=dtype)
        moved = float(a.nbytes + b.nbytes + rows * outputs * a.element_size())
        measured.append((Kernel("mm", 2.0 * rows * inputs * outputs, moved), _seconds(device, partial(torch.matmul, a, b))))
    return measured


class FbgemmTables:
    """Tables of one rank, as FBGEMM looks them up."""

    def __init__(self, device: torch.device, rows: int, dim: int) -> None:
        is_gpu = device.type == "cuda"
        place = EmbeddingLocation.DEVICE if is_gpu else EmbeddingLocation.HOST
        self.fbgemm = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, place, ComputeDevice.CUDA if is_gpu else ComputeDevice.CPU)] * _TABLES,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
        ).to(device)

    def __call__(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.fbgemm(ids, offsets)
        return pooled


class FusedTables(FbgemmTables):
    """The same tables, as ``comm=fused`` looks them up, on a rank alone."""

    def __init__(self, device: torch.device, rows: int, dim: int) -> None:
        super().__init__(device, rows, dim)
        lookup = LookupLayout(tuple(range(0, _TABLES * dim, dim)), (dim,) * _TABLES, False)
        layout = ExchangeLayout(((lookup,),), _TABLES * dim)
        self._workspace = EmbeddingWorkspace(symmetric_group(device=device), layout, name="calibration")
        self._workspace.attach_tables([local_tables(self.fbgemm)])

    def __call__(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        samples = (offsets.numel() - 1) // _TABLES
        ids, offsets, _ = kernel_inputs(self.fbgemm, ids, offsets, None, checks_bounds=True)
        return embedding_all_to_all(self._workspace, [ids], [offsets], [], [samples])


def _tables(
    device: torch.device, poolings: Sequence[int], samples: int, rows: int, make: type[FbgemmTables], dim: int = 128
) -> tuple[Points, Points]:
    """Bytes of rows read by a lookup; read and written by its backward pass with rowwise Adagrad.

    Popular ids, whose rows are in caches, occur as often as in generated data (``data.synthetic.zipf_exponent``).
    """
    tables = make(device, rows, dim)
    lookups, updates = [], []
    for pooling in poolings:
        ids = _ids(rows, samples, pooling).to(device)
        offsets = torch.arange(0, ids.numel() + 1, pooling, device=device, dtype=ids.dtype)
        gradient = torch.ones_like(tables(ids, offsets))
        bytes_read = 4.0 * dim * ids.numel()
        lookups.append((bytes_read, _seconds(device, partial(tables, ids, offsets), captured=False)))

        def both(ids: torch.Tensor = ids, offsets: torch.Tensor = offsets, gradient: torch.Tensor = gradient) -> None:
            tables(ids, offsets).backward(gradient)

        updates.append((2 * bytes_read, max(1e-9, _seconds(device, both, captured=False) - lookups[-1][1])))
    return lookups, updates


def _ids(rows: int, samples: int, pooling: int) -> torch.Tensor:
    """[tables * samples * pooling] int32, table after table."""
    settings = SyntheticConfig(tables=_TABLES, rows=[rows], pooling=[pooling])
    dataset = SyntheticDataset(settings, seed=0, device=torch.device("cpu"))
    return dataset.read(Split.train, torch.arange(samples)).sparse.values()


def _optimizer(device: torch.device, sizes: Sequence[int]) -> Points:
    """Bytes read and written by Adam in one pass; by the number of parameters."""
    points = []
    for size in sizes:
        weight = torch.nn.Parameter(torch.zeros(size, device=device))
        weight.grad = torch.ones_like(weight)
        adam = torch.optim.Adam([weight], fused=True)
        points.append((7.0 * weight.nbytes, _seconds(device, adam.step, captured=False)))
    return points


def _collective(device: torch.device) -> float:
    """An AllReduce of one number that goes nowhere: what starting one takes."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
        number = torch.ones(1, device=device)
        seconds = _seconds(device, lambda: dist.all_reduce(number), captured=False, launched_ahead=False)
        dist.destroy_process_group()
    return seconds


def _seconds(
    device: torch.device, function: Callable[[], object], *, captured: bool = True, launched_ahead: bool = True
) -> float:
    """Of one call, the median of several rounds after a warm-up.

    Args:
        captured: on a GPU, calls are replayed from a CUDA graph.
        launched_ahead: of other calls, whether the GPU begins when all are launched, so that the host's time is left out.
    """
    for _ in range(3):
        function()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(function, 3) for _ in range(_ROUNDS))
    calls = 20
    run = _graph(function, calls) if captured else (lambda: [function() for _ in range(calls)])
    torch.cuda.synchronize()
    launches = _wall_seconds(run, 1) if launched_ahead and not captured else 0.0
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2 * launches * _MOST_CYCLES_PER_SECOND))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def _wall_seconds(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _graph(function: Callable[[], object], calls: int) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


if __name__ == "__main__":
    main()
