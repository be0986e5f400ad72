"""Digests by which a model knows the data that it belongs to: ids and features that mean what they meant in training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from dlrm_fused.config import Config, DataSource
from dlrm_fused.datasets.data_settings import transformation_of
from dlrm_fused.datasets.dataset import Dataset
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.datasets.transformation import Transformation

# Names, for messages, of the part of a data set that differs if a digest does.
_NAMES = {
    "transformation": "the ids of its values or the scales of its numbers",
    "features": "its features",
    "rows": "how many ids its features have",
    "token_times": "whether it knows when tokens happened, which model.kind=hstu reads (sets of earlier releases do not)",
}


def digests_of(config: Config, dataset: Dataset) -> dict[str, str]:
    """Digests of ``transformation``, ``features``, ``sample_features`` and ``rows`` of a data set, and for HSTU of
    ``token_times``.

    All sets that one transformation was applied to have the same digests, whatever their rows are. ``transformation`` is left
    out where a set has none, or one of a release that wrote no digest, and ``rows`` where the set does not state them.
    Synthetic data has no digests: its settings say all about it.
    """
    if config.data.source is DataSource.synthetic:
        return {}
    schema: DatasetSchema = getattr(dataset, "stored_schema", dataset.schema)
    digests = {key: digest_of_features(schema, with_histories=key == "features") for key in ("features", "sample_features")}
    if config.data.source is DataSource.prepared:
        digests["rows"] = _digest([feature.rows for feature in schema.tables])
    if config.model.kind.reads_times:
        digests["token_times"] = _digest(schema.has_token_times)
    folder = transformation_of(config)
    digest = "" if folder is None else Transformation.digest_of(folder)
    return digests | ({"transformation": digest} if digest else {})


def digest_of_features(schema: DatasetSchema, with_histories: bool) -> str:
    """Return the digest of the features' names, in their order, and of the length of histories or without these."""
    names = [list(schema.dense_features), [feature.name for feature in schema.sparse_features]]
    of_histories = [[feature.name for feature in schema.token_features], schema.history_length]
    return _digest([*names, *(of_histories if with_histories else [])])


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Name what has changed about a data set; None if no change is known."""
    changed = [name for key, name in _NAMES.items() if key in before and key in now and before[key] != now[key]]
    return changed[0] if changed else None


def is_unknown(before: Mapping[str, str], now: Mapping[str, str], config: Config) -> bool:
    """Return whether digests are missing that would tell if a model knows a data set's ids, as in those of earlier releases."""
    if transformation_of(config) is not None or "transformation" in before:
        return not ("transformation" in before and "transformation" in now)
    return bool(now) and not before


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
