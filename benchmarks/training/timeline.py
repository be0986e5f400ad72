"""Where the time of a training step goes on the GPU, from a trace that ``telemetry.profile_steps`` has recorded.

    python -m benchmarks.training.timeline runs/NAME/profile/steps100-105_rank0.json.gz --plot timeline.png

A part of the step, such as the matrix products, is busy while one of its kernels runs on any stream, and exposed while nothing
else does: what it would save to hide it. Parts are told by the names of kernels. Kernels that wait for other ranks are busy.
The picture shows the shortest step, a row for each stream.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from benchmarks.common.results import write_results
from dlrm_fused.training.overlap import Times, busy_and_exposed

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_STEP = "ProfilerStep#"
# The first pattern that is found in a kernel's name counts.
PARTS = {
    "lookup": r"lookup_and_scatter|split_embedding.*forward|embedding_bag.*forward",
    "update of tables": r"^(update|merge|count|plan)_kernel|split_embedding.*backward|linearize_index",
    "sort of indices": r"radix_?sort|^(label|order)_kernel|fill_reverse_indices",
    "check of indices": r"bounds_check",
    "exchange of embeddings": r"scatter_tiles|add_up",
    "AllReduce": r"nccl.*(AllReduce|AllGather|ReduceScatter)",
    "SendRecv of NCCL": r"nccl",
    "matrix products": r"nvjet|cutlass|(?<!fb)gemm|cublas|splitK",
    "dense optimizer": r"multi_tensor_apply",
    "features": r"permute_|DeviceScan",
    "copies": r"^Mem(cpy|set)",
    "elementwise": r"",
}


@dataclass(frozen=True)
class Kernel:
    """What ran on the device.

    Attributes:
        begin, end: in milliseconds.
    """

    name: str
    stream: int
    begin: float
    end: float

    @property
    def part(self) -> str:
        """Of the step."""
        return next(part for part, pattern in PARTS.items() if re.search(pattern, self.name))


def read_trace(path: Path) -> tuple[list[Kernel], int]:
    """All kernels in the order of their beginnings, and the number of steps."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    kernels = [
        Kernel(event["name"], event["args"]["stream"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    steps = sum(event.get("cat") == "user_annotation" and event["name"].startswith(_STEP) for event in events)
    return sorted(kernels, key=lambda kernel: kernel.begin), steps


def step_begins(kernels: Sequence[Kernel], steps: int) -> list[float]:
    """When each step begins: with the longest kernel that runs once in each.

    Raises:
        SystemExit: if there is none, or but one step.
    """
    counts = Counter(kernel.name for kernel in kernels)
    once: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        if counts[kernel.name] == steps:
            once[kernel.name] += kernel.end - kernel.begin
    if steps < 2 or not once:
        raise SystemExit(
            f"{steps} steps, and {len(once)} kernels that run once in each: record more with telemetry.profile_steps"
        )
    marker = max(once, key=lambda name: once[name])
    return [kernel.begin for kernel in kernels if kernel.name == marker]


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

    kernels, steps = read_trace(options.trace)
    begins = step_begins(kernels, steps)
    by_part, idle = times(kernels, begins[0], begins[-1])
    print(table(by_part, idle, steps - 1, begins[-1] - begins[0]))
    first, last = min(itertools.pairwise(begins), key=lambda step: step[1] - step[0])
    if options.output:
        drawn = [k for k in kernels if first <= k.begin < last]
        write_results(
            options.output,
            {
                "step_ms": (begins[-1] - begins[0]) / (steps - 1),
                "nothing_runs_ms": idle / (steps - 1),
                "parts": {
                    part: {"busy_ms": of.busy / (steps - 1), "exposed_ms": of.exposed / (steps - 1)}
                    for part, of in by_part.items()
                },
                "kernels": [[round(k.begin - first, 4), round(k.end - k.begin, 4), k.stream, k.name[:80]] for k in drawn],
            },
        )
    if options.plot:
        plot(kernels, first, last, options.title or options.trace.name, options.plot)


if __name__ == "__main__":
    main()
