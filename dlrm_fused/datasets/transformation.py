"""Makes model inputs of the columns of a table: learned from training rows, saved, and applied to any rows later.

A transformation is a folder with ``transformation.json`` and, for each sparse feature with a vocabulary, the keys of the kept
values, ascending, the id of each key, and the values in order of their ids: data/README.md lists the files.

Ids are found by a value's *key*, 64 bits that are different for different whole numbers, and for different texts as good as
surely: among 10 million texts two have the same key with a probability of 3 in a million.

This module and those that it imports need NumPy alone, so that a server can apply a transformation without the libraries that
learned it: exported models carry them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.checksums import Checksums
from dlrm_fused.datasets.hashing import combine, combine_all, derive_key, split_mix
from dlrm_fused.datasets.table_format import PLAIN, TableFormat
from dlrm_fused.datasets.values import NONE, NullMarkers, text_of, whole_of
from dlrm_fused.errors import DataError

PREPARE_AGAIN = "prepare the set again"
TRANSFORMATION = "transformation"  # the folder's name in a prepared set
TRANSFORMATION_FILE = "transformation.json"
FORMAT_VERSION = 3  # 2 has no null markers, 1 one label and no weights; still written for such tables

MISSING = 0
UNSEEN = 1  # of a vocabulary: too rare in training, or not there at all
FIRST_KEPT = 2
FIRST_HASHED = 1
CONSTANT = "constant"  # a dense feature that is always 1
LABEL = "label"  # what the only label of a prepared set is called

_INTEGER_KEY = derive_key(1)
# Texts up to which Python's arithmetic takes less time than calls of NumPy for each word.
_FEW_TEXTS = 32
_TEXT_KEY = derive_key(2)
_BEYOND_KEY = derive_key(5)  # of whole numbers beyond int64

Int = NDArray[np.int64]


class Values(Enum):
    """Kinds of values of a sparse column."""

    integer = "integer"
    text = "text"


class DenseKind(Enum):
    """Transformations of a dense value x; a missing one becomes 0."""

    standardize = "standardize"  # (x - mean) / deviation
    log = "log"  # the same of sign(x) log(1 + |x|)
    quantile = "quantile"  # the share of training rows below x, from -1 to 1


@dataclass(frozen=True)
class DenseTransform:
    """
    Attributes:
        mean, deviation: of known values in training rows, after the logarithm; not used for quantiles.
        points, positions: ascending values and where they lie between -1 and 1; for quantiles only.
    """

    name: str
    kind: DenseKind
    mean: float = 0.0
    deviation: float = 1.0
    points: tuple[float, ...] = ()
    positions: tuple[float, ...] = ()

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Inputs of ``values`` [n], of which NaN is a missing one: [n]."""
        if self.kind is DenseKind.quantile:
            scaled = np.interp(values, self.points, self.positions)
        else:
            scaled = (signed_log(values) if self.kind is DenseKind.log else values) - self.mean
            scaled /= self.deviation
        return np.where(np.isnan(values), 0, scaled).astype(np.float32)


def signed_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """sign(x) log(1 + |x|)."""
    return np.copysign(np.log1p(np.abs(values)), values)


@dataclass(frozen=True)
class SparseColumn:
    """A column whose values become ids.

    Attributes:
        separator: cuts a text into the values of its list; empty where the column holds lists.
    """

    name: str
    values: Values
    is_list: bool = False
    separator: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """The values that have an id of their own.

    Attributes:
        keys: [V], ascending.
        ids: [V] int32, of each key.
        values: [V] int64 or uint64, or [bytes] uint8 for texts, in order of their ids.
        offsets: [V + 1] for texts.
    """

    keys: Int
    ids: NDArray[np.int32]
    values: NDArray[Any]
    offsets: Int | None

    @staticmethod
    def of(keys: Int, values: NDArray[Any], offsets: Int | None) -> Vocabulary:
        """Number values in the order in which they are given.

        Args:
            keys: [V], of each value. Should two texts have one key, the earlier one's id is found for both.
        """
        order = np.argsort(keys, kind="stable").astype(np.int32)
        return Vocabulary(keys[order], order + np.int32(FIRST_KEPT), values, offsets)

    def keys_of_values(self) -> Int:
        """Return the key of each value, in order of their ids: [V]."""
        if self.offsets is not None:
            return text_keys(self.values, self.offsets)
        return integer_keys(self.values.view(np.int64), self.values >= 2**63 if self.values.dtype == np.uint64 else None)

    def find(self, keys: Int) -> NDArray[np.int32]:
        """Return the id of each of ``keys`` [n], ``UNSEEN`` where it has none: [n]."""
        if not len(self.keys):
            return np.full(len(keys), UNSEEN, np.int32)
        at = np.searchsorted(self.keys, keys)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == keys, self.ids[at], np.int32(UNSEEN))


