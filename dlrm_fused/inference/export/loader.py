"""Predicts with an exported model; this file and the folder it lies in need torch and NumPy, and nothing else.

    from loader import load
    model = load("model")
    probabilities = model.predict([{"price": 3.5, "item": "a17", "categories": ["x", "y"]}])

The folder: ``manifest.json`` says what the model takes, ``dense.pt2`` is the part after the embeddings, by torch.export,
``tables.safetensors`` holds for each table ``<table>.rows`` ([rows, dim], float32, float16 or int8) and, for int8,
``<table>.scales`` ([rows] float32, by which a row is multiplied). Where ``transformation/`` is there, rows have the columns of
the table that the model was trained on; otherwise ids and numbers as a prepared data set has them.
``dlrm_rows_<digest>/`` is the code that reads and applies the transformation, the one of training, and that checks files.
``checksums.json`` has those of all files, with which they are compared at loading.
"""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from dlrm_fused.checksums import CHECKSUMS_FILE, Checksums
from dlrm_fused.datasets.table_format import MICROSECONDS
from dlrm_fused.datasets.transformation import IdEncoding, Transformation, ids_of, keys_of_values, token_name
from dlrm_fused.datasets.transformation import Values as Kind
from dlrm_fused.datasets.values import LARGEST_FLOAT32, number_of, whole_of
from dlrm_fused.errors import DataError
from dlrm_fused.records import read_json

logger = logging.getLogger("dlrm_fused")

FORMAT_VERSION = 2
_EXPORT_AGAIN = "export the model again"
_FILES = {"manifest.json", "dense.pt2", "tables.safetensors"}
HISTORY = "history"  # the field of a row with its past interactions, oldest first
TIME = "token_time"  # the field of a row, and of each past interaction, with the seconds of a model that reads times

_GAP_ROWS = 32
_INT64 = range(-(2**63), 2**63)
_DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8}


class InputError(ValueError):
    """Raised for a row that cannot be used; the message names the row, the feature and the value."""


class Bags(NamedTuple):
    """Holds the ids of one feature in n bags: ids [total] int64, bag after bag; lengths [n] int64."""

    ids: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Inputs:
    """The inputs that n rows are to the model.

    Attributes:
        dense: [n, dense features] float32.
        bags: of each sparse feature n bags; of each token feature n * (history length + 1), those of a row together: its
            history, oldest first, then the candidate, then empty ones.
        history_lengths: [n] int64; zeros for a model that reads no histories.
        token_times: [n, history length + 1] int64, seconds since 1970 of the tokens of each row, the candidate's again for
            padding; None for a model that reads no times.
    """

    dense: np.ndarray
    bags: tuple[Bags, ...]
    history_lengths: np.ndarray
    token_times: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dense)

    @staticmethod
    def join(parts: Sequence[Inputs]) -> Inputs:
        """Return the inputs of the rows of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        bags = zip(*(part.bags for part in parts), strict=True)
        times = [part.token_times for part in parts if part.token_times is not None]
        return Inputs(
            np.concatenate([part.dense for part in parts]),
            tuple(Bags(*map(np.concatenate, zip(*of_feature, strict=True))) for of_feature in bags),
            np.concatenate([part.history_lengths for part in parts]),
            np.concatenate(times) if times else None,
        )


@dataclass(frozen=True)
class Table:
    """An embedding table: rows [rows, dim]; scales [rows] for int8, otherwise None."""

    rows: np.ndarray
    scales: np.ndarray | None = None

    def pool(self, bags: Bags) -> torch.Tensor:
        """Return the sum of each bag's rows: [n, dim] float32."""
        rows = self.rows[bags.ids].astype(np.float32)
        if self.scales is not None:
            rows *= self.scales[bags.ids, None]
        if (bags.lengths == 1).all():
            return torch.from_numpy(rows)
        of_row = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
        return torch.zeros(len(bags.lengths), rows.shape[1]).index_add_(0, torch.from_numpy(of_row), torch.from_numpy(rows))


