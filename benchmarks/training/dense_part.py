"""How long the dense part of a training step takes: from pooled embeddings to the loss and back, on one GPU, without tables.

    python -m benchmarks.training.dense_part --config configs/criteo_1tb_dcnv2_synthetic.yaml --output dense.json

Eager, compiled, and on GPUs compiled and captured as CUDA graphs, as in training; with fp32 embeddings and with those of 16
bits. ``--autotune`` adds one in which the compiler chooses among Triton's matrix products too, into which it may fuse
elementwise kernels: that takes minutes. Each after a warm-up, the median of so many steps, and on GPUs the mean of a second of
steps without a break, with clock and power: these products take all the power that a GPU is given, which then lowers its clock.
The floor is the time that the matrix products take at the rate of a large one, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.environment import describe_environment, device_name
from benchmarks.common.power import sustained
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.config import Config, Precision, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.models import build_model
from dlrm_fused.models.dense_part import DensePart, LogitsOf
from dlrm_fused.models.tables import pooled_columns

_WARM_UP_STEPS = 5
_AUTOTUNED = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "triton.enable_persistent_tma_matmul": True,
}


@dataclass(frozen=True)
class Variant:
    """How the dense part is computed.

    Attributes:
        options: of the compiler; None for eager mode.
        is_captured: as in training on GPUs.
    """

    name: str
    embeddings: torch.dtype
    options: dict[str, Any] | None
    is_captured: bool = False


def variants(precision: Precision, autotune: bool) -> list[Variant]:
    dtypes = [torch.float32, *([torch.bfloat16] if precision is Precision.bf16 else [])]
    found = [
        Variant(f"{mode}, {str(dtype).removeprefix('torch.')} embeddings", dtype, options, mode == "captured")
        for dtype in dtypes
        for mode, options in (("eager", None), ("compiled", {}), ("captured", None))
        if mode != "captured" or torch.cuda.is_available()
    ]
    return [*found, *([Variant("autotuned", dtypes[-1], _AUTOTUNED)] if autotune else [])]


class Step:
    """Forward and backward pass of a config's dense part for random inputs."""

    def __init__(self, config: Config, samples: int, variant: Variant, device: torch.device) -> None:
        torch.manual_seed(0)
        schema = open_dataset(config, device).schema
        model = build_model(config, schema, 1, device).model
        if not hasattr(model, "logits_of") or config.model.experts.count:
            raise SystemExit(f"model.kind={config.model.kind.name} with these settings has no dense part of its own")
        # The tables, on the meta device, stay there.
        dense_modules = [module for name, module in model.named_children() if name != "sparse_arch"]
        self._parameters = [p for module in dense_modules for p in module.to(device).parameters()]
        uses_bf16 = config.training.precision is Precision.bf16
        part = DensePart(
            cast(LogitsOf, model.logits_of), device.type, uses_bf16, variant.is_captured, layers=lambda: dense_modules
        )
        self._part: nn.Module | Callable[..., tuple[Tensor, Tensor]] = part
        if variant.options is not None:
            self._part = torch.compile(part, fullgraph=True, dynamic=False, options=variant.options)
        self._dense = torch.rand(samples, len(schema.dense_features), device=device)
        shape = (samples, pooled_columns(config.embedding, schema.sparse_features))
        self._pooled = (0.1 * torch.randn(shape, device=device)).to(variant.embeddings).requires_grad_()
        self._labels = (torch.rand(samples, device=device) < 0.3).float()
        self._weights = torch.ones_like(self._labels)

    def __call__(self) -> Tensor:
        """The loss."""
        for tensor in (*self._parameters, self._pooled):
            tensor.grad = None
        losses, _ = self._part(self._dense, self._pooled, self._labels, self._weights)
        loss: Tensor = losses / len(self._labels)
        loss.backward()
        return loss.detach()

    def flops(self) -> int:
        """Of all matrix products, two for each multiplication with its addition."""
        with FlopCounterMode(display=False) as counter:
            self()
        return int(counter.get_total_flops())


def median_milliseconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    for _ in range(_WARM_UP_STEPS):
        step()
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in events:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def teraflops(dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
    """Of a large matrix product."""
    size = size if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_milliseconds(lambda: left @ right, 20, device) / 1e9


def measure(config: Config, samples: int, variant: Variant, steps: int, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = Step(config, samples, variant, device)
    began = time.perf_counter()
    loss = float(step())
    first = time.perf_counter() - began
    milliseconds = median_milliseconds(step, steps, device)
    load = sustained(step, device) if device.type == "cuda" else None
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    torch.compiler.reset()
    return {
        "variant": variant.name,
        "ms": milliseconds,
        "loss": loss,
        "first_step_seconds": first,
        "peak_memory_gib": peak,
        "sustained": load,
    }


def describe(row: dict[str, Any], floor: float) -> str:
    line = f"{row['variant']:<30}{row['ms']:10.2f} ms{row['ms'] / floor:8.2f} x floor"
    load = row["sustained"]
    return line + (f"{load['ms']:10.2f} ms at {load['mhz']:.0f} MHz, {load['watts']:.0f} W" if load else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*", help="key=value settings of the config")
    parser.add_argument("--samples", type=int, default=32_768, help="of one rank")
    parser.add_argument("--steps", type=int, default=30, help="that are timed")
    parser.add_argument("--autotune", action="store_true")
    add_report_arguments(parser)
    options = parser.parse_args(arguments)

    config = load_config(options.config, options.overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted, precision = variants(config.training.precision, options.autotune), config.training.precision
    rate = teraflops(torch.bfloat16 if precision is Precision.bf16 else torch.float32, device)
    flops = Step(config, options.samples, wanted[0], device).flops()
    floor = flops / rate / 1e9
    print(f"{flops / 1e12:.2f} TFLOP, {floor:.2f} ms at {rate:.0f} TFLOP/s")
    results = []
    for variant in wanted:
        results.append(measure(config, options.samples, variant, options.steps, device))
        print(describe(results[-1], floor), flush=True)
    write_results(
        options.output,
        {
            **describe_environment([device_name(device)], options.commit),
            "samples": options.samples,
            "flops": flops,
            "teraflops_of_a_large_product": rate,
            "floor_ms": floor,
            "variants": results,
        },
    )


if __name__ == "__main__":
    main()
