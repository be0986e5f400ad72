"""Predicts with an exported model; this file and the folder it lies in need torch and NumPy, and nothing else.

    from loader import load
    model = load("model")
    probabilities = model.predict([{"price": 3.5, "item": "a17", "categories": ["x", "y"]}])

The folder: ``manifest.json`` says what the model takes, ``dense.pt2`` is the part after the embeddings, by torch.export,
``tables.safetensors`` holds for each table ``<table>.rows`` ([rows, dim], float32, float16 or int8) and, for int8,
``<table>.scales`` ([rows] float32, by which a row is multiplied). Where ``transformation/`` is there, rows have the columns of
the table that the model was trained on; otherwise ids and numbers as a prepared data set has them.
``checksums.json`` has those of all files, with which they are compared at loading.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

logger = logging.getLogger("dlrm_fused")

FORMAT_VERSION = 2
HISTORY = "history"  # of a row: its past interactions, oldest first

_MISSING, _UNSEEN, _FIRST_HASHED = 0, 1, 1  # ids, as in dlrm_fused/datasets/transformation.py
_GAP_ROWS = 32
_DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8}


class InputError(ValueError):
    """A row cannot be used: the message names the row, the feature and the value."""


class Bags(NamedTuple):
    """Ids of one feature in n bags: ids [total] int64, bag after bag; lengths [n] int64."""

    ids: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Inputs:
    """What n rows are to the model.

    Attributes:
        dense: [n, dense features] float32.
        bags: of each sparse feature n bags; of each token feature n * (history length + 1), those of a row together: its
            history, oldest first, then the candidate, then empty ones.
        history_lengths: [n] int64; zeros for a model that reads no histories.
    """

    dense: np.ndarray
    bags: tuple[Bags, ...]
    history_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.dense)

    @staticmethod
    def join(parts: Sequence[Inputs]) -> Inputs:
        """Those of the rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        bags = zip(*(part.bags for part in parts), strict=True)
        return Inputs(
            np.concatenate([part.dense for part in parts]),
            tuple(Bags(*map(np.concatenate, zip(*of_feature, strict=True))) for of_feature in bags),
            np.concatenate([part.history_lengths for part in parts]),
        )


@dataclass(frozen=True)
class Table:
    """Embeddings: rows [rows, dim]; scales [rows] for int8, otherwise None."""

    rows: np.ndarray
    scales: np.ndarray | None = None

    def pool(self, bags: Bags) -> torch.Tensor:
        """The sum of each bag's rows: [n, dim] float32."""
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
        dense_part: maps dense features, pooled embeddings and, with histories, those of tokens and history lengths to
            probabilities, as of :meth:`score`.
        tables: of each sparse and token feature, in their order.
        rows: turns rows into :class:`Inputs`.
    """

    info: dict[str, Any]
    dense_part: Callable[..., torch.Tensor]
    tables: tuple[Table, ...]
    rows: Rows

    @property
    def labels(self) -> list[str]:
        """What is predicted, in this order."""
        return list(self.info["labels"])

    def predict(self, rows: Any) -> np.ndarray:
        """The probability of each row: [n] float32; [n, L] of L > 1 labels, in the order of :attr:`labels`.

        Args:
            rows: a list of dicts, one value for each feature; or an Arrow table with a column for each.

        Raises:
            InputError: if a row has unknown features, lacks one, or holds a value that cannot be used.
        """
        return self.score(self.encode(rows))

    def encode(self, rows: Any) -> Inputs:
        """What :meth:`score` takes; arguments and errors are those of :meth:`predict`."""
        return self.rows.encode(rows.to_pylist() if hasattr(rows, "to_pylist") else rows)

    @torch.no_grad()
    def score(self, inputs: Inputs) -> np.ndarray:
        """The probability of each row, as :meth:`predict`."""
        if not len(inputs):
            return np.zeros((0, len(self.labels)) if len(self.labels) > 1 else 0, np.float32)
        pooled = [table.pool(bags) for table, bags in zip(self.tables, inputs.bags, strict=True)]
        sparse = len(self.info["sparse_features"])
        arguments = [torch.from_numpy(inputs.dense), torch.cat(pooled[:sparse], dim=1)]
        if self.info["token_features"]:
            arguments += [torch.cat(pooled[sparse:], dim=1), torch.from_numpy(inputs.history_lengths)]
        return self.dense_part(*arguments).numpy()


def load(folder: str | Path) -> Model:
    """The model in a folder that export.py wrote; tables are memory-mapped.

    Raises:
        ValueError: if it is of another format version, or damaged.
        FileNotFoundError: if a file is missing.
    """
    folder = Path(folder)
    check_files(folder)
    info = read_json(folder / "manifest.json")
    if info.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: format version {info.get('format_version')}, this loader reads {FORMAT_VERSION}; export again"
        )
    arrays = read_safetensors(folder / "tables.safetensors")
    names = [feature["name"] for feature in info["sparse_features"] + info["token_features"]]
    tables = tuple(Table(arrays[f"{name}.rows"], arrays.get(f"{name}.scales")) for name in names)
    try:
        dense_part = torch.export.load(folder / "dense.pt2").module()
    except Exception as error:  # a damaged archive may raise anything
        raise ValueError(f"{folder / 'dense.pt2'}: damaged ({type(error).__name__}); export the model again") from error
    return Model(info, dense_part, tables, read_rows(folder, info))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if the file holds none.
        FileNotFoundError: if it is missing.
    """
    try:
        content = json.loads(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); export the model again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: damaged: no object; export the model again")
    return content


