"""Preparing Criteo's click logs: the Kaggle set (``train.txt``) and the 1TB set (``day_0`` ... ``day_23``).

The files are parsed once, in blocks, by threads, and twice if something must be known of all rows before the first can be
written: the vocabularies, or the smallest dense value. Before, the lines of the last file are counted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.datasets.parallel import map_on_threads
from dlrm_fused.datasets.preparation.blocks import Block, read_blocks
from dlrm_fused.datasets.preparation.criteo_lines import COLUMNS, DENSE_FEATURES, SPARSE_FEATURES, Rows, parse_lines
from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.datasets.preparation.value_counts import ValueCounter
from dlrm_fused.datasets.preparation.writer import SCRATCH, SPLITS, SplitFiles, new_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.datasets.transformation import FIRST_KEPT, MISSING, Vocabulary
from dlrm_fused.errors import DataError

# Lines of a file before the first one of the validation split, and of the test split.
SplitStarts = tuple[float, float]


@dataclass(frozen=True)
class CriteoOptions:
    """The options of ``data/prepare.py criteo``, whose help says what each means."""

    input: Path
    output: Path
    hash_rows: int = 0
    min_frequency: int = 3
    held_out: float = 1 / 7
    torchrec: bool = False
    workers: int = 1
    max_malformed: float = 0.001
    overwrite: bool = False


@dataclass(frozen=True)
class Survey:
    """Facts about all rows, which the writing of any row needs.

    Attributes:
        vocabularies: of each sparse feature; none if ids are hashed.
        dense_min: the smallest dense value of each file.
    """

    vocabularies: list[Vocabulary]
    dense_min: dict[Path, int]


def prepare_criteo(options: CriteoOptions) -> PreparedInfo:
    """Write the prepared set to ``options.output``.

    Raises:
        DataError: if the input is missing, empty, without labels, too malformed or too short, or the output is taken.
    """
    _check_options(options)
    files = find_files(options.input)
    for file in files:
        _check_first_line(file)
    starts = dict.fromkeys(files[:-1], (np.inf, np.inf)) | {files[-1]: _split_last(files, options.held_out)}
    survey = Survey([], {})
    with new_output(options.output, options.overwrite) as folder:
        if options.torchrec or not options.hash_rows:
            survey = _survey(options, starts, folder / SCRATCH)
        rows = [FIRST_KEPT + len(of.keys) for of in survey.vocabularies] or [options.hash_rows] * len(SPARSE_FEATURES)
        schema = DatasetSchema(DENSE_FEATURES, tuple(map(SparseFeature, SPARSE_FEATURES, rows)))
        samples, malformed = _write(options, starts, survey, schema, folder)
        origin = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
        origin = {"data_set": "criteo", **origin, "files": [file.name for file in files], **malformed.summary()}
        info = PreparedInfo(schema, samples, origin)
        info.save(folder)
    malformed.print_report()
    return info


def _check_options(options: CriteoOptions) -> None:
    def require(condition: bool, option: str, allowed: str) -> None:
        if not condition:
            raise DataError(f"--{option.replace('_', '-')}={getattr(options, option)}: allowed: {allowed}")

    require(0 <= options.hash_rows < 2**31, "hash_rows", "1 to 2147483647")
    require(options.min_frequency >= 1, "min_frequency", "1 or more")
    require(0 < options.held_out < 1, "held_out", "above 0, below 1")
    require(options.workers >= 1, "workers", "1 or more")


def find_files(path: Path) -> list[Path]:
    """Return the files of a data set, in order of time.

    Raises:
        DataError: if there are none, or a day is there twice.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--input {path}: no such file or folder")
    kaggle = [file for name in ("train.txt", "train.txt.gz") if (file := path / name).is_file()]
    days = [(int(found[1]), file) for file in path.iterdir() if (found := re.fullmatch(r"day_(\d+)(\.gz)?", file.name))]
    files = [file for _, file in sorted(days)]
    if kaggle and files:
        raise DataError(f"--input {path}: holds both {kaggle[0].name} and {files[0].name}; name one file, or separate them")
    if not kaggle and not files:
        raise DataError(f"--input {path}: neither train.txt (Kaggle) nor day_0, day_1, ... (1TB) is there, plain or .gz")
    if len({day for day, _ in days}) < len(days) or len(kaggle) > 1:
        raise DataError(f"--input {path}: a file is there both plain and as .gz; remove one of them")
    return kaggle or files


def _check_first_line(path: Path) -> None:
    """A file of the wrong kind is told before anything is read or written."""
    columns = next(read_blocks(path, 1)).data.count(b"\t") + 1
    if columns == len(COLUMNS) - 1:
        raise DataError(f"{path}: {columns} columns, so no labels; Kaggle's test.txt cannot be trained on, use train.txt")
    if columns != len(COLUMNS):
        raise DataError(f"{path}:1: {columns} tab-separated columns, expected {len(COLUMNS)}: label, 13 integers, 26 ids")


def _split_last(files: Sequence[Path], held_out: float) -> SplitStarts:
    """Cut the last file into splits; of several files, it has none of the training rows."""
    path = files[-1]
    lines = 0
    with _progress("counting lines", [path]) as bar:
        for block in read_blocks(path):
            lines += block.lines
            bar.update(block.bytes_on_disk)
    held = lines if len(files) > 1 else round(lines * held_out)
    if held < 2 or (held == lines and len(files) == 1):
        raise DataError(f"{path}: {lines} lines are too few to cut into {', '.join(SPLITS)}")
    return lines - held, lines - held // 2


