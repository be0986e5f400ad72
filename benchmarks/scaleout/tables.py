"""Lookups and updates of a config's tables on one rank alone: FBGEMM's, and those of ``comm=fused``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from benchmarks.scaleout.device_time import seconds_after, seconds_of
from dlrm_fused.compat.fbgemm import kernel_inputs
from dlrm_fused.config import Config, Split, TableDtype
from dlrm_fused.datasets import open_dataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout, embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all.update import SortedLookup, sort_lookup
from dlrm_fused.sharding.fbgemm_tables import local_tables
from dlrm_fused.sharding.parallel import FBGEMM_OPTIMIZERS, pooled_dtype
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.efficiency import state_bytes

_BYTES = 4  # of an element


class FbgemmTables:
    """As FBGEMM looks them up.

    Args:
        rows: of each table.
        dim: columns of all tables, in fp32.
        output: dtype of pooled embeddings.
    """

    def __init__(
        self, device: torch.device, rows: Sequence[int], dim: int, optimizer: EmbOptimType, output: SparseType
    ) -> None:
        is_gpu = device.type == "cuda"
        place = EmbeddingLocation.DEVICE if is_gpu else EmbeddingLocation.HOST
        self.fbgemm = SplitTableBatchedEmbeddingBagsCodegen(
            [(own, dim, place, ComputeDevice.CUDA if is_gpu else ComputeDevice.CPU) for own in rows],
            optimizer=optimizer,
            learning_rate=0.01,
            output_dtype=output,
        ).to(device)

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """
        Args:
            ids: int32, of one table after the other.
            offsets: [tables * samples + 1] int32, where the bags begin.

        Returns:
            [samples, tables * dim].
        """
        pooled: Tensor = self.fbgemm(ids, offsets)
        return pooled


class FusedTables(FbgemmTables):
    """FBGEMM's tables, looked up as ``comm=fused`` does."""

    def __init__(
        self, device: torch.device, rows: Sequence[int], dim: int, optimizer: EmbOptimType, output: SparseType
    ) -> None:
        super().__init__(device, rows, dim, optimizer, output)
        self._tables = len(rows)
        lookup = LookupLayout(tuple(range(0, self._tables * dim, dim)), (dim,) * self._tables, False)
        self._workspace = EmbeddingWorkspace(
            symmetric_group(device=device),
            ExchangeLayout(((lookup,),), self._tables * dim),
            name="calibration",
            output_dtype=output.as_dtype(),
            forward_wire=output.as_dtype(),
            backward_wire=output.as_dtype(),
        )
        self._local = local_tables(self.fbgemm)
        self._workspace.attach_tables([self._local])

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        ids, offsets, _ = kernel_inputs(self.fbgemm, ids, offsets, None, checks_bounds=True)
        return embedding_all_to_all(self._workspace, [ids], [offsets], [], [(offsets.numel() - 1) // self._tables])

    def sort(self, ids: Tensor, offsets: Tensor) -> SortedLookup:
        """Sort the ids for the update, as the trainer does beside the dense part."""
        return sort_lookup(self._local, ids, offsets)


def measure(
    config: Config, device: torch.device, batches: Sequence[int], make: type[FbgemmTables]
) -> dict[str, list[tuple[float, float]]]:
    """Return for each batch the bytes of rows that a lookup reads, and its seconds; those of rows and states that the backward
    pass with the config's optimizer reads and writes, and its seconds; and those of the sort, if it is apart.

    Popular ids, whose rows are in caches, occur as often as in the config's data.

    Raises:
        ConfigError: tables that are not in fp32.
    """
    if config.embedding.dtype is not TableDtype.fp32:
        raise ConfigError(f"embedding.dtype={config.embedding.dtype.name}: tables are calibrated in fp32")
    dataset = open_dataset(config, torch.device("cpu"))
    rows = [table.rows for table in dataset.schema.tables]
    optimizer, output = FBGEMM_OPTIMIZERS[config.embedding.optimizer.kind], SparseType(pooled_dtype(config, device).name)
    tables = make(device, rows, config.embedding.dim, optimizer, output)
    points: dict[str, list[tuple[float, float]]] = {"lookup": [], "update": []}
    for samples in batches:
        features = dataset.read(Split.train, torch.arange(samples)).sparse.to(device)
        ids, offsets = features.values(), features.offsets()
        look_up = partial(tables, ids, offsets)
        gradient = torch.ones_like(look_up())
        bytes_read = float(_BYTES * config.embedding.dim * ids.numel())
        with torch.no_grad():
            points["lookup"].append((bytes_read, seconds_of(device, look_up, captured=False)))
        backward = partial(Tensor.backward, gradient=gradient)
        bytes_moved = bytes_read * (2 + state_bytes(config) / _BYTES)
        points["update"].append((bytes_moved, seconds_after(device, look_up, backward)))
        if isinstance(tables, FusedTables):
            sorting = seconds_of(device, partial(tables.sort, ids, offsets), captured=False)
            points.setdefault("sort", []).append((bytes_moved, sorting))
    return points
