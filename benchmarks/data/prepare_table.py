"""How fast is ``data/prepare.py table``, how much memory does it take, and does ``apply`` give the same bits?

Generates Parquet files of 12 columns (a label, 4 numbers, 6 columns of ids as text and whole numbers, a list of 5 ids on
average), popularity following a power law, prepares them by the command that users run, and applies the result to the same
rows:

    python -m benchmarks.data.prepare_table [--rows 5000000 20000000] [--repeats 3]

Time and memory are of the whole process tree; before each run, the input is read once.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.common.environment import ROOT, command_line, current_commit
from benchmarks.common.results import write_results
from benchmarks.data.measured_run import MeasuredRun, measured_run, processor
from dlrm_fused.datasets.preparation.writer import SPLITS

RESULT = ROOT / "benchmarks/results/prepare_table.json"
FILES = 8
ROW_GROUP = 2**18
MISSING_SHARE = 0.05
MEAN_LENGTH = 5
DENSE = "price:log,age,score:quantile,clicks:log"
SPARSE = "user,item,page,campaign,country,device,categories"


@dataclass(frozen=True)
class Measurement:
    rows: int
    prepare: MeasuredRun
    apply: MeasuredRun
    rows_per_second: float
    apply_rows_per_second: float
    same_bits: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000_000, 20_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the generated files (default: a temporary folder)")
    args = parser.parse_args()
    measurements = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for rows in args.rows:
            source = Path(folder) / f"table_{rows}"
            generate(source, rows)
            for _ in range(args.repeats):
                measurements.append(measure(source, Path(folder), rows, args.workers))
                print(measurements[-1], flush=True)
            shutil.rmtree(source)
    report = {
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
        },
        "commit": current_commit(),
        "command": command_line(),
        "workers": args.workers,
        "medians": _medians(measurements),
        "measurements": [asdict(m) for m in measurements],
    }
    write_results(RESULT, report)
    print(json.dumps(report["medians"], indent=2))


def generate(folder: Path, rows: int) -> None:
    """Write ``rows`` rows into ``FILES`` files."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(FILES):
        left = rows // FILES + (number < rows % FILES)
        writer = None
        while left:
            table = _generated(rng, min(ROW_GROUP, left))
            writer = writer or pq.ParquetWriter(folder / f"part-{number}.parquet", table.schema)
            writer.write_table(table)
            left -= len(table)
        if writer:
            writer.close()


def _generated(rng: np.random.Generator, n: int) -> pa.Table:
    def popular(cardinality: int, count: int = n) -> NDArray[np.int64]:
        return (cardinality ** rng.random(count)).astype(np.int64)  # probability of the k-th ~ 1 / k

    def with_missing(values: NDArray) -> pa.Array:
        return pa.array(values, mask=rng.random(n) < MISSING_SHARE)

    def texts(prefix: str, cardinality: int) -> pa.Array:
        numbers = popular(cardinality) * 2654435761 % 2**32
        return pa.array(np.char.add(prefix, numbers.astype("U10")).tolist())

    lengths = rng.integers(0, 2 * MEAN_LENGTH + 1, n)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    return pa.table(
        {
            "clicked": rng.integers(0, 2, n).astype(np.int8),
            "price": with_missing(rng.lognormal(3, 1, n)),
            "age": with_missing(rng.integers(16, 90, n).astype(np.int32)),
            "score": with_missing(rng.standard_normal(n).astype(np.float32)),
            "clicks": with_missing(np.minimum(rng.pareto(1, n) * 3, 2**31).astype(np.int64)),
            "user": with_missing(popular(2_000_000) * 2654435761),
            "item": texts("item-", 500_000),
            "page": texts("https://example.com/page/", 100_000),
            "campaign": with_missing(popular(10_000).astype(np.int32)),
            "country": texts("c", 200),
            "device": texts("device ", 8),
            "categories": pa.ListArray.from_arrays(offsets, pa.array(popular(5_000, int(offsets[-1])).astype(np.int32))),
        }
    )


def measure(source: Path, folder: Path, rows: int, workers: int) -> Measurement:
    """Prepare the files, and apply the transformation to the same files and splits."""
    prepared, applied = folder / "prepared", folder / "applied"
    common = ["--input", f"{source}/*.parquet", "--held-out", "0.2", "--workers", str(workers), "--overwrite"]
    columns = ["--label", "clicked", "--dense", DENSE, "--sparse", SPARSE]
    script = [sys.executable, str(ROOT / "data/prepare.py")]
    for path in source.iterdir():
        path.read_bytes()
    prepare = measured_run([*script, "table", *common, *columns, "--output", str(prepared)])
    apply = measured_run([*script, "apply", *common, "--transformation", str(prepared), "--output", str(applied)])
    same = all(_same_files(prepared / split, applied / split) for split in SPLITS)
    per_second = round(rows / prepare.wall_seconds), round(rows / apply.wall_seconds)
    return Measurement(rows, prepare, apply, *per_second, same)


def _same_files(left: Path, right: Path) -> bool:
    names = sorted(path.name for path in left.iterdir())
    _, different, failed = filecmp.cmpfiles(left, right, names, shallow=False)
    return not different and not failed


def _medians(measurements: list[Measurement]) -> dict[str, dict[str, float]]:
    groups: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.rows, []).append(measurement)
    return {
        f"{rows} rows": {
            "rows_per_second": median(m.rows_per_second for m in group),
            "apply_rows_per_second": median(m.apply_rows_per_second for m in group),
            "peak_rss_mib": median(m.prepare.peak_rss_mib for m in group),
            "apply_peak_rss_mib": median(m.apply.peak_rss_mib for m in group),
        }
        for rows, group in groups.items()
    }


if __name__ == "__main__":
    main()
