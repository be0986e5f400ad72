"""Preparing a table of one's own, and applying what was learned to other rows."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_fused.datasets.parallel import map_on_threads
from dlrm_fused.datasets.preparation.table.column_roles import (
    ColumnChoice,
    check_sparse,
    check_types,
    choose_sparse,
    grouping_column,
)
from dlrm_fused.datasets.preparation.table.describe import describe, suspects
from dlrm_fused.datasets.preparation.table.files import TableFile, find_files, open_file, partitions_of, read_blocks
from dlrm_fused.datasets.preparation.table.learning import learn
from dlrm_fused.datasets.preparation.table.proposed_config import proposed_config
from dlrm_fused.datasets.preparation.table.splits import (
    BY_COLUMN,
    BY_TIME,
    ColumnSplit,
    FileSplit,
    RandomSplit,
    Split,
    TimeSplit,
)
from dlrm_fused.datasets.preparation.table.survey import Question, Survey, survey_block
from dlrm_fused.datasets.preparation.table.writing import HISTORY, TOKEN_GAP, TOKEN_LABEL, InteractionColumns, write_set
from dlrm_fused.datasets.preparation.writer import PROPOSED_CONFIG, SCRATCH, SPLITS, new_output
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.table_format import PLAIN, TableFormat
from dlrm_fused.datasets.transformation import (
    TRANSFORMATION,
    DenseKind,
    HistoryColumns,
    Transformation,
    token_name,
)
from dlrm_fused.datasets.values import NullMarkers
from dlrm_fused.errors import DataError

_MANY_UNSEEN = 0.95  # of the values of a column that are not missing
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class SplitOptions:
    """The options that say which rows are held out, of which the help of ``data/prepare.py table`` has the meaning."""

    held_out: float = 0.2
    seed: int = 1
    by_time: str = ""
    by_column: str = ""

    def check(self, history: HistoryColumns | None) -> None:
        """
        Args:
            history: what histories are made of; rows must then be split by its time.

        Raises:
            DataError: if the options contradict each other.
        """
        if not 0 < self.held_out < 1:
            raise DataError(f"--held-out={self.held_out}: allowed: above 0, below 1")
        if self.by_time and self.by_column:
            raise DataError(f"{BY_TIME} {self.by_time}: not together with {BY_COLUMN} {self.by_column}; keep one of them")
        other = self.by_column or self.by_time
        if history and other not in ("", history.time):
            raise DataError(
                f"{HISTORY}: rows are split by its time, {history.time}, and not by {other}, since otherwise histories of "
                "training rows would tell labels of the test; leave that option out"
            )


@dataclass(frozen=True)
class TableOptions:
    """The options of ``data/prepare.py table``, whose help says what each means."""

    input: tuple[str, ...]
    output: Path
    labels: tuple[str, ...]
    dense: dict[str, DenseKind]
    sparse: tuple[str, ...]
    separated: dict[str, str] = field(default_factory=dict)
    min_frequency: int = 3
    hash_buckets: dict[str, int] = field(default_factory=dict)
    split: SplitOptions = field(default_factory=SplitOptions)
    history: HistoryColumns | None = None
    sample_weight: str = ""
    null_values: tuple[str, ...] = ()
    workers: int = 1
    overwrite: bool = False
    table_format: TableFormat = PLAIN
    split_files: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ApplyOptions:
    """The options of ``data/prepare.py apply``, whose help says what each means; without ``split`` rows are for the test."""

    transformation: Path
    input: tuple[str, ...]
    output: Path
    split: SplitOptions | None = None
    workers: int = 1
    overwrite: bool = False
    table_format: dict[str, Any] = field(default_factory=dict)
    split_files: dict[str, tuple[str, ...]] = field(default_factory=dict)


def prepare_table(options: TableOptions) -> PreparedInfo:
    """Learn a transformation from a table, and write the table as a prepared set, with a config to train on it.

    Raises:
        DataError: if an option, a file or a value is wrong, or the output is taken. Then nothing is written.
    """
    table = _open_table(options)
    with new_output(options.output, options.overwrite) as folder:
        scratch = folder / SCRATCH
        scratch.mkdir()
        survey = table.survey(set(options.sparse) - options.hash_buckets.keys(), scratch)
        transformation = learn(survey, options.min_frequency, options.hash_buckets, options.history)
        first_time = table.split.first if isinstance(table.split, TimeSplit) else None
        transformation = replace(transformation, table_format=options.table_format, first_time=first_time)
        shutil.rmtree(scratch)
        transformation.save(folder / TRANSFORMATION)
        origin = _origin(options, table.split)
        info, _ = write_set(
            table.files, table.columns, transformation, table.split, table.interactions, folder, options.workers, origin
        )
        config = proposed_config(info.schema, info.samples["train"], options.output)
        (folder / PROPOSED_CONFIG).write_text(config, encoding="utf-8")
    for line in suspects(survey):
        print(line, file=sys.stderr)
    return info


def describe_table(options: TableOptions) -> str:
    """Return a text with a table's columns and the config that would be proposed for it; write nothing.

    Raises:
        DataError: if an option, a file or a value is wrong.
    """
    table = _open_table(options)
    with tempfile.TemporaryDirectory() as scratch:
        survey = table.survey(set(options.sparse), Path(scratch))
        return describe(survey, options.min_frequency, options.hash_buckets, options.history, options.output)


def apply_transformation(options: ApplyOptions) -> PreparedInfo:
    """Write other rows as a prepared set, with the transformation of another one.

    Raises:
        DataError: if an option, a file or a value is wrong, or the output is taken. Then nothing is written.
    """
    transformation = Transformation.load(options.transformation / TRANSFORMATION)
    columns = tuple(encoding.column for encoding in transformation.sparse)
    if options.split:
        options.split.check(transformation.history)
    table_format = replace(transformation.table_format, **options.table_format)
    table_format.check()
    files, split_of_files = _open_files(options.input, options.split_files, table_format)
    choice = ColumnChoice(
        transformation.labels,
        tuple(feature.name for feature in transformation.dense),
        tuple(column.name for column in columns),
        {column.name: column.separator for column in columns if column.separator},
        _other_columns(options.split, transformation.history),
        transformation.sample_weight,
    )
    check_types(files, choice)
    check_sparse(files, columns)
    split: Split = split_of_files or FileSplit({file.path: "test" for file in files})
    if options.split:
        split = _split(files, options.split, transformation.history, table_format.time)
    first_time, nulls = transformation.first_time, transformation.nulls
    interactions = _interactions(files, transformation.history, table_format.time, nulls, first_time)
    with new_output(options.output, options.overwrite) as folder:
        transformation.save(folder / TRANSFORMATION)
        origin = _origin(options, split)
        info, unseen = write_set(files, choice.names(), transformation, split, interactions, folder, options.workers, origin)
    for column, (without_id, known) in zip(columns, unseen.tolist(), strict=True):
        if without_id > _MANY_UNSEEN * known:
            print(
                f"warning: --sparse {column.name}: {without_id:,} of {known:,} values do not occur in the table of the "
                "transformation, or rarely; are they written otherwise there, such as 7.0 for 7?",
                file=sys.stderr,
            )
    return info


@dataclass(frozen=True)
class _Table:
    """The files of a table and how they are read."""

    files: list[TableFile]
    columns: list[str]
    question: Question
    interactions: InteractionColumns | None
    workers: int

    @property
    def split(self) -> Split:
        return self.question.split

    def survey(self, counted: set[str], scratch: Path) -> Survey:
        """Read all rows once.

        Args:
            counted: names of the sparse columns whose values are counted.
            scratch: folder for files of counts, which are read when the counts are asked for.
        """
        question = replace(self.question, counted=frozenset(counted))
        blocks = read_blocks(self.files, self.columns)
        return Survey.of(map_on_threads(partial(survey_block, question=question), blocks, self.workers), question, scratch)


def _open_table(options: TableOptions) -> _Table:
    _check_numbers(options)
    options.split.check(options.history)
    choice = ColumnChoice(
        options.labels,
        tuple(options.dense),
        options.sparse,
        options.separated,
        _other_columns(options.split, options.history),
        options.sample_weight,
    )
    choice.check()
    _check_history(options)
    options.table_format.check()
    files, split_of_files = _open_files(options.input, options.split_files, options.table_format)
    sparse = choose_sparse(files, choice)
    _check_renamed(files, options.table_format)
    time_format, nulls = options.table_format.time, NullMarkers(options.null_values)
    interactions = _interactions(files, options.history, time_format, nulls)
    split = split_of_files or _split(files, options.split, options.history, time_format)
    quote = options.table_format.quote if any(file.is_text for file in files) and not options.table_format.escape else ""
    escaped_quote = "\\" + quote if quote else ""
    question = Question(options.labels, options.dense, sparse, split, frozenset(), options.sample_weight, nulls, escaped_quote)
    return _Table(files, choice.names(), question, interactions, options.workers)


def _open_files(
    patterns: Sequence[str], of_splits: Mapping[str, Sequence[str]], table_format: TableFormat
) -> tuple[list[TableFile], FileSplit | None]:
    """Return the files of ``--input``, or those of each split, and then what split each is for."""
    if not of_splits:
        return [open_file(path, table_format) for path in find_files(patterns)], None
    split_of: dict[Path, str] = {}
    taken: dict[Path, str] = {}  # by where files are, whatever names they go by
    for split in SPLITS:
        for path in find_files(of_splits[split], f"--{split}") if split in of_splits else []:
            first = taken.setdefault(path.resolve(), split)
            if first != split:
                raise DataError(f"--{split} {path}: is in --{first}, too; leave it out of one of them")
            split_of[path] = split
    return [open_file(path, table_format) for path in split_of], FileSplit(split_of)


def _check_renamed(files: Sequence[TableFile], table_format: TableFormat) -> None:
    written = {name for file in files for name in (*file.names.values(), *partitions_of(file.path))}
    there = {name.strip() if table_format.trim else name for name in written}
    for name in table_format.renamed.keys() - there:
        raise DataError(f"--rename {name}={table_format.renamed[name]}: no such column in {files[0].path}; leave it out")


def _check_numbers(options: TableOptions) -> None:
    def require(condition: bool, option: str, value: object, allowed: str) -> None:
        if not condition:
            raise DataError(f"--{option}={value}: allowed: {allowed}")

    require(options.min_frequency >= 1, "min-frequency", options.min_frequency, "1 or more")
    require(options.workers >= 1, "workers", options.workers, "1 or more")
    for name, buckets in options.hash_buckets.items():
        require(2 <= buckets <= MAX_ROWS, "hash-buckets", f"{name}={buckets}", f"2 to {MAX_ROWS}")
        require(name in options.sparse, "hash-buckets", f"{name}={buckets}", "columns of --sparse; add it there")


def _check_history(options: TableOptions) -> None:
    history = options.history
    if history is None:
        return
    if options.split_files:
        raise DataError(f"{HISTORY}: rows are split by its time, {history.time}, and not by files; name all files in --input")
    if not history.items:
        raise DataError(f"{HISTORY}: no item column given; name a column of --sparse after {history.time}")
    for name in history.items:
        if name not in options.sparse:
            raise DataError(f"{HISTORY}: {name} is not in --sparse; add it there")
        if history.items.count(name) > 1:
            raise DataError(f"{HISTORY}: {name} is twice among its columns; keep one of them")
    for name in history.items:
        if token_name(name) in (TOKEN_LABEL, TOKEN_GAP):
            raise DataError(
                f"{HISTORY}: {name} would be {token_name(name)}, a token feature of all histories; rename the column"
            )
    tokens = {TOKEN_LABEL, TOKEN_GAP, *map(token_name, history.items)}
    for name in tokens & set(options.sparse):
        raise DataError(f"--sparse {name}: is the name of a token feature of {HISTORY}; rename the column")


def _other_columns(split: SplitOptions | None, history: HistoryColumns | None) -> tuple[tuple[str, str], ...]:
    """Return the columns that are neither labels, features nor weights, each with its option."""
    of_split = [(BY_TIME, split.by_time), (BY_COLUMN, split.by_column)] if split else []
    of_history = [(HISTORY, history.user), (HISTORY, history.time)] if history else []
    return tuple(pair for pair in (*of_split, *of_history) if pair[1])


def _split(files: Sequence[TableFile], options: SplitOptions, history: HistoryColumns | None, time_format: str) -> Split:
    if history:
        return TimeSplit.of(files, history.time, HISTORY, time_format, options.held_out)
    if options.by_time:
        return TimeSplit.of(files, options.by_time, BY_TIME, time_format, options.held_out)
    if options.by_column:
        return ColumnSplit(options.by_column)
    return RandomSplit(options.held_out, options.seed)


def _interactions(
    files: Sequence[TableFile],
    history: HistoryColumns | None,
    time_format: str,
    nulls: NullMarkers,
    first_time: int | None = None,
) -> InteractionColumns | None:
    if history is None:
        return None
    user, item = (grouping_column(files, HISTORY, name) for name in (history.user, history.items[0]))
    return InteractionColumns(user, item, history.items, history.time, time_format, nulls, first_time)


def _origin(options: TableOptions | ApplyOptions, split: Split) -> dict[str, Any]:
    """Return a record of how the set was made, for ``dataset.json``."""
    times = {"times": split.found} if isinstance(split, TimeSplit) else {}
    plain = json.dumps(asdict(options), default=lambda value: value.name if isinstance(value, Enum) else str(value))
    return {"data_set": "table", **json.loads(plain), **times}
