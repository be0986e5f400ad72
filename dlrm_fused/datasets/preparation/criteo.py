"""Preparing Criteo's click logs: the Kaggle set (``train.txt``) and the 1TB set (``day_0`` ... ``day_23``).

The files are parsed once, in blocks, by worker processes, and twice if something must be known of all rows before the
first can be written: the vocabularies, or the smallest dense value. Before, the lines of the last file are counted.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.datasets.preparation.blocks import Block, count_lines, cut_blocks, first_line, split_blocks
from dlrm_fused.datasets.preparation.criteo_lines import COLUMNS, DENSE_FEATURES, SPARSE_FEATURES, Rows, parse_lines
from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.datasets.preparation.parallel import OrderedMap, ordered_map
from dlrm_fused.datasets.preparation.vocabulary import Counts, IdCounter, Vocabulary, count_ids
from dlrm_fused.datasets.preparation.writer import SCRATCH, SPLITS, SplitFiles, claim_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.datasets.transformation import MISSING
from dlrm_fused.errors import DataError

# Entries (16 bytes each) of id counts held in memory: 16 MiB, or a thousandth of the input if that is more, since the
# time to merge the counts grows with the square of (input / memory).
COUNT_ENTRIES = 2**20
INPUT_BYTES_PER_COUNT_BYTE = 1000


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
class Task:
    """A block, all of whose rows belong to one split."""

    block: Block
    split: str


@dataclass(frozen=True)
class Survey:
    """The counts of one block, which are added up over all blocks before rows are written.

    Attributes:
        counts: of each sparse feature; None for rows that the vocabulary is not made from.
    """

    task: Task
    lines: int
    malformed: list[tuple[int, str]]
    rows: int
    dense_min: int
    counts: list[Counts] | None


@dataclass(frozen=True)
class Encoding:
    """The rules by which parsed values become inputs of the model.

    Attributes:
        hash_rows: ids are taken modulo this; 0 looks them up in ``vocabularies``.
        missing_is_id: a missing id is treated as the id 0, as TorchRec does.
        dense_min: smallest dense value of each file for TorchRec's transform; None for log(1 + max(x, 0)).
    """

    hash_rows: int
    vocabularies: Path
    missing_is_id: bool
    dense_min: dict[Path, int] | None


@dataclass(frozen=True)
class Encoded:
    """Rows of one block as they are written: labels ``[n]``, dense ``[n, 13]`` float32, ids ``[n, 26]`` int32."""

    task: Task
    lines: int
    malformed: list[tuple[int, str]]
    labels: NDArray[np.uint8]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]


def prepare_criteo(options: CriteoOptions) -> PreparedInfo:
    """Write the prepared set to ``options.output``.

    Raises:
        DataError: if the input is missing, empty, without labels, too malformed or too short, or the output is taken.
    """
    _check_options(options)
    files = find_files(options.input)
    for file in files:
        _check_first_line(file)
    claim_output(options.output, options.overwrite)
    preparation = _Preparation(options, files)
    info = preparation.run()
    info.save(options.output)
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
    columns = first_line(path).count(b"\t") + 1
    if columns == len(COLUMNS) - 1:
        raise DataError(f"{path}: {columns} columns, so no labels; Kaggle's test.txt cannot be trained on, use train.txt")
    if columns != len(COLUMNS):
        raise DataError(f"{path}:1: {columns} tab-separated columns, expected {len(COLUMNS)}: label, 13 integers, 26 ids")


class _Preparation:
    def __init__(self, options: CriteoOptions, files: list[Path]) -> None:
        self._options = options
        self._files = files
        self._bytes = sum(file.stat().st_size for file in files)
        self._scratch = options.output / SCRATCH

    def run(self) -> PreparedInfo:
        options = self._options
        self._scratch.mkdir()
        _vocabularies.cache_clear()
        self._last_file_lines = self._count_last_file()
        encoding = Encoding(options.hash_rows, self._scratch, options.torchrec, None)
        rows = [options.hash_rows] * len(SPARSE_FEATURES)
        with ordered_map(options.workers) as run:
            if options.torchrec or not options.hash_rows:
                dense_min = self._survey(run)
                encoding = replace(encoding, dense_min=dense_min if options.torchrec else None)
            if not options.hash_rows:
                rows = [vocabulary.rows for vocabulary in _vocabularies(self._scratch)]
            features = tuple(SparseFeature(name, count) for name, count in zip(SPARSE_FEATURES, rows, strict=True))
            schema = DatasetSchema(DENSE_FEATURES, features)
            samples, malformed = self._write(run, encoding, schema)
        shutil.rmtree(self._scratch)
        if malformed.count:
            print(malformed.report(), file=sys.stderr)
        return PreparedInfo(schema, samples, self._origin(malformed))

    def _origin(self, malformed: MalformedLines) -> dict[str, Any]:
        origin = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self._options).items()}
        return {"data_set": "criteo", **origin, "files": [file.name for file in self._files], **malformed.summary()}

    def _count_last_file(self) -> list[int]:
        """Lines of each block of the file that is cut into splits."""
        path = self._files[-1]
        lines = []
        with _progress("counting lines", path.stat().st_size) as bar:
            for block, count in count_lines(path):
                lines.append(count)
                bar.update(block.progress - bar.n)
        if min(self._split_lines(sum(lines)).values()) < 1:
            raise DataError(f"{path}: {sum(lines)} lines are too few to cut into {', '.join(SPLITS)}")
        return lines

    def _split_lines(self, lines: int) -> dict[str, int]:
        """Return how many lines of the last file each split gets."""
        held_out = lines if len(self._files) > 1 else round(lines * self._options.held_out)
        of = {"validation": (held_out + 1) // 2, "test": held_out // 2}
        return of if len(self._files) > 1 else {"train": lines - held_out, **of}

    def _tasks(self) -> Iterator[Task]:
        """Yield all blocks of all files, in order."""
        for file in self._files[:-1]:
            for block in split_blocks(file):
                yield Task(block, "train")
        share = self._split_lines(sum(self._last_file_lines))
        splits, cuts = list(share), np.cumsum(list(share.values()))[:-1].tolist()
        for block, part in cut_blocks(split_blocks(self._files[-1]), self._last_file_lines, cuts):
            yield Task(block, splits[part])

    def _survey(self, run: OrderedMap) -> dict[Path, int]:
        """Make the vocabularies, unless ids are hashed; returns the smallest dense value of each file."""
        options = self._options
        counters = [] if options.hash_rows else [IdCounter(self._scratch / name) for name in SPARSE_FEATURES]
        limit = max(COUNT_ENTRIES, self._bytes // INPUT_BYTES_PER_COUNT_BYTE // 16)
        rows, entries = 0, 0
        dense_min: dict[Path, int] = {}
        items = ((task, bool(counters), options.torchrec) for task in self._tasks())
        for survey in self._watch("counting ids" if counters else "finding the minimum", run(_survey_block, items)):
            path = survey.task.block.path
            dense_min[path] = min(survey.dense_min, dense_min.get(path, survey.dense_min))
            for counter, counts in zip(counters, survey.counts or [], strict=bool(survey.counts)):
                counter.add(replace(counts, first=counts.first + rows))
                entries += len(counts)
            rows += survey.rows
            if entries >= limit:
                for counter in counters:
                    counter.spill()
                entries = 0
        named = list(zip(SPARSE_FEATURES, counters, strict=bool(counters)))
        for name, counter in tqdm(named, desc="vocabularies", disable=not counters):
            Vocabulary.write(self._scratch / name, counter.frequent(options.min_frequency, limit))
        return dense_min

    def _write(self, run: OrderedMap, encoding: Encoding, schema: DatasetSchema) -> tuple[dict[str, int], MalformedLines]:
        with ExitStack() as stack:
            files = {split: SplitFiles(self._options.output / split, schema, stack) for split in SPLITS}
            malformed = MalformedLines(self._options.max_malformed)
            items = ((task, encoding) for task in self._tasks())
            for encoded in self._watch("writing", run(_encode_block, items), malformed):
                files[encoded.task.split].append(encoded.labels, encoded.dense, encoded.ids, {})
        for split, written in files.items():
            if not written.ids.rows:
                raise DataError(f"{self._files[-1]}: no well-formed line for the {split} split")
        return {split: written.ids.rows for split, written in files.items()}, malformed

    def _watch(self, what: str, results: Iterator[Any], malformed: MalformedLines | None = None) -> Iterator[Any]:
        """Pass results through, showing progress and counting malformed lines."""
        malformed = malformed or MalformedLines(self._options.max_malformed)
        path, lines, bytes_before = self._files[0], 0, 0
        with _progress(what, self._bytes) as bar:
            for result in results:
                block = result.task.block
                if block.path != path:
                    path, lines, bytes_before = block.path, 0, bytes_before + path.stat().st_size
                for line, reason in result.malformed:
                    malformed.add(path, lines + line + 1, reason)
                malformed.seen(result.lines)
                lines += result.lines
                bar.update(bytes_before + block.progress - bar.n)
                yield result
        malformed.finish()


def _progress(what: str, total: int) -> tqdm[Any]:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True)


def _survey_block(item: tuple[Task, bool, bool]) -> Survey:
    task, count, torchrec = item
    rows = parse_lines(task.block.read())
    counts = None
    if count and (task.split == "train" or torchrec):
        counts = [_count(column.fill_null(0) if torchrec else column) for column in rows.ids]
    dense_min = int(rows.dense.min(initial=np.iinfo(np.int32).max))
    return Survey(_without_data(task), rows.lines, rows.malformed, len(rows.labels), dense_min, counts)


def _count(column: pl.Series) -> Counts:
    present = column.is_not_null()
    return count_ids(column.drop_nulls().to_numpy(), np.flatnonzero(present.to_numpy()))


def _encode_block(item: tuple[Task, Encoding]) -> Encoded:
    task, encoding = item
    rows = parse_lines(task.block.read())
    dense = _encode_dense(rows.dense, None if encoding.dense_min is None else encoding.dense_min[task.block.path])
    ids = _encode_ids(rows, encoding)
    return Encoded(_without_data(task), rows.lines, rows.malformed, rows.labels, dense, ids)


def _encode_dense(dense: NDArray[np.int32], file_min: int | None) -> NDArray[np.float32]:
    """log(1 + max(x, 0)); or with the smallest value of the file, TorchRec's log(x - min + 2)."""
    if file_min is None:
        return np.log1p(np.maximum(dense, 0), dtype=np.float32)
    return np.log(dense - np.int32(file_min - 2), dtype=np.float32)


def _encode_ids(rows: Rows, encoding: Encoding) -> NDArray[np.int32]:
    if encoding.hash_rows:
        hashed = rows.ids.select((pl.all().fill_null(0) % encoding.hash_rows).cast(pl.Int32))
        return hashed.to_numpy(order="c")
    encoded = np.empty((rows.ids.height, rows.ids.width), np.int32)
    for i, (column, vocabulary) in enumerate(zip(rows.ids, _vocabularies(encoding.vocabularies), strict=True)):
        encoded[:, i] = vocabulary.encode(column.fill_null(0).to_numpy())
        if not encoding.missing_is_id:
            encoded[column.is_null().to_numpy(), i] = MISSING
    return encoded


@lru_cache(maxsize=1)
def _vocabularies(folder: Path) -> list[Vocabulary]:
    return [Vocabulary(folder / name) for name in SPARSE_FEATURES]


def _without_data(task: Task) -> Task:
    return replace(task, block=replace(task.block, data=None))


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
