"""What a data set consists of: its features, and how a prepared set lies on disk.

A prepared set is a folder with ``dataset.json`` (a :class:`DatasetSchema`, the rows of each split, and how it was made)
and one folder per split (``train``, ``validation``, ``test``) of ``.npy`` files, all memory-mapped when read:

===========================  ==================  ==========================================================
file                         shape, dtype        content
===========================  ==================  ==========================================================
``labels.npy``               [rows] uint8        0 or 1
``dense.npy``                [rows, D] float32   dense features, already transformed
``single.npy``               [rows, S] int32     ids of the features with exactly one id a sample, in schema order
``<feature>.values.npy``     [total] int32       ids of a jagged feature, sample after sample
``<feature>.offsets.npy``    [rows + 1] int64    where each sample's ids begin in ``values``
===========================  ==================  ==========================================================
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlrm_fused.errors import DataError

FORMAT_VERSION = 1
SCHEMA_FILE = "dataset.json"


@dataclass(frozen=True)
class SparseFeature:
    """A categorical feature; each has an embedding table of its own.

    Attributes:
        name: also the name of its table.
        rows: ids are in [0, rows).
        pooling_factor: average number of ids a sample.
        jagged: whether samples differ in their number of ids.
    """

    name: str
    rows: int
    pooling_factor: float = 1.0
    jagged: bool = False


@dataclass(frozen=True)
class DatasetSchema:
    """The features of a data set; every sample has a label in {0, 1}.

    Attributes:
        dense_features: names of the dense features, at least one.
        sparse_features: in the order in which batches hold them.
    """

    dense_features: tuple[str, ...]
    sparse_features: tuple[SparseFeature, ...]


@dataclass(frozen=True)
class PreparedInfo:
    """The content of ``dataset.json``.

    Attributes:
        samples: rows of each split, by its name.
        origin: how the set was made (source files, options, counts of malformed lines), for people to read.
    """

    schema: DatasetSchema
    samples: dict[str, int]
    origin: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write ``dataset.json``; call it last, since its presence marks a complete set."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        temporary = folder / (SCHEMA_FILE + ".partial")
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(folder / SCHEMA_FILE)

    @staticmethod
    def load(folder: Path) -> PreparedInfo:
        """Read ``dataset.json``.

        Raises:
            DataError: if the folder holds no complete prepared set, or one of another format version.
        """
        path = folder / SCHEMA_FILE
        try:
            content = json.loads(path.read_text())
            version = content.pop("format_version")
            schema = content.pop("schema")
            info = PreparedInfo(
                schema=DatasetSchema(
                    dense_features=tuple(schema["dense_features"]),
                    sparse_features=tuple(SparseFeature(**feature) for feature in schema["sparse_features"]),
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
        if version != FORMAT_VERSION:
            raise DataError(f"{path}: format version {version}, this release reads {FORMAT_VERSION}; prepare the set again")
        if reason:
            raise DataError(f"{path}: {reason}; prepare the set again")
        return info


def _contradiction(info: PreparedInfo) -> str | None:
    """What cannot be about the content of ``dataset.json``."""
    for split, samples in info.samples.items():
        if not isinstance(samples, int):
            return f"split {split} has {samples!r} samples, expected a whole number"
    if not info.schema.dense_features:
        return "no dense features, expected one or more"
    names = [feature.name for feature in info.schema.sparse_features]
    for feature in info.schema.sparse_features:
        if names.count(feature.name) > 1:
            return f"two sparse features are named {feature.name}"
        if not isinstance(feature.rows, int) or feature.rows < 1:
            return f"feature {feature.name} has {feature.rows!r} rows, expected 1 or more"
    return None if names else "no sparse features, expected one or more"