@dataclass(frozen=True)
class IdEncoding:
    """Makes ids of the values of a column: by a vocabulary, or by a hash where there is none.

    Attributes:
        rows: ids are in [0, rows).
        nulls: values that are missing ones.
        trims: whether blanks around a text are left out, as they were in the files.
    """

    column: SparseColumn
    rows: int
    vocabulary: Vocabulary | None = None
    nulls: NullMarkers = NONE
    trims: bool = False

    def of_keys(self, keys: Int) -> NDArray[np.int32]:
        """Return the ids of values with these keys ([n]): [n]."""
        if self.vocabulary is not None:
            return self.vocabulary.find(keys)
        buckets = np.uint64(self.rows - FIRST_HASHED)
        return (keys.view(np.uint64) % buckets).astype(np.int32) + np.int32(FIRST_HASHED)

    def read(self, value: object) -> int | str | None:
        """Convert a value of a row to the column's type; None for a missing one.

        Raises:
            ValueError: if the column cannot hold it.
        """
        if self.trims and not self.column.is_list:
            value = self.trimmed(value)
        return (whole_of if self.column.values is Values.integer else text_of)(value, self.nulls)

    def trimmed(self, value: object) -> object:
        """Return a field without the blanks around it, if they are to be left out; other values as they are."""
        if not self.trims or not isinstance(value, str | bytes):
            return value
        return (value.decode() if isinstance(value, bytes) else value).strip()


def ids_of(columns: Sequence[tuple[IdEncoding, Sequence[int | str | None]]]) -> list[NDArray[np.int32]]:
    """Return the ids of the values of each column, as :meth:`IdEncoding.read` returns them: [n] each.

    All values are hashed together, so a row of many columns takes about as long as one of a single column.
    """
    of_wholes, of_texts = _keys_of([value for _, values in columns for value in values])
    found, first_text, first_whole = [], 0, 0
    for encoding, values in columns:
        is_known = [value is not None for value in values]
        count = sum(is_known)
        if encoding.column.values is Values.text:
            keys, first_text = of_texts[first_text : first_text + count], first_text + count
        else:
            keys, first_whole = of_wholes[first_whole : first_whole + count], first_whole + count
        ids = encoding.of_keys(keys)
        if count < len(values):
            of_known, ids = ids, np.full(len(values), MISSING, np.int32)
            ids[is_known] = of_known
        found.append(ids)
    return found


def keys_of_values(values: Sequence[int | str | None]) -> list[int]:
    """Return the key of each value of a column, as :meth:`IdEncoding.read` returns them; 0 for a missing one."""
    known = iter(np.concatenate(_keys_of(values)).tolist())  # whole numbers or texts, not both
    return [0 if value is None else next(known) for value in values]


def _keys_of(values: Sequence[int | str | None]) -> tuple[Int, Int]:
    """Return the keys of whole numbers, and those of texts."""
    wholes = [value for value in values if isinstance(value, int)]
    # Text from JSON may have halves of surrogate pairs.
    texts = [value.encode("utf-8", "surrogatepass") for value in values if isinstance(value, str)]
    bits = np.array([whole & (2**64 - 1) for whole in wholes], np.uint64).view(np.int64)
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    of_texts = text_keys(np.frombuffer(b"".join(texts), np.uint8), offsets) if texts else bits[:0]
    return integer_keys(bits, np.array([whole >= 2**63 for whole in wholes], bool)), of_texts


