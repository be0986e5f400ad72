"""How fast is ``data/prepare.py criteo``, and how much memory does it take?

Generates files in Kaggle's layout, with the cardinalities of Kaggle's columns and popularity that follows a power law,
prepares them by the command that users run, and writes wall time and peak memory of the whole process tree:

    python -m benchmarks.data.prepare_criteo [--rows 500000 2000000] [--repeats 3]

Peak memory is the largest sum over processes of PSS (each page divided among the processes that share it), sampled
every 20 ms. The sum of RSS, which counts shared pages several times, is given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from benchmarks.common.environment import ROOT
from benchmarks.common.results import write_results
from benchmarks.data.measured_run import measured_run, processor

RESULT = ROOT / "benchmarks/results/prepare_criteo.json"
# Distinct ids of each column of the Kaggle set.
CARDINALITIES = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
MISSING_SHARE = 0.1
GENERATED_ROWS_AT_ONCE = 250_000
MODES = {"min_frequency": ["--min-frequency", "3"], "hash_rows": ["--hash-rows", "1000000"]}


@dataclass(frozen=True)
class Measurement:
    mode: str
    rows: int
    wall_seconds: float
    rows_per_second: float
    cpu_seconds: float
    peak_pss_mib: float
    peak_rss_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prepare", type=Path, default=ROOT / "data/prepare.py", help="the script to measure")
    args = parser.parse_args()
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            source = Path(folder) / f"train_{rows}.txt"
            generate(source, rows)
            for mode in [mode for mode in args.modes for _ in range(args.repeats)]:
                measurements.append(measure(args.prepare, source, Path(folder) / "prepared", rows, mode, args.workers))
                print(measurements[-1], flush=True)
            source.unlink()
    report = {
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "polars": pl.__version__,
        },
        "workers": args.workers,
        "medians": _medians(measurements),
        "measurements": [asdict(m) for m in measurements],
    }
    write_results(RESULT, report)
    print(json.dumps(report["medians"], indent=2))


def generate(path: Path, rows: int) -> None:
    """Write ``rows`` lines of Kaggle's layout."""
    rng = np.random.default_rng(1)
    path.unlink(missing_ok=True)
    for start in range(0, rows, GENERATED_ROWS_AT_ONCE):
        n = min(GENERATED_ROWS_AT_ONCE, rows - start)
        columns = [pl.Series("label", rng.integers(0, 2, n))]
        for i in range(13):
            values = np.minimum(rng.pareto(0.8, n) * 3, 2**24).astype(np.int64) - (i == 1) * 3
            columns.append(pl.Series(f"int_{i}", values).set(pl.Series(rng.random(n) < MISSING_SHARE), None))
        for i, cardinality in enumerate(CARDINALITIES):
            popularity = (cardinality ** rng.random(n)).astype(np.uint32)  # probability of the k-th ~ 1 / k
            hashed = popularity * np.uint32(2654435761) + np.uint32(i)
            text = np.frombuffer(hashed.astype(">u4").tobytes().hex().encode(), "S8").astype("U8")
            ids = pl.Series(f"cat_{i}", text.tolist())
            columns.append(ids.set(pl.Series(rng.random(n) < MISSING_SHARE), None))
        with path.open("ab") as file:
            pl.DataFrame(columns).write_csv(file, include_header=False, separator="\t")


def measure(prepare: Path, source: Path, output: Path, rows: int, mode: str, workers: int) -> Measurement:
    """Run the command once."""
    command = [sys.executable, str(prepare), "criteo", "--input", str(source), "--output", str(output), "--overwrite"]
    run = measured_run([*command, "--workers", str(workers), *MODES[mode]])
    return Measurement(mode, rows, rows_per_second=round(rows / run.wall_seconds), **vars(run))


def _medians(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(f"{m.mode}, {m.rows} rows", []).append(m)
    names = ("wall_seconds", "rows_per_second", "cpu_seconds", "peak_pss_mib", "peak_rss_mib")
    return {key: {n: round(median(getattr(m, n) for m in group), 1) for n in names} for key, group in groups.items()}


if __name__ == "__main__":
    main()