@dataclass(frozen=True)
class Model:
    """An exported model. Any thread may predict, several at a time.

    Attributes:
        info: the content of ``manifest.json``.
        dense_part: maps dense features, pooled embeddings and, with histories, those of tokens, history lengths and, if the
            model reads them, times of tokens to probabilities, as of :meth:`score`.
        tables: of each sparse and token feature, in their order.
        rows: turns rows into :class:`Inputs`.
    """

    info: dict[str, Any]
    dense_part: Callable[..., torch.Tensor]
    tables: tuple[Table, ...]
    rows: Rows

    @property
    def labels(self) -> list[str]:
        """The names of the labels, in the order of the predictions."""
        return list(self.info["labels"])

    def predict(self, rows: Any) -> np.ndarray:
        """Return the probability of each row: [n] float32; [n, L] of L > 1 labels, in the order of :attr:`labels`.

        Args:
            rows: a list of dicts, one value for each feature; or a column for each: an Arrow table, a data frame of pandas
                or polars, or a dict of arrays and lists.

        Raises:
            InputError: if a row has unknown features, lacks one, or holds a value that cannot be used.
        """
        return self.score(self.encode(rows))

    def encode(self, rows: Any) -> Inputs:
        """Return the inputs for :meth:`score`; arguments and errors are those of :meth:`predict`."""
        return self.rows.encode(rows_of(rows))

    @torch.no_grad()
    def score(self, inputs: Inputs) -> np.ndarray:
        """Return the probability of each row, as :meth:`predict` does."""
        if not len(inputs):
            return np.zeros((0, len(self.labels)) if len(self.labels) > 1 else 0, np.float32)
        pooled = [table.pool(bags) for table, bags in zip(self.tables, inputs.bags, strict=True)]
        sparse = len(self.info["sparse_features"])
        arguments = [torch.from_numpy(inputs.dense), torch.cat(pooled[:sparse], dim=1)]
        if self.info["token_features"]:
            arguments += [torch.cat(pooled[sparse:], dim=1), torch.from_numpy(inputs.history_lengths)]
        if inputs.token_times is not None:
            arguments.append(torch.from_numpy(inputs.token_times))
        return self.dense_part(*arguments).numpy()


def load(folder: str | Path) -> Model:
    """Load the model in a folder that export.py wrote; tables are memory-mapped.

    Raises:
        ValueError: if it is of another format version, or damaged.
        FileNotFoundError: if a file is missing.
    """
    folder = Path(folder)
    check_files(folder)
    info = read_manifest(folder)
    with _told_as_damage(folder / "tables.safetensors"):
        arrays = read_safetensors(folder / "tables.safetensors")
    with _told_as_damage(folder / "manifest.json"):
        names = [feature["name"] for feature in info["sparse_features"] + info["token_features"]]
        tables = tuple(Table(arrays[f"{name}.rows"], arrays.get(f"{name}.scales")) for name in names)
        rows = read_rows(folder, info)
    with _told_as_damage(folder / "dense.pt2"):
        dense_part = torch.export.load(folder / "dense.pt2").module()
    return Model(info, dense_part, tables, rows)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json``, which says what the model takes.

    Raises:
        ValueError: if the file is damaged or of another version.
        FileNotFoundError: if it is missing.
    """
    path = folder / "manifest.json"
    _check_presence(path)
    with _refused_as_value_error():
        info = read_json(path, DataError, _EXPORT_AGAIN)
    if info.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: format version {info.get('format_version')}, this loader reads {FORMAT_VERSION}; {_EXPORT_AGAIN}"
        )
    return info


def check_files(folder: Path) -> None:
    """Read all files and compare them with ``checksums.json``; a model of an earlier release has none, which is logged.

    Raises:
        ValueError: if a file is not as export.py wrote it.
        FileNotFoundError: if one is missing.
    """
    with _refused_as_value_error():
        checksums = Checksums.load(folder, DataError, _EXPORT_AGAIN)
        for name in _FILES if checksums is None else checksums.files:
            _check_presence(folder / name)
        if checksums is None:
            logger.warning("%s: exported by an earlier release, without checksums: damage of its bytes cannot be seen", folder)
            return
        lacking = _FILES - checksums.files.keys()
        if lacking:
            raise DataError(f"{folder / CHECKSUMS_FILE}: damaged: lacks {', '.join(sorted(lacking))}; {_EXPORT_AGAIN}")
        for name in checksums.files:
            checksums.check(folder, name, DataError, _EXPORT_AGAIN)


def _check_presence(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; {_EXPORT_AGAIN}")


@contextmanager
def _refused_as_value_error() -> Iterator[None]:
    """Raise errors of this package as ValueError: users of an exported model know Python's errors alone."""
    try:
        yield
    except DataError as error:
        raise ValueError(str(error)) from None


