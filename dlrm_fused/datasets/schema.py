"""Parts of a data set: its features, and how a prepared set lies on disk.

A prepared set is a folder with ``dataset.json`` (a :class:`DatasetSchema`, the rows of each split, and how it was made),
``checksums.json`` (checksums of the other files, except those that people may change: :mod:`dlrm_fused.checksums`)
and one folder per split (``train``, ``validation``, ``test``) of ``.npy`` files, which are memory-mapped when read.
data/README.md lists them. With token features, each sample has a history of past interactions: a window into those of all
splits, which are stored once, user after user and in order of time, in the folder ``interactions``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm_fused.checksums import Checksums, FileSums
from dlrm_fused.datasets.feature_names import check_names
from dlrm_fused.datasets.transformation import LABEL, PREPARE_AGAIN
from dlrm_fused.errors import DataError

FORMAT_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)  # 1 had no token features, 2 one label and no weights
SCHEMA_FILE = "dataset.json"
INTERACTIONS = "interactions"
# Values that a set of version 2 has implicitly. A set with these is written without them, so that earlier releases read it.
_SINCE_VERSION_3 = {"labels": (LABEL,), "has_weights": False}
# Earlier releases read a set that has these, without them.
_IGNORED_BEFORE = ("has_times", "has_token_times")


@dataclass(frozen=True)
class SparseFeature:
    """A categorical feature; each has an embedding table of its own.

    Attributes:
        name: also the name of its table.
        rows: ids are in [0, rows).
        pooling_factor: average number of ids of a bag: of a sample, or of a token, padding included.
        jagged: whether samples (interactions) differ in their number of ids.
        history_only: of a token feature, that its bag is empty for the candidate, since it tells what happened.
    """

    name: str
    rows: int
    pooling_factor: float = 1.0
    jagged: bool = False
    history_only: bool = False


def labels_shape(labels: Sequence[str]) -> tuple[int, ...]:
    """Return the shape of one sample's labels: [] for one label, else [labels]."""
    return (len(labels),) if len(labels) > 1 else ()


