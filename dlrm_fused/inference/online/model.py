"""Builds the model of a config for online scoring, and loads its weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dlrm_fused.config import Config, ModelKind, Precision
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.inference.online.scorer import MAX_CANDIDATES, OnlineScorer
from dlrm_fused.inference.online.sharded_tables import ShardedTables
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.models.hstu import build_hstu
from dlrm_fused.models.product_choice import fused_product
from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.models.transformer import build_transformer
from dlrm_fused.sharding.groups import ModelParallelGroups, tensor_parallel_groups
from dlrm_fused.training.checkpoint import LocalShards, State, of_dense, restore_tensors

# Kinds of models that encode histories, and what builds them with such products of layers.
BUILDERS: Mapping[ModelKind, Callable[[Config, DatasetSchema, LayerProducts], HistoryDLRM]] = {
    ModelKind.transformer: build_transformer,
    ModelKind.hstu: build_hstu,
}
KINDS = " and ".join(f"model.kind={kind.name}" for kind in BUILDERS)


@dataclass(frozen=True)
class OnlineModel:
    """A model for online scoring, not trained, or loaded by :meth:`restore`.

    Attributes:
        state: its live tensors, by their keys in a checkpoint.
    """

    scorer: OnlineScorer
    state: State

    @staticmethod
    def build(config: Config, schema: DatasetSchema, device: torch.device, ids_per_bag: int) -> OnlineModel:
        """Build the model with random weights. Collective.

        Layers and tables are sharded over tensor-parallel ranks. With ``comm=baseline``, a product is followed by an
        all-reduce; otherwise they are one operator. With ``training.precision=bf16`` all weights are bf16, otherwise fp32.

        Raises:
            ConfigError: if the model reads no histories, or does not go with the data set or the ranks.
            UsageError: with ``comm_strict``, if ranks cannot reach each other's memory.
        """
        if config.model.kind not in BUILDERS:
            raise ConfigError(f"model.kind={config.model.kind.name}: online scoring is for {KINDS}")
        if config.model.experts.count:
            raise ConfigError(
                f"model.experts.count={config.model.experts.count}: online scoring is for models without experts: 0"
            )
        groups = tensor_parallel_groups(config.model)
        group, dims = groups.model_parallel, {feature.name: config.embedding.dim_of(feature.name) for feature in schema.tables}
        dtype = torch.bfloat16 if config.training.precision is Precision.bf16 else torch.float32
        columns = max(config.model.d_model, len(schema.sparse_features) * max(dims.values()))
        product = fused_product(config, group, device, "online scoring", columns, max(schema.history_length, MAX_CANDIDATES))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # on all ranks alike
            model = BUILDERS[config.model.kind](config, schema, product)
        tables = ShardedTables({feature.name: feature.rows for feature in schema.tables}, dims, group, dtype, device)
        for _, rows in tables.local_shards().values():
            rows.uniform_(-1, 1)
        # Not the model itself: the tables in it are on the meta device.
        parts = {"transformer": model.transformer, "dense_arch": model.dense_arch, "over_arch": model.over_arch}
        for part in parts.values():
            part.to(device, dtype)
        scorer = OnlineScorer(
            model.transformer,
            model.dense_arch,
            model.over_arch,
            tables,
            token_features=model.sparse_arch.token_features,
            sparse_features=model.sparse_arch.features,
            ids_per_bag=ids_per_bag,
        )
        return OnlineModel(scorer, _state(parts, tables, groups))

    def restore(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint. Collective.

        Raises:
            CheckpointError: if it is damaged or does not fit.
        """
        restore_tensors(checkpoint, self.state, is_whole=True)


def _state(parts: dict[str, torch.nn.Module], tables: ShardedTables, groups: ModelParallelGroups) -> State:
    state: State = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            state[f"dense.model.{part}.{name}"] = of_dense(parameter.detach(), parameter, groups)
    for table, (first, rows) in tables.local_shards().items():
        state[f"table.{table}.weight"] = LocalShards((tables.features[table], tables.dims[table]), [((first, 0), rows)])
    return state
