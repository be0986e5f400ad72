"""The time of a training step on the GPU by part, from a trace that ``telemetry.profile_steps`` has recorded.

    python -m benchmarks.training.timeline runs/NAME/profile/steps100-105_rank0.json.gz --plot timeline.png

A part of the step, such as the matrix products, is busy while one of its kernels runs on any stream, and exposed while nothing
else does: what it would save to hide it. Parts are told by the names of kernels. Kernels that wait for other ranks are busy.
The host waits while a call of CUDA does that synchronizes with the device. The picture shows the shortest step, a row for each
stream.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from benchmarks.common.results import write_results
from dlrm_fused.training.step_timer import Times, busy_and_exposed

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

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
    "AllReduce": r"nccl.*(AllReduce|AllGather|ReduceScatter)",
    "SendRecv of NCCL": r"nccl",
    "matrix products": r"nvjet|cutlass|(?<!fb)gemm|cublas|splitK|weight_gradient",
    "routing and sending of tokens": r"scatter_rows|sum_slots|gates_gradient|zero_pads|exchange_counts|place_(experts|slots)",
    "dense optimizer": r"multi_tensor_apply|^adagrad_kernel",
    "features": r"permute_|DeviceScan|^(send|fetch)_kernel",
    "copies": r"^Mem(cpy|set)",
    "elementwise": r"",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy that ran on the device.

    Attributes:
        begin, end: in milliseconds.
    """

    name: str
    stream: int
    begin: float
    end: float

    @property
    def part(self) -> str:
        """Return the part of the step to which it belongs."""
        return next(part for part, pattern in PARTS.items() if re.search(pattern, self.name))


@dataclass(frozen=True)
class Trace:
    """The contents of a trace.

    Attributes:
        kernels: all of them, in the order of their beginnings.
        steps: their number.
        waits: milliseconds of each call by which the host has waited for the device within these steps.
    """

    kernels: list[Kernel]
    steps: int
    waits: list[float]


def read_trace(path: Path) -> Trace:
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    kernels = [
        Kernel(event["name"], event["args"]["stream"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(_STEP)]
    # The profiler itself waits for the device after the last step.
    end = max((step["ts"] + step["dur"] for step in steps), default=0.0)
    waits = [
        event["dur"] / 1e3
        for event in events
        if event.get("cat") == "cuda_runtime" and _WAITS.match(event["name"]) and event["ts"] < end
    ]
    return Trace(sorted(kernels, key=lambda kernel: kernel.begin), len(steps), waits)


def step_begins(kernels: Sequence[Kernel], steps: int) -> list[float]:
    """When each step begins: with a kernel that runs once in each, of these the most regular one.

    There may be more of them than ``steps``, which the host has made: what the device runs at first may be of steps before.

    Raises:
        SystemExit: if there is none, or but one step.
    """
    begins = defaultdict[str, list[float]](list)
    for kernel in kernels:
        begins[kernel.name].append(kernel.begin)
    # Some kernel may run as often as there are steps, but several times in one of them.
    shortest = {name: min(b - a for a, b in itertools.pairwise(of)) for name, of in begins.items() if len(of) >= steps > 1}
    if not shortest:
        raise SystemExit(f"{steps} steps, and no kernel that runs once in each: record more with telemetry.profile_steps")
    return begins[max(shortest, key=lambda name: shortest[name])]


def times(kernels: Iterable[Kernel], begin: float, end: float) -> tuple[dict[str, Times], float]:
    """By part its times between two moments, in milliseconds of all of it; and the time in which nothing runs."""
    by_part, idle = busy_and_exposed(((kernel.part, kernel.begin, kernel.end) for kernel in kernels), begin, end)
    return {part: by_part[part] for part in PARTS if part in by_part and by_part[part].busy}, idle


def table(by_part: dict[str, Times], idle: float, steps: int, milliseconds: float) -> str:
    lines = [f"{'ms of a step':<26}{'busy':>8}{'exposed':>9}"]
    for part, of_part in sorted(by_part.items(), key=lambda item: -item[1].exposed):
        lines.append(f"{part:<26}{of_part.busy / steps:>8.2f}{of_part.exposed / steps:>9.2f}")
    lines.append(f"{'nothing runs':<26}{'':>8}{idle / steps:>9.2f}")
    lines.append(f"{'the step':<26}{'':>8}{milliseconds / steps:>9.2f}")
    return "\n".join(lines)


def plot(kernels: Sequence[Kernel], begin: float, end: float, title: str, output: Path) -> None:
    """Draw what runs between two moments; the format follows from the file's suffix."""
    shown = [kernel for kernel in kernels if kernel.end > begin and kernel.begin < end]
    load = defaultdict[int, float](float)
    for kernel in shown:
        load[kernel.stream] += kernel.end - kernel.begin
    rows = {stream: row for row, stream in enumerate(sorted(load, key=lambda stream: -load[stream]))}
    colours = dict(zip(PARTS, plt.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    figure, axis = plt.subplots(figsize=(12, 0.8 + 0.45 * len(rows)), layout="constrained")
    for part, colour in colours.items():
        own = [kernel for kernel in shown if kernel.part == part]
        for stream in {kernel.stream for kernel in own}:
            bars = [(kernel.begin - begin, kernel.end - kernel.begin) for kernel in own if kernel.stream == stream]
            axis.broken_barh(bars, (rows[stream] - 0.4, 0.8), color=colour)
        if own:
            axis.barh(0, 0, color=colour, label=part)
    axis.set_title(title)
    axis.set_xlim(0, end - begin)
    axis.set_xlabel("milliseconds")
    axis.set_yticks(list(rows.values()), [f"stream {stream}" for stream in rows])
    axis.invert_yaxis()
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture, such as timeline.png")
    parser.add_argument("--output", type=Path, help="the table, and the kernels of the picture's step, as JSON")
    parser.add_argument("--title", help="of the picture; by default the trace's name")
    options = parser.parse_args(arguments)

    trace = read_trace(options.trace)
    kernels, steps = trace.kernels, trace.steps
    begins = step_begins(kernels, steps)
    measured = len(begins) - 1
    by_part, idle = times(kernels, begins[0], begins[-1])
    print(table(by_part, idle, measured, begins[-1] - begins[0]))
    print(f"in {steps} steps the host waits {len(trace.waits)} times, {sum(trace.waits):.2f} ms")
    first, last = min(itertools.pairwise(begins), key=lambda step: step[1] - step[0])
    if options.output:
        drawn = [k for k in kernels if first <= k.begin < last]
        write_results(
            options.output,
            {
                "step_ms": (begins[-1] - begins[0]) / measured,
                "nothing_runs_ms": idle / measured,
                "steps": measured,
                "steps_of_the_host": steps,
                "waits_of_the_host_ms": trace.waits,
                "parts": {
                    part: {"busy_ms": of.busy / measured, "exposed_ms": of.exposed / measured} for part, of in by_part.items()
                },
                "kernels": [[round(k.begin - first, 4), round(k.end - k.begin, 4), k.stream, k.name[:80]] for k in drawn],
            },
        )
    if options.plot:
        plot(kernels, first, last, options.title or options.trace.name, options.plot)


if __name__ == "__main__":
    main()