def check_files(folder: Path) -> None:
    """Read all files and compare them with ``checksums.json``; a model of an earlier release has none, which is logged.

    Raises:
        ValueError: if a file is not as export.py wrote it.
        FileNotFoundError: if one is missing.
    """
    path = folder / "checksums.json"
    if not path.exists():
        logger.warning("%s: exported by an earlier release, without checksums: damage of its bytes cannot be seen", folder)
        return
    files = read_json(path).get("files")
    if not isinstance(files, dict) or not {"manifest.json", "dense.pt2", "tables.safetensors"} <= files.keys():
        raise ValueError(f"{path}: damaged: lacks files; export the model again")
    for name, known in files.items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: missing, {path.name} names it; export the model again")
        size = (folder / name).stat().st_size
        data = np.memmap(folder / name, np.uint8, "r") if size else np.zeros(0, np.uint8)
        if known != {"bytes": size, "sums": block_sums(data).astype("<u8").tobytes().hex()}:
            raise ValueError(
                f"{folder / name}: damaged: its bytes are not those that were written, whose checksums are in {path.name}; "
                "export the model again"
            )


def block_sums(data: np.ndarray) -> np.ndarray:
    """The checksum of each block of ``data`` ([bytes] uint8): [blocks] uint64, as dlrm_fused/checksums.py defines it."""
    rows, columns = 128, 256  # of a block of 64-bit words
    multipliers = np.array([_mix((number + 1) * _GAMMA) for number in range(rows + columns)], np.uint64)
    of_rows, of_columns = multipliers[:rows] | np.uint64(1), multipliers[rows:] & ~np.uint64(1)
    block_bytes = 8 * rows * columns

    def block_sum(at: int) -> np.uint64:
        block = data[at : at + block_bytes]
        whole = np.pad(block, (0, block_bytes - len(block))) if len(block) < block_bytes else block
        words = whole.view("<u8").reshape(rows, columns)
        # Arrays of one element, since only arrays wrap without a warning.
        sums = (words.sum(axis=1) * of_rows).sum(keepdims=True) + (words.sum(axis=0) * of_columns).sum(keepdims=True)
        return np.uint64(sums[0])

    with ThreadPoolExecutor() as pool:
        return np.array(list(pool.map(block_sum, range(0, len(data), block_bytes))), np.uint64)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, memory-mapped; the format is 8 bytes, the length of a JSON header, the header, and the data.

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
    """What turns rows into inputs of the model that ``info`` describes."""
    path = folder / "transformation"
    if not path.is_dir():
        return PreparedRows(info)
    return TableRows(info, path)


