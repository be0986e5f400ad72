"""Lookups and updates of a config's tables on one rank alone: FBGEMM's, and those of ``comm=fused``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from benchmarks.common.harness import World, seconds_of
from dlrm_fused.compat.fbgemm import kernel_inputs
from dlrm_fused.config import Config, Split, TableDtype
from dlrm_fused.datasets import open_dataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout, embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all.update import sort_lookup
from dlrm_fused.sharding.fbgemm_tables import local_tables
from dlrm_fused.sharding.parallel import FBGEMM_OPTIMIZERS, pooled_dtype
from dlrm_fused.training.efficiency import state_bytes

_BYTES = 4  # of an element
# Pooled embeddings [samples, tables * dim], of ids of one table after the other, and offsets [tables * samples + 1] of bags.
LookUp = Callable[[Tensor, Tensor], Tensor]


def measure(
    world: World, config: Config, batches: Sequence[int], *, is_fused: bool = False
) -> dict[str, list[tuple[float, float]]]:
    """Return for each batch the bytes of rows that a lookup reads, and its seconds; those of rows and states that the backward
    pass with the config's optimizer reads and writes, and its seconds; and those of the sort, which is apart if fused.

    Popular ids, whose rows are in caches, occur as often as in the config's data.

    Raises:
        ConfigError: tables that are not in fp32.
    """
    if config.embedding.dtype is not TableDtype.fp32:
        raise ConfigError(f"embedding.dtype={config.embedding.dtype.name}: tables are calibrated in fp32")
    dataset, dim = open_dataset(config, torch.device("cpu")), config.embedding.dim
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if world.device.type == "cuda":
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    fbgemm = SplitTableBatchedEmbeddingBagsCodegen(
        [(table.rows, dim, *place) for table in dataset.schema.tables],
        optimizer=FBGEMM_OPTIMIZERS[config.embedding.optimizer.kind],
        learning_rate=0.01,
        output_dtype=SparseType(pooled_dtype(config, world.device).name),
    ).to(world.device)
    look_up: LookUp = _fused(world, fbgemm, dim, len(dataset.schema.tables)) if is_fused else fbgemm
    points: dict[str, list[tuple[float, float]]] = {"lookup": [], "update": []}
    for samples in batches:
        features = dataset.read(Split.train, torch.arange(samples)).sparse.to(world.device)
        ids, offsets = features.values(), features.offsets()
        bytes_read = float(_BYTES * dim * ids.numel())
        bytes_moved = bytes_read * (2 + state_bytes(config) / _BYTES)
        points["lookup"].append((bytes_read, _seconds_of_lookup(world, partial(look_up, ids, offsets))))
        points["update"].append((bytes_moved, _seconds_of_update(world, partial(look_up, ids, offsets))))
        if is_fused:
            # As the trainer does beside the dense part.
            sorting = seconds_of(world, partial(sort_lookup, local_tables(fbgemm), ids, offsets))
            points.setdefault("sort", []).append((bytes_moved, sorting))
    return points


def _fused(world: World, fbgemm: SplitTableBatchedEmbeddingBagsCodegen, dim: int, tables: int) -> LookUp:
    """Look FBGEMM's tables up as ``comm=fused`` does."""
    lookup = LookupLayout(tuple(range(0, tables * dim, dim)), (dim,) * tables, False)
    dtype = SparseType.from_int(fbgemm.output_dtype).as_dtype()
    workspace = EmbeddingWorkspace(
        world.symmetric,
        ExchangeLayout(((lookup,),), tables * dim),
        name="calibration",
        output_dtype=dtype,
        forward_wire=dtype,
        backward_wire=dtype,
    )
    workspace.attach_tables([local_tables(fbgemm)])

    def look_up(ids: Tensor, offsets: Tensor) -> Tensor:
        ids, offsets, _ = kernel_inputs(fbgemm, ids, offsets, None, checks_bounds=True)
        return embedding_all_to_all(workspace, [ids], [offsets], [], [(offsets.numel() - 1) // tables])

    return look_up


@torch.no_grad()
def _seconds_of_lookup(world: World, look_up: Callable[[], Tensor]) -> float:
    return seconds_of(world, look_up)


def _seconds_of_update(world: World, look_up: Callable[[], Tensor]) -> float:
    """Time the backward pass of a lookup that has ended."""
    gradient = torch.ones_like(look_up())
    pooled: list[Tensor] = []
    return seconds_of(world, lambda: pooled.pop().backward(gradient), before=lambda: pooled.append(look_up()))
