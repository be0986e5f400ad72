"""The time of a training step on the GPU by part, from a trace that ``telemetry.profile_steps`` has recorded.

    python -m benchmarks.training.timeline runs/NAME/profile/steps100-105_rank0.json.gz

A part of the step, such as the matrix products, is busy while one of its kernels runs on any stream, and exposed while nothing
else does: what it would save to hide it. Parts are told by the names of kernels. Kernels that wait for other ranks are busy.
The host waits while a call of CUDA does that synchronizes with the device. https://ui.perfetto.dev draws the trace by stream.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import write_results
from dlrm_fused.training.step_timer import Times, busy_and_exposed

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_STEP = "ProfilerStep#"
_WAITS = re.compile(r"cuda(Stream|Event|Device)Synchronize|cudaMemcpy$")
# The first pattern that is found in a kernel's name counts.
PARTS = {
    "lookup": r"lookup_and_scatter|split_embedding.*forward|embedding_bag.*forward",
    "update of tables": r"^(update|merge|count|plan)_kernel|split_embedding.*backward|linearize_index",
    "sort of indices": r"radix_?sort|^(label|order)_kernel|fill_reverse_indices",
    "check of indices": r"bounds_check",
    "exchange of embeddings": r"scatter_tiles|add_up",
    "AllReduce": r"nccl.*(AllReduce|AllGather|ReduceScatter)|^sum_chunk_kernel",
    "SendRecv of NCCL": r"nccl",
    "attention": r"sdpa|flash|attention",
    "matrix products": r"nvjet|cutlass|(?<!fb)gemm|cublas|splitK|weight_gradient|^hidden_(gradient_)?kernel",
    "routing and sending of tokens": r"scatter_rows|sum_slots|gates_gradient|zero_pads|exchange_counts|place_slots"
    r"|^(find_places|place|pack|unpack|add)_kernel",
    "dense optimizer": r"multi_tensor_apply|^adagrad_kernel",
    "features": r"permute_|DeviceScan|^(send|fetch)_kernel",
    "copies": r"^Mem(cpy|set)",
    "elementwise": r"",
}


# Name, begin and end of a kernel or copy that ran on the device, in milliseconds.
Kernel = tuple[str, float, float]


def part_of(kernel: str) -> str:
    """The part of the step to which a kernel of this name belongs."""
    return next(part for part, pattern in PARTS.items() if re.search(pattern, kernel))


def read_trace(path: Path) -> tuple[list[Kernel], int, list[float]]:
    """Return all kernels, the number of steps, and milliseconds of each call by which the host waits for the device."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    kernels = [(event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in on_device]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(_STEP)]
    # The profiler itself waits for the device after the last step.
    end = max((step["ts"] + step["dur"] for step in steps), default=0.0)
    calls = [event for event in events if event.get("cat") == "cuda_runtime" and event["ts"] < end]
    waits = [event["dur"] / 1e3 for event in calls if _WAITS.match(event["name"])]
    return kernels, len(steps), waits


def step_begins(kernels: Sequence[Kernel], steps: int) -> list[float]:
    """When each step begins: with a kernel that runs once in each, of these the most regular one.

    There may be more of them than ``steps``, which the host has made: what the device runs at first may be of steps before.

    Raises:
        SystemExit: if there is none, or but one step.
    """
    begins = defaultdict[str, list[float]](list)
    for name, begin, _ in sorted(kernels, key=lambda kernel: kernel[1]):
        begins[name].append(begin)
    # Some kernel may run as often as there are steps, but several times in one of them.
    shortest = {name: min(b - a for a, b in itertools.pairwise(of)) for name, of in begins.items() if len(of) >= steps > 1}
    if not shortest:
        raise SystemExit(f"{steps} steps, and no kernel that runs once in each: record more with telemetry.profile_steps")
    return begins[max(shortest, key=lambda name: shortest[name])]


def table(by_part: dict[str, Times], idle: float, steps: int, milliseconds: float) -> str:
    lines = [f"{'ms of a step':<26}{'busy':>8}{'exposed':>9}"]
    for part, of_part in sorted(by_part.items(), key=lambda item: -item[1].exposed):
        lines.append(f"{part:<26}{of_part.busy / steps:>8.2f}{of_part.exposed / steps:>9.2f}")
    lines.append(f"{'nothing runs':<26}{'':>8}{idle / steps:>9.2f}")
    lines.append(f"{'the step':<26}{'':>8}{milliseconds / steps:>9.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output", type=Path, help="the table, as JSON")
    options = parser.parse_args(arguments)

    kernels, made, waits = read_trace(options.trace)
    begins = step_begins(kernels, made)
    steps, first, last = len(begins) - 1, begins[0], begins[-1]
    found, idle = busy_and_exposed(((part_of(name), begin, end) for name, begin, end in kernels), first, last)
    by_part = {part: times for part, times in found.items() if times.busy}
    print(table(by_part, idle, steps, last - first))
    print(f"in {made} steps the host waits {len(waits)} times, {sum(waits):.2f} ms")
    if options.output:
        report = {
            "step_ms": (last - first) / steps,
            "nothing_runs_ms": idle / steps,
            "steps": steps,
            "steps_of_the_host": made,
            "waits_of_the_host_ms": waits,
            "parts": {part: {"busy_ms": of.busy / steps, "exposed_ms": of.exposed / steps} for part, of in by_part.items()},
        }
        write_results(options.output, report)


if __name__ == "__main__":
    main()