@contextmanager
def _told_as_damage(path: Path) -> Iterator[None]:
    """Raise whatever a damaged file leads to as ValueError that names it; messages that say what to do stay as they are."""
    try:
        yield
    except Exception as error:
        if str(error).endswith(" again"):
            raise
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}); {_EXPORT_AGAIN}") from error


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Map the tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, and the data.

    Own code, since a fresh environment need not have the safetensors package, which would also copy the tables into memory.

    Raises:
        ValueError: if the file is cut off.
    """
    data = np.memmap(path, np.uint8, "r")
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:begin]))
    header.pop("__metadata__", None)
    if begin + max(entry["data_offsets"][1] for entry in header.values()) != len(data):
        raise ValueError(f"{path}: cut off or damaged; export the model again")
    arrays = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        arrays[name] = data[begin + first : begin + end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def read_rows(folder: Path, info: Mapping[str, Any]) -> Rows:
    """Return the object that turns rows into inputs of the model that ``info`` describes."""
    path = folder / "transformation"
    if not path.is_dir():
        return PreparedRows(info)
    trained_with = info.get("data", {}).get("transformation")
    with _refused_as_value_error():
        found = Transformation.digest_of(path)
    if trained_with is not None and trained_with != found:
        raise ValueError(f"{path}: is another transformation than the model was trained with; export the model again")
    return TableRows(info, path)


def rows_of(table: Any) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table as dicts; return anything that :meth:`Model.predict` does not take as a table as it is.

    Raises:
        InputError: if columns differ in their length, two have one name, or one is no column.
    """
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "collect_schema"):
        raise InputError("a LazyFrame; allowed: what its collect() returns")
    if hasattr(table, "to_pylist"):  # Arrow; without pandas it has no Python values of nanoseconds
        _check_names_of(table.schema.names)
        columns = {name: _values_of(column) for name, column in zip(table.schema.names, table.columns, strict=True)}
    elif hasattr(table, "to_dict"):  # pandas
        _check_names_of(list(table.columns))
        columns = {name: table[name].tolist() for name in table.columns}
    elif isinstance(table, Mapping):
        columns = {name: _listed(name, column) for name, column in table.items()}
    elif not hasattr(table, "__len__"):
        raise InputError(f"{_shown(table)}; allowed: a list of dicts, an Arrow table, a data frame, or a dict of columns")
    else:
        return table  # type: ignore[no-any-return]
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"columns of different lengths: {_shown(lengths)}; allowed: a value for each row in every column")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_names_of(columns: Sequence[Any]) -> None:
    for name in columns:
        if columns.count(name) > 1:
            raise InputError(f"two columns are named {name}; allowed: one of each name")


def _values_of(column: Any) -> list[Any]:
    """Return the values of an Arrow column, which without pandas has no Python values of nanoseconds."""
    return (column.cast("timestamp[us]", safe=False) if str(column.type).startswith("timestamp[ns") else column).to_pylist()


def _listed(name: Any, column: Any) -> list[Any]:
    if hasattr(column, "to_pylist"):
        return _values_of(column)
    if isinstance(column, np.ndarray) and column.dtype.kind == "M":
        return column.astype("datetime64[us]").tolist()  # a list of nanoseconds would have no times of Python
    if isinstance(column, str | bytes) or not hasattr(column, "__len__"):
        raise InputError(f"column {name}: {_shown(column)}; allowed: arrays or lists; a single row stands in a list: [row]")
    return list(column)


