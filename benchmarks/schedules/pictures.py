"""The pictures and the table of docs/schedules.md:

python -m benchmarks.schedules.pictures timelines --output docs/images
python -m benchmarks.schedules.pictures heat_map gathered.json products.json --output docs/images/schedules.png
python -m benchmarks.schedules.pictures predictions
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.schedules.measured import Call, read_calls
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.estimate import Size, estimate
from dlrm_fused.ops.schedules.machines import H200, MACHINES, MEASURED
from dlrm_fused.ops.schedules.rule import estimates, schedule_of
from dlrm_fused.ops.schedules.timeline import draw

# A call whose links take about as long as its product, so that schedules differ.
_DRAWN = {
    Pair.all_gather_gemm: (16384, 1280, 8192),
    Pair.gemm_reduce_scatter: (16384, 8192, 1024),
    Pair.gemm_all_reduce: (16384, 8192, 1024),
}
_TIMELINES = {
    "library": Pair.all_gather_gemm,
    "kernel": Pair.gemm_reduce_scatter,
    "chunks": Pair.all_gather_gemm,
    "chunks_4": Pair.gemm_reduce_scatter,
    "tapered": Pair.all_gather_gemm,
    "arriving": Pair.all_gather_gemm,
    "arriving_4": Pair.all_gather_gemm,
    "sums_beside": Pair.gemm_all_reduce,
}
# Machines whose links and multiprocessors are like nobody's above.
_UNMEASURED = ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA H100 PCIe")
# Rows of all ranks, N and K of one: Llama's projections over as many ranks, and a small layer.
_PREDICTED = (
    Size(Pair.all_gather_gemm, 1, 16384, 28672, 8192),
    Size(Pair.gemm_reduce_scatter, 1, 16384, 8192, 28672),
    Size(Pair.gemm_all_to_all, 1, 16384, 4096, 4096),
    Size(Pair.gemm_all_reduce, 1, 8, 8192, 28672),
)


def timelines(output: Path) -> None:
    for name, pair in _TIMELINES.items():
        size = Size(pair, 2, *_DRAWN[pair])
        (output / f"schedule_{name}.svg").write_text(draw(estimate(size, schedule_of(size, name), H200)))


def heat_map(calls: Sequence[Call], output: Path) -> None:
    """By pair: each call's time by its fastest schedule over the library's, and which schedule that is.

    Calls whose time by the library was not steady are left out.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    pairs = list(dict.fromkeys(call.size.pair for call in calls))
    canvas, axes = plt.subplots(1, len(pairs), squeeze=False, figsize=(5.5 * len(pairs), 7), layout="constrained")
    for axis, pair in zip(axes.flat, pairs, strict=True):
        own = [call for call in calls if call.size.pair is pair and "library" in call.microseconds]
        rows = sorted({call.size.rows for call in own})
        shapes = sorted({(call.size.columns, call.size.depth) for call in own})
        ratios = [[float("nan")] * len(rows) for _ in shapes]
        for call in own:
            fastest = min(call.microseconds, key=lambda name: call.microseconds[name])
            at = shapes.index((call.size.columns, call.size.depth)), rows.index(call.size.rows)
            ratios[at[0]][at[1]] = ratio = call.microseconds[fastest] / call.microseconds["library"]
            axis.text(at[1], at[0], f"{fastest}\n{ratio:.2f}", ha="center", va="center", fontsize=7)
        image = axis.imshow(ratios, cmap="RdYlGn_r", vmin=0.4, vmax=1.1, aspect="auto")
        axis.set_xticks(range(len(rows)), [str(count) for count in rows], fontsize=8)
        axis.set_yticks(range(len(shapes)), [f"{columns} x {depth:g}" for columns, depth in shapes], fontsize=8)
        axis.set_xlabel("M")
        axis.set_ylabel("N x K")
        axis.set_title(str(pair), fontsize=10)
    canvas.colorbar(image, ax=axes, label="fastest schedule / library")
    canvas.savefig(output, dpi=100)


def predictions() -> None:
    """What the rule takes elsewhere, as a table in Markdown."""
    machines = [*MEASURED.values(), *(MACHINES[name] for name in _UNMEASURED)]
    print("| machine | ranks | " + " | ".join(str(size.pair) for size in _PREDICTED) + " |")
    print("|---|---|" + "---|" * len(_PREDICTED))
    for machine in machines:
        for ranks in (4, 8, 16):
            cells = []
            for size in _PREDICTED:
                found = estimates(_over(size, ranks), machine)
                name = next(iter(found))
                ratio = found[name].microseconds / found["library"].microseconds
                cells.append(f"{name} {ratio:.2f}")
            print(f"| {machine.name} | {ranks} | " + " | ".join(cells) + " |")


def _over(size: Size, ranks: int) -> Size:
    """The same layer over so many ranks: its output features are cut where shards are gathered, its input features for sums."""
    cut_columns = size.pair is Pair.all_gather_gemm
    cut_depth = size.pair in (Pair.gemm_reduce_scatter, Pair.gemm_all_reduce)
    columns = size.columns // ranks if cut_columns else size.columns
    depth = size.depth // ranks if cut_depth else size.depth
    return Size(size.pair, ranks, size.rows, columns, depth, size.element_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["timelines", "heat_map", "predictions"])
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "predictions":
        predictions()
    elif options.output is None:
        parser.error(f"{options.what}: --output is missing")
    elif options.what == "timelines":
        timelines(options.output)
    else:
        heat_map(read_calls(options.results), options.output)


if __name__ == "__main__":
    main()
