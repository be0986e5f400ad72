"""The settings of a config that sources of samples read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlrm_fused.config import Config, DataSource
from dlrm_fused.datasets.transformation import TRANSFORMATION
from dlrm_fused.errors import ConfigError, DataError

_MAX_ROWS = 2**31 - 1


def folder_of(config: Config) -> Path:
    """``data.path``.

    Raises:
        DataError: if there is no such folder.
    """
    if not Path(config.data.path).is_dir():
        raise DataError(f"data.path={config.data.path}: no such folder; prepare a data set with data/prepare.py")
    return Path(config.data.path)


def transformation_of(config: Config) -> Path | None:
    """Return the folder of the set's :class:`~dlrm_fused.datasets.transformation.Transformation`, if it has one."""
    folder = Path(config.data.path, TRANSFORMATION)
    return folder if config.data.source is not DataSource.synthetic and folder.is_dir() else None


def rows_of_tables(config: Config, stated: Sequence[int]) -> list[int]:
    """Return rows of every table: those of ``embedding.rows`` or else of the data set, capped at ``embedding.max_rows``.

    Args:
        stated: what the data set says of each table.

    Raises:
        ConfigError: if ``embedding.rows`` does not have one entry for each table, or a table has too many rows.
    """
    rows = config.embedding.rows or list(stated)
    if len(rows) != len(stated):
        raise ConfigError(f"embedding.rows={rows}: allowed: {len(stated)} numbers, one for each table of the data set")
    if max(rows) > _MAX_ROWS:
        key = "embedding.rows" if config.embedding.rows else "data.synthetic.rows"
        raise ConfigError(f"{key}={rows}: allowed: at most {_MAX_ROWS} each, since ids are 32-bit integers")
    cap = config.embedding.max_rows
    return [min(count, cap) for count in rows] if cap else rows