@dataclass(frozen=True)
class Values:
    """Reads the values of a feature, and makes ids of them.

    Attributes:
        read: returns the value that becomes an id; raises ValueError if there is none.
        allowed: what it takes, in words.
        rows: of the table; ids are taken modulo them, as in training.
        encoding: of the column of the table that the model was trained on; None where values are ids.
    """

    read: Callable[[Any], int | str | None]
    allowed: str
    rows: int
    is_list: bool = False
    encoding: IdEncoding | None = None

    def listed(self, value: Any) -> list[Any] | None:
        """Return the values of a row of a list feature; None if it is no list."""
        if self.encoding is not None:
            if self.encoding.column.separator and isinstance(value, str | bytes):
                text = str(self.encoding.trimmed(value.decode() if isinstance(value, bytes) else value))
                return [None] if text in self.encoding.nulls.texts else list(text.split(self.encoding.column.separator))
            if value is None:
                return [None]
        return list(value) if isinstance(value, list | tuple | np.ndarray) else None


def _whole_in(allowed: range, value: Any) -> int:
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool | np.bool_ | np.ndarray)
    if not is_whole or operator.index(value) not in allowed:
        raise ValueError(value)
    return operator.index(value)


def _ids_as_they_are(limit: int, rows: int, is_list: bool = False) -> Values:
    return Values(partial(_whole_in, range(limit)), f"whole numbers from 0 to {limit - 1}", rows, is_list)


def _labels(rows: int) -> Values:
    """Return what reads a label of a past interaction, in the types that a column of labels may have."""
    ids = _ids_as_they_are(2, rows)
    return replace(ids, read=lambda value: ids.read(whole_of(value)))


def _categories(encoding: IdEncoding, limit: int, rows: int) -> Values:
    """Return what reads values of a column of the table that the model was trained on, with ids below ``limit``.

    Raises:
        ValueError: if the encoding gives larger ids.
    """
    column = encoding.column
    if encoding.rows > limit:
        raise ValueError(f"column {column.name} has {encoding.rows} ids, the model {limit}; export the model again")
    allowed = "text, or null" if column.values is Kind.text else "whole numbers of 64 bits, or null"
    return Values(encoding.read, allowed, rows, column.is_list, encoding)


