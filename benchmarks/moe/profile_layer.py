"""Does the host wait for the device anywhere in a Mixture-of-Experts layer, and what do its kernels take?

    torchrun --standalone --nproc-per-node=4 -m benchmarks.moe.profile_layer --output profile.json
        [--steps 20] [--comm baseline] [--trace trace.json] [--tokens 8192 --width 2048 ...]

Forward and backward of ``dlrm_fused.models.moe.MixtureOfExperts``, with its losses, in training, under ``torch.profiler``,
after some steps that are not looked at. What counts are the host's calls of CUDA that wait for the device, in any thread, while
it makes the steps; with ``comm=fused`` there must be none. On GPUs ``torch.cuda.set_sync_debug_mode("error")`` watches as well:
PyTorch's own waits then raise. Exit status 1 says that there was one. The report also has the microseconds of a step that each
kernel takes on rank 0, the longest first. One rank will do. Without GPUs there is nothing to wait for: that tests this script.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common.harness import World, describe_run, open_world, synchronize
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.gemm_all_to_all.cells import DTYPE
from dlrm_fused.config import Comm, ExpertActivation, ExpertsConfig
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.ops.moe import ExpertWorkspace

STEP = "step of the layer"
# Calls of CUDA in which the host waits, besides those with "Synchronize" in their name.
_OTHER_WAITS = ("cudaMemcpy", "cudaMemset", "cudaFree", "cudaFreeHost", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cuMemFree_v2")
_WARMUP_STEPS = 5
# Of the layer: default, and what it is.
SIZES = {
    "experts": (32, "of all ranks together"),
    "top_k": (2, "experts of a token"),
    "width": (2048, "elements of a token"),
    "hidden": (2048, "of an expert, between its two matrices"),
    "tokens": (8192, "of each rank"),
}


def cuda_calls(events: Iterable[FunctionEvent]) -> Counter[str]:
    """The host's calls of CUDA within the steps, by name."""
    events = list(events)
    steps = [event.time_range for event in events if event.name == STEP]
    return Counter(
        event.name
        for event in events
        if re.match("cu(da)?[A-Z]", event.name) and any(step.start <= event.time_range.start <= step.end for step in steps)
    )


def waits(calls: Mapping[str, int]) -> dict[str, int]:
    """Those of the calls in which the host waits for the device."""
    return {name: count for name, count in calls.items() if "Synchronize" in name or name in _OTHER_WAITS}


def kernel_microseconds(events: Iterable[FunctionEvent], steps: int) -> dict[str, float]:
    """Of a step, by the kernel's name; the longest first."""
    total: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and event.name != STEP:
            total[event.name] += event.device_time / steps
    return {name: round(us, 2) for name, us in total.most_common()}


@contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """PyTorch raises where it would wait for the device. Without GPUs it never does."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def build_step(world: World, options: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of a layer. Collective."""
    settings = ExpertsConfig(
        count=options.experts,
        top_k=options.top_k,
        hidden=options.hidden,
        activation=ExpertActivation[options.activation],
    )
    workspace = None
    if options.comm == Comm.fused.name:
        workspace = ExpertWorkspace(
            world.symmetric,
            name="profile",
            experts=options.experts,
            top_k=options.top_k,
            max_tokens=options.tokens,
            width=options.width,
            dtype=DTYPE,
            activation=options.activation,
            timeout_seconds=60.0,
        )
    computation = ExpertComputation(world.group, workspace, options.activation)
    layer = MixtureOfExperts(options.width, settings, computation).to(world.device)
    generator = torch.Generator(world.device).manual_seed(world.rank)
    tokens = torch.randn(options.tokens, options.width, generator=generator, device=world.device, requires_grad=True)
    leaves = [tokens, *layer.parameters()]

    def step() -> None:
        with torch.autocast(world.device.type, DTYPE):
            out = layer(tokens)
        loss = out.float().square().mean()
        auxiliary = layer.take_auxiliary_loss()
        torch.autograd.grad(loss if auxiliary is None else loss + auxiliary, leaves)

    return step


def profiled(world: World, options: argparse.Namespace) -> bool:
    """The profile and its report; whether there was no wait where there must be none. Collective."""
    must_not_wait = options.comm == Comm.fused.name
    step = build_step(world, options)
    for _ in range(_WARMUP_STEPS):
        step()
    synchronize(world.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        with waits_are_errors(world.device) if must_not_wait else nullcontext():
            for _ in range(options.steps):
                with record_function(STEP):
                    step()
        synchronize(world.device)
    if options.trace and world.rank == 0:
        profiler.export_chrome_trace(str(options.trace))
    calls = cuda_calls(profiler.events())
    if world.device.type == "cuda" and not calls:
        raise SystemExit("the profiler has seen no call of CUDA; does it have access to CUPTI?")
    every_rank = world.gather(waits(calls))
    passed = not (must_not_wait and any(every_rank))
    content: dict[str, Any] = {
        **describe_run(world, options.commit),
        "comm": options.comm,
        "steps": options.steps,
        "layer": {key: getattr(options, key) for key in (*SIZES, "activation")},
        "cuda_calls_by_rank": world.gather(calls.total()),
        "waits_by_rank": every_rank,
        "passed": passed,
        "kernels_us": kernel_microseconds(profiler.events(), options.steps),
    }
    if world.rank == 0:
        write_results(options.output, content)
    world.log(f"{options.steps} steps, comm={options.comm}: waits of the host by rank: {every_rank}; passed: {passed}")
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--comm", choices=[Comm.fused.name, Comm.baseline.name], default=Comm.fused.name)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--activation", choices=[each.name for each in ExpertActivation], default=ExpertActivation.silu.name)
    for name, (default, what) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{what}; default {default}")
    parser.add_argument("--trace", type=Path, help="the profile of rank 0, for chrome://tracing or Perfetto")
    options = parser.parse_args(arguments)
    with open_world() as world:
        return 0 if profiled(world, options) else 1


if __name__ == "__main__":
    sys.exit(main())
