"""How many samples a second does data.source=parquet give a rank?

    python -m benchmarks.data.read_parquet --output read_parquet.json [--ranks 1 8] [--row-group-rows 131072 8192]

Files that data/prepare.py parquet wrote: 26 sparse features of one id and 13 dense ones, of random content; in the order of the
files, and shuffled in a window that is much smaller than the set, so that every epoch reads all files. The loader's threads
assemble the batches of rank 0 of so many ranks, which does nothing else; the files are in the host's page cache.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.data.loading import prepared, samples_per_second
from dlrm_fused.config import Config, DataSource
from dlrm_fused.datasets.parquet import ParquetDataset
from dlrm_fused.datasets.preparation.parquet import ROW_GROUP_ROWS, ParquetOptions, write_parquet


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="of which the first is measured")
    parser.add_argument("--row-group-rows", type=int, nargs="+", default=[ROW_GROUP_ROWS, 8192])
    parser.add_argument("--batch", type=int, default=8192, help="samples of a rank")
    parser.add_argument("--window", type=int, default=8 * ROW_GROUP_ROWS, help="data.shuffle_window_rows")
    parser.add_argument("--samples", type=int, default=6_000_000, help="of the set; a gigabyte")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    add_report_arguments(parser)
    options = parser.parse_args(arguments)

    rates: list[dict[str, Any]] = []
    print(f"{'row groups':<12}{'order':<12}{'ranks':>6}{'lanes':>6}{'samples/s':>12}")
    with tempfile.TemporaryDirectory() as folder:
        prepared(Path(folder) / "prepared", options.samples)
        for group_rows in options.row_group_rows:
            files = Path(folder) / f"parquet_{group_rows}"
            write_parquet(ParquetOptions(Path(folder) / "prepared", files, group_rows))
            for window in (0, options.window):
                for ranks in options.ranks:
                    config = Config()
                    config.data.source, config.data.path = DataSource.parquet, str(files)
                    config.data.shuffle_window_rows = window
                    config.training.global_batch_size = options.batch * ranks
                    dataset = ParquetDataset(config)
                    lanes = dataset.training_order(config, ranks).lanes
                    rate = samples_per_second(dataset, config, options.seconds, ranks)
                    order = "shuffled" if window else "of files"
                    cell = {"row_group_rows": group_rows, "order": order, "ranks": ranks, "lanes": lanes}
                    rates.append({**cell, "samples_per_second": round(rate)})
                    print(f"{group_rows:<12}{order:<12}{ranks:>6}{lanes:>6}{rate:>12,.0f}", flush=True)
    settings = {"batch": options.batch, "window": options.window, "samples": options.samples, "workers": Config().data.workers}
    write_results(options.output, {**describe_environment(["CPU"], options.commit), **settings, "rates": rates})


if __name__ == "__main__":
    main()
