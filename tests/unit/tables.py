"""Small tables for tests, and what data/prepare.py makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.transformation import TRANSFORMATION, IdEncoding, Transformation, ids_of

COLUMNS = ("--label", "clicked", "--dense", "price,age", "--sparse", "user,color,tags")
ROWS = 400


def random_table(rows: int = ROWS, seed: int = 0) -> pa.Table:
    """A label, two numbers, ids as whole numbers and as text, lists of text, a time; values are missing in all but the last."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], missing: float = 0.1) -> list[Any]:
        return [None if rng.random() < missing else value for value in values]

    colors, tags = ["red", "blue", "green", "grün", "rare"], ["a", "b", "c", "long tag of words"]
    lists = [some([tags[t] for t in rng.integers(0, 4, rng.integers(0, 5))]) for _ in range(rows)]
    return pa.table(
        {
            "clicked": pa.array(rng.integers(0, 2, rows), pa.int8()),
            "price": pa.array(some(rng.lognormal(2, 1, rows).tolist()), pa.float64()),
            "age": pa.array(some(rng.integers(10, 90, rows).tolist()), pa.int32()),
            "user": pa.array(some((rng.integers(0, 40, rows) * 10**15 - 10**16).tolist()), pa.int64()),
            "color": pa.array(some([colors[min(int(c), 4)] for c in rng.exponential(1, rows)]), pa.string()),
            "tags": pa.array(some(lists), pa.list_(pa.string())),
            "time": pa.array((1_700_000_000 + rng.permutation(rows) // 2 * 60).tolist()).cast(pa.timestamp("s")),
        }
    )


def ids_of_values(encoding: IdEncoding, values: Sequence[object]) -> list[int]:
    """The ids of values of one column, None or an empty text for a missing one."""
    (ids,) = ids_of([(encoding, [encoding.read(value) for value in values])])
    return ids.tolist()


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a table in the format that the name of the file tells; text files have lists joined by ``|``."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    if suffixes[-1] == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=70)
    elif suffixes[-1] == ".arrow":
        pa.feather.write_feather(table, path, chunksize=70)
    elif suffixes[-1] == ".ipc":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        joined = ["" if tags is None else "|".join(tag or "" for tag in tags) for tags in table["tags"].to_pylist()]
        text = table.set_column(table.schema.get_field_index("tags"), "tags", pa.array(joined))
        options = pa.csv.WriteOptions(delimiter="\t" if suffixes[-1] == ".tsv" else ",", quoting_style="needed")
        with pa.output_stream(path, compression="detect") as stream:
            pa.csv.write_csv(text, stream, options)
    return path


@dataclass(frozen=True)
class PreparedTable:
    """A prepared set, read back.

    Attributes:
        splits: of each split, its arrays by the names of their files.
    """

    folder: Path
    info: PreparedInfo
    transformation: Transformation
    splits: dict[str, dict[str, np.ndarray]]

    def ids(self, split: str, name: str) -> list[list[int]]:
        """The ids of a feature in each row."""
        arrays = self.splits[split]
        if f"{name}.values" in arrays:
            return [part.tolist() for part in np.split(arrays[f"{name}.values"], arrays[f"{name}.offsets"][1:-1])]
        single = [feature.name for feature in self.info.schema.sparse_features if not feature.jagged]
        return arrays["single"][:, [single.index(name)]].tolist()

    def all_ids(self, name: str) -> list[list[int]]:
        """The ids of a feature in the rows of all splits, one after the other."""
        return [row for split in self.splits for row in self.ids(split, name)]


def read_prepared(folder: Path) -> PreparedTable:
    info = PreparedInfo.load(folder)
    splits = {split: {path.stem: np.load(path) for path in (folder / split).glob("*.npy")} for split in SPLITS}
    return PreparedTable(folder, info, Transformation.load(folder / TRANSFORMATION), splits)


def prepare(source: Path | list[Path], output: Path, *options: str, command: str = "table") -> PreparedTable:
    """Run data/prepare.py; for ``table`` with ``COLUMNS``."""
    sources = source if isinstance(source, list) else [source]
    arguments = [command, "--input", *map(str, sources), "--output", str(output)]
    assert cli.main([*arguments, *(COLUMNS if command == "table" else ()), *options]) == 0
    return read_prepared(output)