class Values:
    """The values of a feature, and the ids they become.

    Attributes:
        is_list: whether a row has a list of them.
    """

    allowed: str

    def __init__(self, is_list: bool) -> None:
        self.is_list = is_list

    def listed(self, value: Any) -> list[Any] | None:
        """The values of a row of a list feature; None if it is no list."""
        return list(value) if isinstance(value, list | tuple) else None

    def key(self, value: Any) -> int | None:
        """What :meth:`ids` takes; None if the value cannot be used."""
        raise NotImplementedError

    def ids(self, keys: np.ndarray) -> np.ndarray:
        """[total] int64."""
        raise NotImplementedError


class Ids(Values):
    """Ids themselves, taken modulo the rows of their table as in training."""

    def __init__(self, limit: int, rows: int, is_list: bool) -> None:
        super().__init__(is_list)
        self.allowed = f"whole numbers from 0 to {limit - 1}"
        self._limit, self._rows = limit, rows

    def key(self, value: Any) -> int | None:
        is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < self._limit
        return value if is_id else None

    def ids(self, keys: np.ndarray) -> np.ndarray:
        return keys % self._rows


class Categories(Values):
    """Values of a column of the table that the model was trained on, as dlrm_fused/datasets/transformation.py has them."""

    def __init__(self, folder: Path, column: Mapping[str, Any], rows: int) -> None:
        super().__init__(column["is_list"])
        self.is_text = column["values"] == "text"
        self.allowed = "text, or null" if self.is_text else "whole numbers of 64 bits, or null"
        self._separator, self._hashed_rows, self._rows = column["separator"], column["rows"], rows
        self._known = None if column["hashed"] else np.load(folder / f"{column['name']}.keys.npy", mmap_mode="r")
        self._ids = None if column["hashed"] else np.load(folder / f"{column['name']}.ids.npy", mmap_mode="r")

    def listed(self, value: Any) -> list[Any] | None:
        if self._separator and isinstance(value, str):
            return list(value.split(self._separator))
        return [None] if value is None else super().listed(value)

    def key(self, value: Any) -> int | None:
        if value is None or value == "":
            return 0
        if self.is_text:
            # 0 stands for a missing one: no more likely to be a text's key than any other number of 64 bits.
            return _text_key(value) if isinstance(value, str) else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as pandas writes whole numbers with missing ones
        is_whole = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
        return _signed(_mix((value + 1) * _GAMMA + _INTEGER_KEY)) if is_whole else None

    def ids(self, keys: np.ndarray) -> np.ndarray:
        if self._known is None or self._ids is None:
            ids = (keys.view(np.uint64) % np.uint64(self._hashed_rows - _FIRST_HASHED)).astype(np.int64) + _FIRST_HASHED
        elif len(self._known):
            at = np.searchsorted(self._known, keys)
            at[at == len(self._known)] = 0
            ids = np.where(self._known[at] == keys, self._ids[at], _UNSEEN).astype(np.int64)
        else:
            ids = np.full(len(keys), _UNSEEN)
        return np.where(keys == 0, _MISSING, ids) % self._rows


class Number(NamedTuple):
    """A dense feature: the name, and what becomes of a number in a row. ``allows_missing``: null is NaN then."""

    name: str
    transform: Callable[[np.ndarray], np.ndarray]
    allows_missing: bool