def _survey(options: CriteoOptions, starts: Mapping[Path, SplitStarts], scratch: Path) -> Survey:
    scratch.mkdir()
    counters = [] if options.hash_rows else [ValueCounter(scratch / name) for name in SPARSE_FEATURES]
    dense_min: dict[Path, int] = {}
    lines = 0

    def survey_block(block: Block) -> tuple[Rows, list[pl.DataFrame]]:
        rows = parse_lines(block.data)
        used = len(rows.labels) if options.torchrec else int(np.searchsorted(block.first + rows.numbers, starts[block.path][0]))
        ids = rows.ids.fill_null(0) if options.torchrec else rows.ids
        return rows, [_count(ids[name][:used], rows.numbers[:used]) for name in SPARSE_FEATURES if counters]

    what = "counting ids" if counters else "finding the minimum"
    for block, (rows, of_block) in _each_block(what, survey_block, options, starts, MalformedLines(options.max_malformed)):
        smallest = int(rows.dense.min(initial=np.iinfo(np.int32).max))
        dense_min[block.path] = min(smallest, dense_min.get(block.path, smallest))
        for counter, counts in zip(counters, of_block, strict=True):
            counter.add(counts["id"].to_arrow(), counts["count"].to_numpy(), lines + counts["first"].to_numpy())
        lines += block.lines
    named = list(zip(SPARSE_FEATURES, counters, strict=bool(counters)))
    vocabularies = []
    for _, counter in tqdm(named, desc="vocabularies", disable=not counters):
        ids = counter.frequent(options.min_frequency)["value"].to_numpy()
        vocabularies.append(Vocabulary.of(ids, ids, None))
    shutil.rmtree(scratch)
    return Survey(vocabularies, dense_min)


def _count(ids: pl.Series, numbers: NDArray[np.int64]) -> pl.DataFrame:
    """Count the distinct ids of the lines ``numbers`` [n], with the line where each occurs first."""
    table = pl.DataFrame({"id": ids.cast(pl.Int64), "number": numbers}).drop_nulls()
    return table.group_by("id").agg(pl.len().cast(pl.Int64).alias("count"), pl.min("number").alias("first"))


def _write(
    options: CriteoOptions, starts: Mapping[Path, SplitStarts], survey: Survey, schema: DatasetSchema, folder: Path
) -> tuple[dict[str, int], MalformedLines]:
    """Write the files of all splits; returns the samples of each."""
    malformed = MalformedLines(options.max_malformed)
    encode = partial(_encode_block, options=options, survey=survey)
    with ExitStack() as stack:
        files = {split: SplitFiles(folder / split, schema, stack) for split in SPLITS}
        for block, (rows, dense, ids) in _each_block("writing", encode, options, starts, malformed):
            stops = np.searchsorted(block.first + rows.numbers, starts[block.path]).tolist()
            for split, start, stop in zip(SPLITS, [0, *stops], [*stops, len(ids)], strict=True):
                files[split].append(rows.labels[start:stop], dense[start:stop], ids[start:stop], {})
    for split, written in files.items():
        if not written.ids.rows:
            raise DataError(f"{list(starts)[-1]}: no well-formed line for the {split} split")
    return {split: written.ids.rows for split, written in files.items()}, malformed


def _encode_block(block: Block, options: CriteoOptions, survey: Survey) -> tuple[Rows, NDArray[np.float32], NDArray[np.int32]]:
    """Return the rows of a block, and of these the dense values [n, 13] and the ids [n, 26] as they are written."""
    rows = parse_lines(block.data)
    if options.torchrec:
        dense = np.log(rows.dense - np.int32(survey.dense_min[block.path] - 2), dtype=np.float32)
    else:
        dense = np.log1p(np.maximum(rows.dense, 0), dtype=np.float32)
    if options.hash_rows:
        return rows, dense, rows.ids.select((pl.all().fill_null(0) % options.hash_rows).cast(pl.Int32)).to_numpy(order="c")
    ids = np.empty((rows.ids.height, rows.ids.width), np.int32)
    for i, (column, vocabulary) in enumerate(zip(rows.ids, survey.vocabularies, strict=True)):
        ids[:, i] = vocabulary.find(column.fill_null(0).cast(pl.Int64).to_numpy())
        if not options.torchrec:  # for which a missing id is the id 0
            ids[column.is_null().to_numpy(), i] = MISSING
    return rows, dense, ids


def _each_block(
    what: str,
    function: Callable[[Block], tuple[Rows, *tuple[Any, ...]]],
    options: CriteoOptions,
    files: Collection[Path],
    malformed: MalformedLines,
) -> Iterator[tuple[Block, Any]]:
    """Yield each block of all files with the result of ``function``, showing progress and counting malformed lines."""
    blocks = (block for file in files for block in read_blocks(file))
    with _progress(what, files) as bar:
        for block, result in map_on_threads(lambda block: (block, function(block)), blocks, options.workers):
            for line, reason in result[0].malformed:
                malformed.add(block.path, block.first + line + 1, reason)
            malformed.seen(block.lines)
            bar.update(block.bytes_on_disk)
            yield block, result
    malformed.finish()


def _progress(what: str, files: Collection[Path]) -> tqdm[Any]:
    return tqdm(total=sum(file.stat().st_size for file in files), desc=what, unit="B", unit_scale=True)
