"""Data sets: their on-disk format, readers, and loaders that give each rank its batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_fused.config import Config, DataSource
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.errors import ConfigError, DataError

# The processes of data/prepare.py import this package too, and must not wait for torch: 4 s and 400 MB for each.
if TYPE_CHECKING:
    import torch

    from dlrm_fused.datasets.dataset import Dataset

__all__ = ["Dataset", "open_dataset"]

_MAX_ROWS = 2**31 - 1


def open_dataset(config: Config, device: torch.device) -> Dataset:
    """The data set of ``config.data``, with the tables of ``embedding.rows`` capped at ``embedding.max_rows``.

    Stored ids are taken modulo the rows of their table; synthetic ones are generated for them.

    Args:
        device: where synthetic samples are computed.

    Raises:
        ConfigError: if ``embedding.rows`` does not have one entry for each table of the data set.
        DataError: if the stored set is missing, damaged or inconsistent.
    """
    from dlrm_fused.datasets.criteo_npy import CriteoNpyDataset
    from dlrm_fused.datasets.prepared import PreparedDataset
    from dlrm_fused.datasets.synthetic import SyntheticDataset, table_rows

    data = config.data
    if data.source is DataSource.synthetic:
        return SyntheticDataset(data.synthetic, config.seed, device, _table_rows(config, table_rows(data.synthetic)))
    if not Path(data.path).is_dir():
        raise DataError(f"data.path={data.path}: no such folder; prepare a data set with data/prepare.py")
    if data.source is DataSource.criteo_npy:
        return CriteoNpyDataset(data.path, _table_rows(config, config.embedding.rows))
    schema = PreparedInfo.load(Path(data.path)).schema
    return PreparedDataset(data.path, _table_rows(config, [feature.rows for feature in schema.tables]))


def _table_rows(config: Config, stated: list[int]) -> list[int]:
    rows = config.embedding.rows or stated
    if len(rows) != len(stated):
        raise ConfigError(f"embedding.rows={rows}: allowed: {len(stated)} numbers, one for each table of the data set")
    if max(rows) > _MAX_ROWS:
        key = "embedding.rows" if config.embedding.rows else "data.synthetic.rows"
        raise ConfigError(f"{key}={rows}: allowed: at most {_MAX_ROWS} each, since ids are 32-bit integers")
    cap = config.embedding.max_rows
    return [min(count, cap) for count in rows] if cap else rows


def __getattr__(name: str) -> Any:
    if name == "Dataset":
        from dlrm_fused.datasets.dataset import Dataset

        return Dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
