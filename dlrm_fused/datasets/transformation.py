"""How the columns of a table become model inputs: learned from training rows, saved, and applied to any rows later.

A transformation is a folder with ``transformation.json`` and, for each sparse feature with a vocabulary, these files:

=======================  =============  ==================================================================
file                     dtype          content
=======================  =============  ==================================================================
``<name>.keys.npy``      [V] int64      keys of the kept values, ascending
``<name>.ids.npy``       [V] int32      the id of each key
``<name>.values.npy``    [V] int64      whole numbers: the value of id ``FIRST_KEPT + i`` at position i
..                       [bytes] uint8  text: the UTF-8 of all values, one after the other, in order of their ids
``<name>.offsets.npy``   [V + 1] int64  text only: where each value begins
=======================  =============  ==================================================================

Ids are found by a value's *key*, 64 bits that are different for different whole numbers, and for different texts as good as
surely: among 10 million texts two have the same key with a probability of 3 in a million.

This module, and the hashes and errors that it imports, need NumPy alone, so that a server can apply a transformation without
the libraries that learned it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.checksums import Checksums
from dlrm_fused.datasets.hashing import combine, derive_key, split_mix
from dlrm_fused.datasets.schema import LABEL, PREPARE_AGAIN
from dlrm_fused.errors import DataError

TRANSFORMATION = "transformation"  # the folder's name in a prepared set
TRANSFORMATION_FILE = "transformation.json"
FORMAT_VERSION = 2  # 1 has one label and no weights, and is still written for such tables

MISSING = 0
UNSEEN = 1  # of a vocabulary: too rare in training, or not there at all
FIRST_KEPT = 2
FIRST_HASHED = 1
CONSTANT = "constant"  # a dense feature that is always 1

_INTEGER_KEY = derive_key(1)
_TEXT_KEY = derive_key(2)

Int = NDArray[np.int64]


class Values(Enum):
    """What the values of a sparse column are."""

    integer = "integer"
    text = "text"


class DenseKind(Enum):
    """What becomes of a dense value x; a missing one becomes 0."""

    standardize = "standardize"  # (x - mean) / deviation
    log = "log"  # the same of sign(x) log(1 + |x|)
    quantile = "quantile"  # the share of training rows below x, from -1 to 1


@dataclass(frozen=True)
class DenseTransform:
    """
    Attributes:
        name: of the feature and of its column.
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
        is_list: whether a row has a list of values.
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
        values: [V] int64, or [bytes] uint8 for texts, in order of their ids.
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

    def find(self, keys: Int) -> NDArray[np.int32]:
        """The id of each of ``keys`` [n], ``UNSEEN`` where it has none: [n]."""
        if not len(self.keys):
            return np.full(len(keys), UNSEEN, np.int32)
        at = np.searchsorted(self.keys, keys)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == keys, self.ids[at], np.int32(UNSEEN))


@dataclass(frozen=True)
class IdEncoding:
    """How the values of a column become ids: by a vocabulary, or by a hash where there is none.

    Attributes:
        rows: ids are in [0, rows).
    """

    column: SparseColumn
    rows: int
    vocabulary: Vocabulary | None = None

    def of_keys(self, keys: Int) -> NDArray[np.int32]:
        """The ids of values with these keys ([n]): [n]."""
        if self.vocabulary is not None:
            return self.vocabulary.find(keys)
        buckets = np.uint64(self.rows - FIRST_HASHED)
        return (keys.view(np.uint64) % buckets).astype(np.int32) + np.int32(FIRST_HASHED)

    def of_values(self, values: Sequence[int | str | None]) -> NDArray[np.int32]:
        """The ids of n values, None or an empty text for a missing one: [n].

        Raises:
            ValueError: if a value of a column of whole numbers is not one.
        """
        known = [i for i, value in enumerate(values) if value is not None and value != ""]
        ids = np.full(len(values), MISSING, np.int32)
        if self.column.values is Values.integer:
            keys = integer_keys(np.array([int(values[i]) for i in known], np.int64))  # type: ignore[arg-type]
        else:
            texts = [str(values[i]).encode() for i in known]
            offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
            keys = text_keys(np.frombuffer(b"".join(texts), np.uint8), offsets)
        ids[known] = self.of_keys(keys)
        return ids


def integer_keys(values: Int) -> Int:
    """Keys of whole numbers: [n]."""
    return split_mix(_INTEGER_KEY, values)