def integer_keys(values: Int, is_beyond: NDArray[np.bool_] | None = None) -> Int:
    """Keys of whole numbers: [n].

    Args:
        values: [n], signed; of numbers from 2^63 on, their 64 bits.
        is_beyond: [n], which are such numbers; None if none is.
    """
    keys = split_mix(_INTEGER_KEY, values)
    if is_beyond is not None and is_beyond.any():
        keys[is_beyond] = split_mix(_BEYOND_KEY, values[is_beyond])
    return keys


def text_keys(data: NDArray[np.uint8], offsets: Int) -> Int:
    """Keys of texts: [n].

    Args:
        offsets: [n + 1], where each begins in ``data``.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    keys = split_mix(_TEXT_KEY, lengths)
    # Eight bytes at a time; the words at the end are filled up with zeros, and the length tells them from zeros in a text.
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    longer = np.flatnonzero(lengths > 0)
    position = 0
    while longer.size > _FEW_TEXTS:
        rest = lengths[longer] - position
        word = words[starts[longer] + position]
        unused_bits = (8 * np.maximum(8 - rest, 0)).astype(np.uint64)
        word = (word << unused_bits) >> unused_bits
        keys[longer] = combine(keys[longer], word.astype(np.uint64).view(np.int64))
        position += 8
        longer = longer[rest > 8]
    for number in longer.tolist():
        text = data[starts[number] + position : offsets[number + 1]].tobytes()
        own_words = np.frombuffer(text + bytes(-len(text) % 8), "<u8")
        keys[number] = combine_all(int(keys[number]), own_words.tolist())
    return keys


@dataclass(frozen=True)
class HistoryColumns:
    """The columns that make the history of a user's past interactions.

    Attributes:
        items: sparse columns that become tokens; the first is the item.
        length: interactions of a history, at most.
    """

    user: str
    time: str
    items: tuple[str, ...]
    length: int


def file_stem(feature: str) -> str:
    """Return a feature's name as its files have it, with %XX for the bytes that the name of a file should not have."""
    return re.sub(r"[^\w.-]|^\.", lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), feature)


def token_name(column: str) -> str:
    """Return the token feature that a column of items becomes."""
    return f"token_{column}"