class Rows:
    """Turns rows into inputs.

    Attributes:
        numbers: dense features that rows have.
        categories: sparse features, by name, in the model's order.
        tokens: token features, by name, in the model's order.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.numbers: list[Number] = []
        self.categories: dict[str, Values] = {}
        self.tokens: dict[str, Values] = {}
        self.history_length: int = info["history_length"]
        self.history_only = {feature["name"] for feature in info["token_features"] if feature["history_only"]}

    def features(self) -> set[str]:
        """Names that each row has."""
        raise NotImplementedError

    def interactions(self, row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
        """Values of token features: of the row's history, at most ``history_length`` of them, and then of the candidate."""
        raise NotImplementedError

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Inputs:
        """Raises InputError."""
        wheres = [f"row {number}" for number in range(len(rows))]
        check_names(rows, self.features(), wheres)
        dense = self._dense(rows)
        bags = [_bags(values, name, [row[name] for row in rows], wheres) for name, values in self.categories.items()]
        histories = [self.interactions(row, where) for row, where in zip(rows, wheres, strict=True)] if self.tokens else []
        bags += [self._token_bags(name, values, histories) for name, values in self.tokens.items()]
        lengths = [len(history) - 1 for history in histories] or [0] * len(rows)
        return Inputs(dense, tuple(bags), np.array(lengths, np.int64))

    def _dense(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        dense = np.ones((len(rows), max(len(self.numbers), 1)), np.float32)  # without numbers, the constant feature
        for column, number in enumerate(self.numbers):
            values = np.array([_number(row[number.name], number, at) for at, row in enumerate(rows)], np.float64)
            with np.errstate(over="ignore"):
                dense[:, column] = number.transform(values).astype(np.float32)
            wrong = np.flatnonzero(~np.isfinite(dense[:, column]))
            if wrong.size:
                _refuse(f"row {wrong[0]}", number.name, rows[wrong[0]][number.name], "finite numbers of float32")
        return dense

    def _token_bags(self, name: str, values: Values, histories: Sequence[Sequence[Mapping[str, Any]]]) -> Bags:
        present, tokens, wheres = [], [], []
        for number, history in enumerate(histories):
            for position, token in enumerate(history):
                is_candidate = position == len(history) - 1
                if not (is_candidate and name in self.history_only):
                    present.append(number * (self.history_length + 1) + position)
                    tokens.append(token[name])
                    wheres.append(f"row {number}" if is_candidate else f"row {number}, {HISTORY}[{position}]")
        ids, of_present = _bags(values, name, tokens, wheres)
        lengths = np.zeros(len(histories) * (self.history_length + 1), np.int64)
        lengths[present] = of_present
        return Bags(ids, lengths)


class PreparedRows(Rows):
    """Rows with the features of a prepared data set: numbers and ids.

    For a model that reads histories, a row has the token features of its candidate, and in ``history`` those of each past
    interaction.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        super().__init__(info)
        self.numbers = [Number(name, lambda values: values, False) for name in info["dense_features"]]
        for kind, into in (("sparse_features", self.categories), ("token_features", self.tokens)):
            for feature in info[kind]:
                into[feature["name"]] = Ids(feature["ids"], feature["rows"], feature["jagged"])

    def features(self) -> set[str]:
        names = {number.name for number in self.numbers} | self.categories.keys()
        return names | (self.tokens.keys() - self.history_only) | ({HISTORY} if self.tokens else set())

    def interactions(self, row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
        history = _history(row, where)
        check_names(history, self.tokens.keys(), [f"{where}, {HISTORY}[{at}]" for at in range(len(history))])
        return [*history[-self.history_length :], row]


class TableRows(Rows):
    """Rows with the columns of the table that the model was trained on.

    For a model that reads histories, a row has the column of times, and in ``history`` each past interaction has it too, the
    label (the first of several), and the columns that are tokens.
    """

    def __init__(self, info: Mapping[str, Any], folder: Path) -> None:
        super().__init__(info)
        content = read_json(folder / "transformation.json")
        self.numbers = [Number(feature["name"], _dense_transform(feature), True) for feature in content["dense"]]
        rows = {feature["name"]: feature["rows"] for feature in info["sparse_features"] + info["token_features"]}
        columns = {column["name"]: column for column in content["sparse"]}
        self.categories = {name: Categories(folder, column, rows[name]) for name, column in columns.items()}
        self.label: str = content["label"] if "label" in content else content["labels"][0]
        self.time = ""
        if info["token_features"]:
            self.time, self.items = content["history"]["time"], content["history"]["items"]
            self.tokens = {f"token_{name}": Categories(folder, columns[name], rows[f"token_{name}"]) for name in self.items}
            self.tokens["token_label"] = Ids(2, rows["token_label"], False)
            self.tokens["token_gap"] = Ids(_GAP_ROWS, rows["token_gap"], False)

    def features(self) -> set[str]:
        return (
            {number.name for number in self.numbers} | self.categories.keys() | ({self.time, HISTORY} if self.time else set())
        )

    def interactions(self, row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
        history = _history(row, where)
        wheres = [f"{where}, {HISTORY}[{at}]" for at in range(len(history))]
        check_names(history, {self.time, self.label, *self.items}, wheres)
        past = [_seconds(each[self.time], self.time, at) for each, at in zip(history, wheres, strict=True)]
        now = _seconds(row[self.time], self.time, where)
        for at, (before, after) in enumerate(pairwise([*past, now])):
            if before > after or (at == len(past) - 1 and before == now):
                shown = history[at][self.time]
                _refuse(wheres[at], self.time, shown, f"times in ascending order, before the row's own, {row[self.time]!r}")
        tokens = [self._token(each, gap) for each, gap in zip([*history, row], _gaps([*past, now]), strict=True)]
        return tokens[-self.history_length - 1 :]

    def _token(self, interaction: Mapping[str, Any], gap: int) -> Mapping[str, Any]:
        of_items = {f"token_{name}": interaction[name] for name in self.items}
        return {**of_items, "token_label": interaction.get(self.label), "token_gap": gap}


def check_names(rows: Iterable[Any], names: Iterable[str], wheres: Sequence[str]) -> None:
    """Raises InputError unless each of ``rows`` is a dict with exactly these names; ``wheres`` say which row it is."""
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


def _history(row: Mapping[str, Any], where: str) -> list[Any]:
    history = row[HISTORY]
    if not isinstance(history, list):
        _refuse(where, HISTORY, history, "a list of past interactions, oldest first")
    return history


def _bags(values: Values, name: str, of_rows: Sequence[Any], wheres: Sequence[str]) -> Bags:
    keys: list[int] = []
    lengths = []
    for value, where in zip(of_rows, wheres, strict=True):
        elements = values.listed(value) if values.is_list else [value]
        if elements is None:
            _refuse(where, name, value, f"a list of {values.allowed}")
        for element in elements:
            key = values.key(element)
            if key is None:
                _refuse(where, name, element, values.allowed)
            keys.append(key)
        lengths.append(len(elements))
    return Bags(values.ids(np.array(keys, np.int64)), np.array(lengths, np.int64))


def _number(value: Any, number: Number, row: int) -> float:
    if value is None and number.allows_missing:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        _refuse(f"row {row}", number.name, value, "numbers, or null" if number.allows_missing else "finite numbers")
    return float(value)


def _dense_transform(feature: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """As DenseTransform in dlrm_fused/datasets/transformation.py."""

    def transform(values: np.ndarray) -> np.ndarray:
        if feature["kind"] == "quantile":
            scaled = np.interp(values, feature["points"], feature["positions"])
        else:
            scaled = np.copysign(np.log1p(np.abs(values)), values) if feature["kind"] == "log" else values
            scaled = (scaled - feature["mean"]) / feature["deviation"]
        return np.where(np.isnan(values), 0, scaled)

    return transform


def _seconds(value: Any, name: str, where: str) -> int:
    """Since 1970; times without a zone are UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if not isinstance(value, bool):
            return math.floor(value)
    except (ValueError, TypeError, OverflowError):
        pass
    _refuse(where, name, value, "seconds since 1970, or texts such as 2024-05-31T12:00:00")


def _gaps(seconds: Sequence[int]) -> list[int]:
    """Of ascending times, the bucket of the time since the last earlier one: b for [2^(b-1), 2^b) seconds, 0 for none."""
    gaps: list[int] = []
    earlier = None  # the last time before that of the interactions at hand
    for at, second in enumerate(seconds):
        if at and seconds[at - 1] < second:
            earlier = seconds[at - 1]
        gaps.append(0 if earlier is None else min((second - earlier).bit_length(), _GAP_ROWS - 1))
    return gaps


# Hashes of dlrm_fused/datasets/hashing.py, of one value at a time.
_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z &= _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


_INTEGER_KEY, _TEXT_KEY = _mix(2 * _GAMMA), _mix(3 * _GAMMA)


def _text_key(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    key = _mix((len(data) + 1) * _GAMMA + _TEXT_KEY)
    for begin in range(0, len(data), 8):
        key = _mix(key ^ int.from_bytes(data[begin : begin + 8], "little"))
    return _signed(key)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _refuse(where: str, name: str, value: Any, allowed: str) -> NoReturn:
    raise InputError(f"{where}, feature {name}: {_shown(value)}; allowed: {allowed}")