def _finite(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(value)
    return number_of(value) if value == value else math.inf


@dataclass(frozen=True)
class Number:
    """Reads a dense feature; by default one of a prepared data set, finite numbers as they are.

    Attributes:
        read: returns the number; raises ValueError if it is none.
        apply: maps numbers [n] to the model's inputs, [n].
    """

    name: str
    read: Callable[[Any], float] = _finite
    allowed: str = "finite numbers"
    apply: Callable[[np.ndarray], np.ndarray] = np.asarray


@dataclass(frozen=True)
class Time:
    """Reads when a past interaction, or the row itself, happened.

    Attributes:
        read: returns the microseconds since 1970; raises ValueError if the value is no time.
    """

    name: str
    read: Callable[[Any], int]
    allowed: str


class Rows:
    """Turns rows into inputs.

    Attributes:
        numbers: dense features that rows have.
        categories: sparse features, by name, in the model's order.
        tokens: token features, by name, in the model's order.
        history: the name of a row's past interactions: ``HISTORY``, with ``_`` before it if a feature has that name.
        time: of each row and of its past interactions; None where neither has one.
        columns: names by which messages call token features that are not called as in rows.

    Args:
        of_rows: names that each row has beside numbers, categories and time.
        of_past: names that each past interaction has beside the time.
    """

    def __init__(
        self,
        info: Mapping[str, Any],
        numbers: list[Number],
        categories: dict[str, Values],
        tokens: dict[str, Values],
        of_rows: Iterable[str],
        of_past: Iterable[str],
        time: Time | None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.numbers, self.categories, self.tokens, self.time = numbers, categories, tokens, time
        self.columns = columns or {}
        self._reads_times = bool(info.get("reads_times"))
        of_time = set() if time is None else {time.name}
        self.history_length: int = info["history_length"]
        self.history_only = {feature["name"] for feature in info["token_features"] if feature["history_only"]}
        self._names = {number.name for number in numbers} | categories.keys() | set(of_rows) | of_time
        self._names_of_past = set(of_past) | of_time
        self.history = _free_name(HISTORY, self._names)

    def features(self) -> set[str]:
        """Return the names that each row has."""
        return self._names | ({self.history} if self.tokens else set())

    def interactions(self, row: Mapping[str, Any], where: str) -> tuple[list[Mapping[str, Any]], list[int]]:
        """Return the values of token features: of the last ``history_length`` past interactions, then of the candidate; and
        the seconds of each, none where rows have no time."""
        history = _history(row, self.history, where)
        wheres = [f"{where}, {self.history}[{at}]" for at in range(len(history))]
        check_names(history, self._names_of_past, wheres)
        times = [] if self.time is None else self._times_of(self.time, history, row, [*wheres, where])
        last = slice(-self.history_length - 1, None)
        in_order = self._in_order(history, times[:-1], wheres)
        return self._token_values([*in_order, row], times)[last], [time // MICROSECONDS for time in times[last]]

    def _in_order(
        self, history: list[Mapping[str, Any]], times: Sequence[int], wheres: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        """Return past interactions with those of equal times in the order in which the model was trained on them."""
        return history

    def _token_values(self, interactions: list[Mapping[str, Any]], times: Sequence[int]) -> list[Mapping[str, Any]]:
        return interactions

    def _times_of(
        self, time: Time, history: Sequence[Mapping[str, Any]], row: Mapping[str, Any], wheres: Sequence[str]
    ) -> list[int]:
        """Return the times of past interactions, and of the row, which is later than any of them: microseconds."""
        times = [_value(time, time.name, each[time.name], at) for each, at in zip([*history, row], wheres, strict=True)]
        for at, (before, after) in enumerate(pairwise(times)):
            if before > after or (at == len(history) - 1 and before == after):
                allowed = f"times in ascending order, before the row's own, {row[time.name]!r}"
                _refuse(wheres[at], time.name, history[at][time.name], allowed)
        return times

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Inputs:
        """Return the inputs of rows; raise InputError for a row that cannot be used."""
        wheres = [f"row {number}" for number in range(len(rows))]
        check_names(rows, self.features(), wheres)
        dense = self._dense(rows, wheres)
        bags = [_read(values, name, [row[name] for row in rows], wheres) for name, values in self.categories.items()]
        found_in = [self.interactions(row, where) for row, where in zip(rows, wheres, strict=True)] if self.tokens else []
        histories = [tokens for tokens, _ in found_in]
        bags += [self._token_bags(name, values, histories) for name, values in self.tokens.items()]
        lengths = [len(history) - 1 for history in histories] or [0] * len(rows)
        ids = _ids([*self.categories.values(), *self.tokens.values()], [values for values, _ in bags])
        found = tuple(Bags(each, lengths) for each, (_, lengths) in zip(ids, bags, strict=True))
        times = self._times([seconds for _, seconds in found_in]) if self._reads_times else None
        return Inputs(dense, found, np.array(lengths, np.int64), times)

    def _times(self, seconds: Sequence[list[int]]) -> np.ndarray:
        """Return the times of all tokens, [n, history length + 1] int64, from the seconds of those that are no padding."""
        tokens = self.history_length + 1
        padded = [[*of_row, *of_row[-1:] * (tokens - len(of_row))] for of_row in seconds]
        return np.array(padded, np.int64).reshape(-1, tokens)

    def _dense(self, rows: Sequence[Mapping[str, Any]], wheres: Sequence[str]) -> np.ndarray:
        dense = np.ones((len(rows), max(len(self.numbers), 1)), np.float32)  # without numbers, the constant feature
        values = np.empty((len(rows), len(self.numbers)))
        with np.errstate(over="ignore"):
            for column, number in enumerate(self.numbers):
                of_rows = zip(rows, wheres, strict=True)
                values[:, column] = [_value(number, number.name, row[number.name], where) for row, where in of_rows]
                dense[:, column] = number.apply(values[:, column])
        wrong = np.argwhere(~np.isfinite(dense[:, : len(self.numbers)]) | (np.abs(values) > LARGEST_FLOAT32))
        if wrong.size:
            row, column = wrong[0].tolist()
            name = self.numbers[column].name
            _refuse(wheres[row], name, rows[row][name], "finite numbers of float32")
        return dense

    def _token_bags(
        self, name: str, values: Values, histories: Sequence[Sequence[Mapping[str, Any]]]
    ) -> tuple[list[Any], np.ndarray]:
        present, tokens, wheres = [], [], []
        for number, history in enumerate(histories):
            for position, token in enumerate(history):
                is_candidate = position == len(history) - 1
                if not (is_candidate and name in self.history_only):
                    present.append(number * (self.history_length + 1) + position)
                    tokens.append(token[name])
                    wheres.append(f"row {number}" if is_candidate else f"row {number}, {self.history}[{position}]")
        elements, of_present = _read(values, self.columns.get(name, name), tokens, wheres)
        lengths = np.zeros(len(histories) * (self.history_length + 1), np.int64)
        lengths[present] = of_present
        return elements, lengths


class PreparedRows(Rows):
    """Takes rows with the features of a prepared data set: numbers and ids.

    For a model that reads histories, a row has the token features of its candidate, and in ``history`` those of each past
    interaction; if the model reads times, both have ``TIME``, too, with ``_`` before it if a feature has that name.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        categories, tokens = (
            {feature["name"]: _ids_as_they_are(feature["ids"], feature["rows"], feature["jagged"]) for feature in info[kind]}
            for kind in ("sparse_features", "token_features")
        )
        of_candidate = [feature["name"] for feature in info["token_features"] if not feature["history_only"]]
        numbers = [Number(name) for name in info["dense_features"]]
        time = None
        if info.get("reads_times"):
            name = _free_name(TIME, {number.name for number in numbers} | categories.keys() | tokens.keys())
            allowed = "seconds since 1970, signed whole numbers of 64 bits"
            time = Time(name, lambda value: _whole_in(_INT64, value) * MICROSECONDS, allowed)
        super().__init__(info, numbers, categories, tokens, of_candidate, tokens, time)


class TableRows(Rows):
    """Takes rows with the columns of the table that the model was trained on.

    For a model that reads histories, a row has the column of times, and in ``history`` each past interaction has it too, the
    label (the first of several), and the columns that are tokens.
    """

    def __init__(self, info: Mapping[str, Any], folder: Path) -> None:
        with _refused_as_value_error():
            made_by = Transformation.load(folder)
        tables = {feature["name"]: feature for feature in info["sparse_features"] + info["token_features"]}
        encodings = {encoding.column.name: encoding for encoding in made_by.sparse}

        def categories(column: str, table: str) -> Values:
            return _categories(encodings[column], tables[table]["ids"], tables[table]["rows"])

        tokens: dict[str, Values] = {}
        self.label, time = made_by.labels[0], None
        self.items: tuple[str, ...] = ()
        if info["token_features"] and made_by.history is not None:
            self.items = made_by.history.items
            time = _time_of(made_by.history.time, made_by, bool(info.get("reads_times")))
            tokens = {token_name(name): categories(name, token_name(name)) for name in self.items}
            tokens["token_label"] = _labels(tables["token_label"]["rows"])
            tokens["token_gap"] = _ids_as_they_are(_GAP_ROWS, tables["token_gap"]["rows"])

        def read(value: Any) -> float:
            return number_of(value, made_by.nulls)

        numbers = [Number(feature.name, read, "numbers, or null", feature.apply) for feature in made_by.dense]
        of_columns = {name: categories(name, name) for name in encodings}
        columns = {**{token_name(name): name for name in self.items}, "token_label": self.label}
        super().__init__(info, numbers, of_columns, tokens, [], [self.label, *self.items], time, columns)

    def _in_order(
        self, history: list[Mapping[str, Any]], times: Sequence[int], wheres: Sequence[str]
    ) -> list[Mapping[str, Any]]:
        name = token_name(self.items[0]) if self.items else ""
        values = self.tokens.get(name)
        if values is None or values.encoding is None or len(set(times)) == len(times):
            return history
        read = [_value(values, self.items[0], each[self.items[0]], where) for each, where in zip(history, wheres, strict=True)]
        keys = keys_of_values(read)
        return [history[at] for at in sorted(range(len(history)), key=lambda at: (times[at], keys[at]))]

    def _token_values(self, interactions: list[Mapping[str, Any]], times: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self._token(each, gap) for each, gap in zip(interactions, _gaps(times), strict=True)]

    def _token(self, interaction: Mapping[str, Any], gap: int) -> Mapping[str, Any]:
        of_items = {token_name(name): interaction[name] for name in self.items}
        return {**of_items, "token_label": interaction.get(self.label), "token_gap": gap}


def _time_of(column: str, made_by: Transformation, for_model: bool) -> Time:
    """Return what reads times as those of the table are read; for a model, only those that its inputs hold."""

    table = made_by.table_format

    def read(value: Any) -> int:
        microseconds = table.microseconds(value)
        if table.is_of_another_unit(microseconds, made_by.first_time):
            raise ValueError(value)
        if for_model:
            _whole_in(_INT64, microseconds // MICROSECONDS)
        return microseconds

    of_format = f"times up to now as --time-format {table.time} of the table says"
    plain = "times up to now in seconds since 1970, or texts such as 2024-05-31T12:00:00"
    return Time(column, read, of_format if table.time else plain)


def check_names(rows: Iterable[Any], names: Iterable[str], wheres: Sequence[str]) -> None:
    """Raise InputError unless each of ``rows`` is a dict with exactly these names; ``wheres`` name the rows."""
    wanted = set(names)
    for row, where in zip(rows, wheres, strict=True):
        if not isinstance(row, dict):
            raise InputError(f"{where}: {_shown(row)}; allowed: an object with the features {', '.join(sorted(wanted))}")
        if row.keys() != wanted:
            unknown, missing = sorted(map(str, row.keys() - wanted)), sorted(wanted - row.keys())
            if unknown:
                has = ", ".join(sorted(wanted))
                raise InputError(
                    f"{where}: unknown feature {_shown(unknown[0])}={_shown(row.get(unknown[0]))}; the model has: {has}"
                )
            raise InputError(f"{where}: feature {missing[0]} is missing; each row has all features")


def _free_name(name: str, taken: Container[str]) -> str:
    while name in taken:
        name = f"_{name}"
    return name


def _history(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    history = row[name]
    if not isinstance(history, list | tuple | np.ndarray):
        _refuse(where, name, history, "a list of past interactions, oldest first")
    return list(history)


def _read(values: Values, name: str, of_rows: Sequence[Any], wheres: Sequence[str]) -> tuple[list[Any], np.ndarray]:
    """Return the values that become ids, row after row, and their number in each row, [n]."""
    read: list[Any] = []
    lengths = []
    for value, where in zip(of_rows, wheres, strict=True):
        elements = values.listed(value) if values.is_list else [value]
        if elements is None:
            _refuse(where, name, value, f"a list of {values.allowed}")
        read += [_value(values, name, element, where) for element in elements]
        lengths.append(len(elements))
    return read, np.array(lengths, np.int64)


def _value(values: Values | Number | Time, name: str, value: Any, where: str) -> Any:
    try:
        return values.read(value)
    except (ValueError, TypeError):
        _refuse(where, name, value, values.allowed)


def _ids(features: Sequence[Values], read: Sequence[list[Any]]) -> list[np.ndarray]:
    """Return the ids of each feature, [total] int64, for the values that were read."""
    pairs = list(zip(features, read, strict=True))
    encoded = iter(ids_of([(each.encoding, of) for each, of in pairs if each.encoding is not None]))
    return [
        (np.array(of, np.int64) if each.encoding is None else next(encoded)).astype(np.int64) % each.rows for each, of in pairs
    ]


def _gaps(times: Sequence[int]) -> list[int]:
    """Return for each of ascending times, in microseconds, the bucket of its distance to the last earlier one: b for
    [2^(b-1), 2^b) seconds, 0 for none and for less."""
    gaps: list[int] = []
    earlier = None  # the last time that is less than that of the interactions at hand
    for at, time in enumerate(times):
        if at and times[at - 1] < time:
            earlier = times[at - 1]
        seconds = 0 if earlier is None else time // MICROSECONDS - earlier // MICROSECONDS
        gaps.append(min(seconds.bit_length(), _GAP_ROWS - 1))
    return gaps


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _refuse(where: str, name: str, value: Any, allowed: str) -> NoReturn:
    raise InputError(f"{where}, feature {name}: {_shown(value)}; allowed: {allowed}") from None