@dataclass(frozen=True)
class Transformation:
    """
    Attributes:
        labels: the columns of labels; histories tell the first.
        sparse: in the order of the prepared set's features.
        history: None without token features.
        sample_weight: the column of what each row counts; empty without.
        table_format: how the files were written; others are read likewise.
        nulls: values of dense and sparse columns that are missing ones; the encodings have them, too.
        first_time: of the table that it was learned from, microseconds since 1970; None if rows were not split by times.
        digest: of all that it does, by which a model knows the transformation of its training. One that is applied to other
            rows keeps it; empty until it is saved, and where an earlier release has saved it.
    """

    labels: tuple[str, ...]
    dense: tuple[DenseTransform, ...]
    sparse: tuple[IdEncoding, ...]
    history: HistoryColumns | None = None
    sample_weight: str = ""
    table_format: TableFormat = PLAIN
    nulls: NullMarkers = NONE
    first_time: int | None = None
    digest: str = ""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the prepared set's labels: those of their columns, unless there is one."""
        return self.labels if len(self.labels) > 1 else (LABEL,)

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Names of the dense features; where a table has none there is one, ``CONSTANT``, since models need one."""
        return tuple(feature.name for feature in self.dense) or (CONSTANT,)

    def tables_of(self, encoding: IdEncoding) -> tuple[str, ...]:
        """Return the features, and so the tables, whose ids an encoding gives: the column's, and that of its tokens."""
        name = encoding.column.name
        has_tokens = self.history is not None and name in self.history.items
        return (name, token_name(name)) if has_tokens else (name,)

    def save(self, folder: Path) -> None:
        """Write the folder, which must not exist."""
        folder.mkdir()
        for encoding in self.sparse:
            if encoding.vocabulary is not None:
                for part in ("keys", "ids", "values", "offsets"):
                    array = getattr(encoding.vocabulary, part)
                    if array is not None:
                        np.save(folder / f"{file_stem(encoding.column.name)}.{part}.npy", array)
        is_plain = len(self.labels) == 1 and not self.sample_weight
        labels = {"label": self.labels[0]} if is_plain else {"labels": self.labels, "sample_weight": self.sample_weight}
        content = {
            "format_version": FORMAT_VERSION if self.nulls.markers else 1 if is_plain else 2,
            **labels,
            **({"null_values": self.nulls.markers} if self.nulls.markers else {}),
            "dense": [{**asdict(feature), "kind": feature.kind.name} for feature in self.dense],
            "sparse": [
                {
                    **asdict(encoding.column),
                    "values": encoding.column.values.name,
                    "rows": encoding.rows,
                    "hashed": encoding.vocabulary is None,
                }
                for encoding in self.sparse
            ],
            "history": asdict(self.history) if self.history else None,
            **({"table_format": self.table_format.saved()} if self.table_format.saved() else {}),
        }
        content["digest"] = self.digest or self._digest(content)
        content |= {} if self.first_time is None else {"first_time": self.first_time}
        (folder / TRANSFORMATION_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _digest(self, content: dict[str, Any]) -> str:
        of_values = {**content, "dense": _rounded(content["dense"]), "table_format": self._format_of_values()}
        digest = hashlib.sha256(json.dumps(of_values, sort_keys=True).encode())
        for encoding in self.sparse:
            if encoding.vocabulary is not None:
                for array in (encoding.vocabulary.keys, encoding.vocabulary.ids):
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def _format_of_values(self) -> list[object]:
        """Return the part of the files' format on which hashed texts depend; other texts show in vocabularies."""
        files = self.table_format
        hashes_texts = any(each.vocabulary is None and each.column.values is Values.text for each in self.sparse)
        return [files.encoding, files.quote, files.escape, files.trim] if hashes_texts else []

    @staticmethod
    def digest_of(folder: Path) -> str:
        """:attr:`digest` of what :meth:`save` has written, without reading vocabularies.

        Raises:
            DataError: if ``transformation.json`` is missing or damaged.
        """
        path = folder / TRANSFORMATION_FILE
        try:
            return str(json.loads(path.read_text(encoding="utf-8")).get("digest", ""))
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: damaged ({type(error).__name__}: {error}); prepare the set again") from None

    @staticmethod
    def load(folder: Path) -> Transformation:
        """Read what :meth:`save` has written; vocabularies are memory-mapped.

        Raises:
            DataError: if the folder holds none, or a file is missing, damaged, or of another format version.
        """
        path = folder / TRANSFORMATION_FILE
        _check_bytes(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if version not in range(1, FORMAT_VERSION + 1):
                raise DataError(
                    f"{path}: format version {version}, this release reads 1 to {FORMAT_VERSION}; prepare the set again"
                )
            first_time = content.get("first_time")
            history, nulls = content["history"], NullMarkers(tuple(content.get("null_values", ())))
            table_format = TableFormat.of(content.get("table_format", {}))
            return Transformation(
                (content["label"],) if "label" in content else tuple(content["labels"]),
                tuple(_dense_transform(feature) for feature in content["dense"]),
                tuple(_encoding(folder, feature, nulls, table_format.trim) for feature in content["sparse"]),
                HistoryColumns(**{**history, "items": tuple(history["items"])}) if history else None,
                content.get("sample_weight", ""),
                table_format=table_format,
                nulls=nulls,
                first_time=None if first_time is None else int(first_time),
                digest=content.get("digest", ""),
            )
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: missing; 'data/prepare.py table' writes it beside a set") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder}: damaged ({type(error).__name__}: {error}); prepare the set again") from None


def _check_bytes(folder: Path) -> None:
    """Read the files of a transformation that lies in a prepared set or an exported model with checksums.

    Raises:
        DataError: one is not as it was written.
    """
    checksums = Checksums.load(folder.parent, DataError, PREPARE_AGAIN)
    if checksums is not None:
        for name in checksums.files:
            if name.startswith(f"{folder.name}/"):
                checksums.check(folder.parent, name, DataError, PREPARE_AGAIN)


def _rounded(value: Any) -> Any:
    """Return numbers to six digits: sums of the same values in another order differ in the last ones."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _dense_transform(content: dict[str, Any]) -> DenseTransform:
    lists = {name: tuple(content[name]) for name in ("points", "positions")}
    feature = DenseTransform(**{**content, "kind": DenseKind[content["kind"]], **lists})
    points, positions = np.array(feature.points, np.float64), np.array(feature.positions, np.float64)
    if not (np.isfinite(feature.mean) and 0 < feature.deviation < np.inf):
        raise ValueError(f"{feature.name} has mean {feature.mean} and deviation {feature.deviation}")
    if points.shape != positions.shape or not (np.diff(points) > 0).all() or not (np.abs(positions) <= 1).all():
        raise ValueError(f"{feature.name} has points that do not ascend, or have no positions from -1 to 1")
    if feature.kind is DenseKind.quantile and not points.size:
        raise ValueError(f"{feature.name} has no points")
    return feature


def _encoding(folder: Path, content: dict[str, Any], nulls: NullMarkers, trims: bool) -> IdEncoding:
    column = SparseColumn(content["name"], Values[content["values"]], content["is_list"], content["separator"])
    rows = int(content["rows"])
    if content["hashed"]:
        if rows <= FIRST_HASHED:
            raise ValueError(f"{column.name} is hashed into {rows} rows")
        return IdEncoding(column, rows, None, nulls, trims)

    stem = file_stem(column.name)

    def array(part: str) -> NDArray[Any]:
        path = folder / f"{stem}.{part}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"{path}: damaged or cut off ({error}); prepare the set again") from None

    offsets = array("offsets") if column.values is Values.text else None
    vocabulary = Vocabulary(array("keys"), array("ids"), array("values"), offsets)
    if rows != FIRST_KEPT + len(vocabulary.keys):
        raise ValueError(f"{column.name} has {len(vocabulary.keys)} keys for {rows} rows")
    for part, cause in _faults(vocabulary):
        raise DataError(f"{folder / stem}.{part}.npy: {cause}; prepare the set again")
    return IdEncoding(column, rows, vocabulary, nulls, trims)


def _faults(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Faults of a vocabulary that was read: the part and the reason. All of it is read, and all keys are hashed anew."""
    keys, ids, values, offsets = vocabulary.keys, vocabulary.ids, vocabulary.values, vocabulary.offsets
    dtypes = {"keys": ("int64",), "ids": ("int32",), "values": ("uint8",) if offsets is not None else ("int64", "uint64")}
    for part, allowed in {**dtypes, **({"offsets": ("int64",)} if offsets is not None else {})}.items():
        array = getattr(vocabulary, part)
        if array.ndim != 1 or array.dtype.name not in allowed:
            yield part, f"holds {array.dtype.name} of shape {list(array.shape)}, expected a row of {' or '.join(allowed)}"
            return
    if offsets is not None and (
        len(offsets) != len(keys) + 1 or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) <= 0).any()
    ):
        yield "offsets", f"does not cut the {len(values)} bytes of values into {len(keys)} texts"
        return
    if offsets is None and len(values) != len(keys):
        yield "values", f"holds {len(values)} values for {len(keys)} keys"
        return
    at = np.asarray(ids, np.int64) - FIRST_KEPT
    if len(ids) != len(keys) or ((at < 0) | (at >= len(keys))).any() or (np.bincount(at, minlength=len(keys)) != 1).any():
        yield "ids", f"does not hold each id from {FIRST_KEPT} to {FIRST_KEPT + len(keys) - 1} once"
        return
    # Two texts may have one key, by chance; then their ids ascend, as sorting has left them.
    if ((keys[1:] < keys[:-1]) | ((keys[1:] == keys[:-1]) & (ids[1:] <= ids[:-1]))).any():
        yield "keys", "does not hold keys in ascending order"
    elif (vocabulary.keys_of_values()[at] != keys).any():
        yield "keys", "holds keys of other values than those beside it"