def text_keys(data: NDArray[np.uint8], offsets: Int) -> Int:
    """Keys of texts: [n].

    Args:
        data: the UTF-8 of all texts.
        offsets: [n + 1], where each begins in ``data``.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    keys = split_mix(_TEXT_KEY, lengths)
    # Eight bytes at a time; the words at the end are filled up with zeros, and the length tells them from zeros in a text.
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    longer = np.flatnonzero(lengths > 0)
    position = 0
    while longer.size:
        rest = lengths[longer] - position
        word = words[starts[longer] + position]
        unused_bits = (8 * np.maximum(8 - rest, 0)).astype(np.uint64)
        word = (word << unused_bits) >> unused_bits
        keys[longer] = combine(keys[longer], word.astype(np.uint64).view(np.int64))
        position += 8
        longer = longer[rest > 8]
    return keys


@dataclass(frozen=True)
class HistoryColumns:
    """What past interactions of a user are made of.

    Attributes:
        user, time: columns.
        items: sparse columns that become tokens; the first is the item.
        length: interactions of a history, at most.
    """

    user: str
    time: str
    items: tuple[str, ...]
    length: int


def token_name(column: str) -> str:
    """The token feature that a column of items becomes."""
    return f"token_{column}"


@dataclass(frozen=True)
class Transformation:
    """
    Attributes:
        labels: the columns of labels; histories tell the first.
        sparse: in the order of the prepared set's features.
        history: None without token features.
        sample_weight: the column of what each row counts; empty without.
    """

    labels: tuple[str, ...]
    dense: tuple[DenseTransform, ...]
    sparse: tuple[IdEncoding, ...]
    history: HistoryColumns | None = None
    sample_weight: str = ""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the prepared set's labels: those of their columns, unless there is one."""
        return self.labels if len(self.labels) > 1 else (LABEL,)

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Names of the dense features; where a table has none there is one, ``CONSTANT``, since models need one."""
        return tuple(feature.name for feature in self.dense) or (CONSTANT,)

    def tables_of(self, encoding: IdEncoding) -> tuple[str, ...]:
        """Names of the features, and so of the tables, whose ids an encoding gives: the column's, and that of its tokens."""
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
                        np.save(folder / f"{encoding.column.name}.{part}.npy", array)
        is_plain = len(self.labels) == 1 and not self.sample_weight
        labels = {"label": self.labels[0]} if is_plain else {"labels": self.labels, "sample_weight": self.sample_weight}
        content = {
            "format_version": 1 if is_plain else FORMAT_VERSION,
            **labels,
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
        }
        (folder / TRANSFORMATION_FILE).write_text(json.dumps(content, indent=2) + "\n")

    @staticmethod
    def load(folder: Path) -> Transformation:
        """Read what :meth:`save` has written; vocabularies are memory-mapped.

        Raises:
            DataError: if the folder holds none, or a file is missing, damaged, or of another format version.
        """
        path = folder / TRANSFORMATION_FILE
        _check_bytes(folder)
        try:
            content = json.loads(path.read_text())
            version = content["format_version"]
            if version not in (1, FORMAT_VERSION):
                raise DataError(
                    f"{path}: format version {version}, this release reads 1 and {FORMAT_VERSION}; prepare the set again"
                )
            history = content["history"]
            return Transformation(
                (content["label"],) if version == 1 else tuple(content["labels"]),
                tuple(_dense_transform(feature) for feature in content["dense"]),
                tuple(_encoding(folder, feature) for feature in content["sparse"]),
                HistoryColumns(**{**history, "items": tuple(history["items"])}) if history else None,
                content.get("sample_weight", ""),
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


def _dense_transform(content: dict[str, Any]) -> DenseTransform:
    lists = {name: tuple(content[name]) for name in ("points", "positions")}
    return DenseTransform(**{**content, "kind": DenseKind[content["kind"]], **lists})


def _encoding(folder: Path, content: dict[str, Any]) -> IdEncoding:
    column = SparseColumn(content["name"], Values[content["values"]], content["is_list"], content["separator"])
    if content["hashed"]:
        return IdEncoding(column, content["rows"])

    def array(part: str) -> NDArray[Any]:
        return np.load(folder / f"{column.name}.{part}.npy", mmap_mode="r", allow_pickle=False)

    offsets = array("offsets") if column.values is Values.text else None
    vocabulary = Vocabulary(array("keys"), array("ids"), array("values"), offsets)
    if content["rows"] != FIRST_KEPT + len(vocabulary.keys):
        raise ValueError(f"{column.name} has {len(vocabulary.keys)} keys for {content['rows']} rows")
    return IdEncoding(column, content["rows"], vocabulary)
