"""Data sets: their on-disk format, readers, and loaders that give each rank its batches."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

# data/prepare.py imports this package too, and must not wait for torch: 4 s and 400 MB. A service
# imports it for the transformation, and need not have what configs need.
if TYPE_CHECKING:
    import torch

    from dlrm_fused.config import Config
    from dlrm_fused.datasets.dataset import Dataset

# Opens the data set of a config; the device is the one where samples that are computed are made.
OpenDataset = Callable[["Config", "torch.device"], "Dataset"]


def open_dataset(config: Config, device: torch.device) -> Dataset:
    """Return the data set of ``config.data``, with the tables of ``embedding.rows`` capped at ``embedding.max_rows``.

    Stored ids are taken modulo the rows of their table; synthetic ones are generated for them.

    Args:
        device: where synthetic samples are computed.

    Raises:
        ConfigError: if ``embedding.rows`` does not have one entry for each table of the data set.
        DataError: if the stored set is missing, damaged or inconsistent.
    """
    return resolve_name(config.data.source.value)(config, device)


def __getattr__(name: str) -> Any:
    if name == "Dataset":
        from dlrm_fused.datasets.dataset import Dataset

        return Dataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