@dataclass(frozen=True)
class DatasetSchema:
    """The features of a data set, and its labels, each in {0, 1}.

    Attributes:
        dense_features: names of the dense features, at least one.
        sparse_features: in the order in which batches hold them.
        token_features: likewise; features of a past interaction, or of the candidate.
        history_length: past interactions of a sample, at most; 0 without token features.
        labels: names of the labels; the one of a prepared set with one label is ``label``, whatever its column was.
        has_weights: whether samples have weights.
        has_times: whether it is known when each sample happened.
        has_token_times: whether it is known when each token happened.
    """

    dense_features: tuple[str, ...]
    sparse_features: tuple[SparseFeature, ...]
    token_features: tuple[SparseFeature, ...] = ()
    history_length: int = 0
    labels: tuple[str, ...] = (LABEL,)
    has_weights: bool = False
    has_times: bool = False
    has_token_times: bool = False

    @property
    def tables(self) -> tuple[SparseFeature, ...]:
        """All features that have an embedding table; their names differ."""
        return self.sparse_features + self.token_features

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether as many samples have as many ids of each feature."""
        return not self.token_features and not any(feature.jagged for feature in self.sparse_features)

    def with_table_rows(self, rows: Sequence[int]) -> DatasetSchema:
        """Return the schema with other numbers of rows, in order of :attr:`tables`."""
        features = tuple(replace(feature, rows=count) for feature, count in zip(self.tables, rows, strict=True))
        split = len(self.sparse_features)
        return replace(self, sparse_features=features[:split], token_features=features[split:])


@dataclass(frozen=True)
class PreparedInfo:
    """The content of ``dataset.json``.

    Attributes:
        samples: rows of each split, by its name; a set need not have all splits.
        origin: how the set was made (source files, options, counts of malformed lines), for people to read.
        interactions: rows of the folder ``interactions``; 0 without token features.
    """

    schema: DatasetSchema
    samples: dict[str, int]
    origin: dict[str, Any] = field(default_factory=dict)
    interactions: int = 0

    def save(self, folder: Path) -> None:
        """Write ``dataset.json`` and the checksums of all files; call it last, since its presence marks a complete set."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        for name in _IGNORED_BEFORE:
            if not content["schema"][name]:
                del content["schema"][name]
        if all(content["schema"][name] == value for name, value in _SINCE_VERSION_3.items()):
            content["format_version"] = 2
            for name in _SINCE_VERSION_3:
                del content["schema"][name]
        temporary = folder / (SCHEMA_FILE + ".partial")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files = {name: FileSums.of(folder / name) for name in _files_below(folder)}
        Checksums({}, {SCHEMA_FILE: FileSums.of(temporary), **files}).save(folder)
        temporary.replace(folder / SCHEMA_FILE)

    @staticmethod
    def load(folder: Path) -> PreparedInfo:
        """Read ``dataset.json``.

        Raises:
            DataError: if the folder holds no complete prepared set, or one of another format version.
        """
        path = folder / SCHEMA_FILE
        checksums = checksums_of(folder)
        if checksums is not None and path.exists():
            checksums.check(folder, SCHEMA_FILE, DataError, PREPARE_AGAIN)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content.pop("format_version")
            schema = content.pop("schema")
            info = PreparedInfo(
                schema=DatasetSchema(
                    dense_features=tuple(schema["dense_features"]),
                    sparse_features=tuple(SparseFeature(**feature) for feature in schema["sparse_features"]),
                    token_features=tuple(SparseFeature(**feature) for feature in schema.get("token_features", ())),
                    history_length=schema.get("history_length", 0),
                    labels=tuple(schema.get("labels", (LABEL,))),
                    has_weights=schema.get("has_weights", False),
                    **{name: schema.get(name, False) for name in _IGNORED_BEFORE},
                ),
                **content,
            )
            reason = _contradiction(info)
        except FileNotFoundError:
            raise DataError(
                f"{folder}: no prepared data set ({SCHEMA_FILE} is missing); make one with data/prepare.py"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: damaged ({type(error).__name__}: {error}); prepare the set again") from None
        if version not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            raise DataError(f"{path}: format version {version}, this release reads {known}; prepare the set again")
        if reason:
            raise DataError(f"{path}: {reason}; prepare the set again")
        names = (*info.schema.dense_features, *(feature.name for feature in info.schema.tables))
        check_names(names, f"{path}: feature", "prepare the set again")
        return info


def checksums_of(folder: Path) -> Checksums | None:
    """Checksums of a prepared set's files; None if an earlier release made it. Raises DataError if they are damaged."""
    return Checksums.load(folder, DataError, PREPARE_AGAIN)


def _files_below(folder: Path) -> list[str]:
    """Return all files in folders of ``folder``; those beside ``dataset.json`` are for people to change."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/**/*") if path.is_file())


def _contradiction(info: PreparedInfo) -> str | None:
    """Return the first contradiction in the content of ``dataset.json``, in words; None if there is none."""
    for split, samples in info.samples.items():
        if not isinstance(samples, int):
            return f"split {split} has {samples!r} samples, expected a whole number"
    if not info.schema.dense_features:
        return "no dense features, expected one or more"
    schema = info.schema
    if not schema.labels or len(set(schema.labels)) < len(schema.labels):
        return f"labels are {', '.join(schema.labels) or 'none'}, expected one or more different names"
    names = [feature.name for feature in schema.tables]
    for feature in schema.tables:
        if names.count(feature.name) > 1:
            return f"two features are named {feature.name}"
        if not isinstance(feature.rows, int) or feature.rows < 1:
            return f"feature {feature.name} has {feature.rows!r} rows, expected 1 or more"
    for name, count in {"history_length": schema.history_length, "interactions": info.interactions}.items():
        if not isinstance(count, int) or (count > 0) != bool(schema.token_features):
            return f"{name} is {count!r}, expected {'1 or more with' if schema.token_features else '0 without'} token features"
    if schema.has_token_times and not schema.token_features:
        return "has_token_times is true, expected false without token features"
    return None if schema.sparse_features else "no sparse features, expected one or more"
