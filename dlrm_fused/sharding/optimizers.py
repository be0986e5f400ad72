"""The optimizers of a sharded model, as one: for dense layers, for data-parallel tables, and those fused into backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torchrec.optim
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_fused.compat.fbgemm import read_steps_anew
from dlrm_fused.compat.torchrec import fbgemm_lookups, set_fused_params
from dlrm_fused.config import (
    Config,
    DenseOptimizerConfig,
    DenseOptimizerKind,
    EmbeddingConfig,
    EmbeddingOptimizerConfig,
    EmbeddingOptimizerKind,
    TableConfig,
)
from dlrm_fused.ops.adagrad import Adagrad
from dlrm_fused.sharding.flat_parameters import FlatOptimizer, FlatParameters
from dlrm_fused.sharding.groups import ModelParallelGroups, average_gradients, sharded_parameters
from dlrm_fused.sharding.tables import data_parallel_tables, is_table, table_name

# TorchRec's classes of them.
_WITH_STATES_OF_ELEMENTS = {
    EmbeddingOptimizerKind.adagrad: torchrec.optim.Adagrad,
    EmbeddingOptimizerKind.adam: torchrec.optim.Adam,
    EmbeddingOptimizerKind.rowwise_adam: torchrec.optim.PartialRowWiseAdam,
}


def make_optimizer(
    model: DistributedModelParallel,
    config: Config,
    groups: ModelParallelGroups | None = None,
    flat: FlatParameters | None = None,
) -> CombinedOptimizer:
    """All optimizers as one; a data-parallel table is updated like a dense layer, by the embedding's own optimizer.

    Args:
        flat: all dense parameters, if they lie in one tensor.
    """
    dense = {name: p for name, p in model.named_parameters() if not is_table(name)}

    def of_dense(parameters: list[Tensor]) -> torch.optim.Optimizer:
        if flat is not None:
            return FlatOptimizer(flat, lambda values: _flat_optimizer(values[0], config.training.dense_optimizer))
        optimizer = _dense_optimizer(parameters, config.training.dense_optimizer)
        if groups is not None and groups.data_parallel.size() > 1:
            sharded, data_parallel = list(sharded_parameters(model).values()), groups.data_parallel
            optimizer.register_step_pre_hook(lambda *_: average_gradients(sharded, data_parallel))
        return optimizer

    of_tables = _table_optimizers(dict(data_parallel_tables(model)), config.embedding)
    return CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(dense, of_dense), *of_tables])


def _table_optimizers(tables: dict[str, nn.Parameter], embedding: EmbeddingConfig) -> list[KeyedOptimizerWrapper]:
    """One for each learning rate."""
    by_rate: dict[float, dict[str, nn.Parameter]] = {}
    for name, parameter in tables.items():
        by_rate.setdefault(learning_rate(embedding, table_name(name)), {})[name] = parameter
    return [
        KeyedOptimizerWrapper(own, partial(_table_optimizer, settings=replace(embedding.optimizer, learning_rate=rate)))
        for rate, own in by_rate.items()
    ]


def learning_rate(embedding: EmbeddingConfig, table: str) -> float:
    """The configured learning rate of a table."""
    return embedding.tables.get(table, TableConfig()).learning_rate or embedding.optimizer.learning_rate


def describe_table_optimizers(model: nn.Module, embedding: EmbeddingConfig) -> None:
    """Tell TorchRec of each table what its sharder does not: its own learning rate, and to the planner states of elements.

    Before the model is planned and sharded. TorchRec makes lookups of the tables of one rate, so that each has an optimizer of
    its own.
    """
    kind = _WITH_STATES_OF_ELEMENTS.get(embedding.optimizer.kind)
    for name, parameter in model.named_parameters():
        if is_table(name):
            rate = learning_rate(embedding, table_name(name))
            set_fused_params(parameter, kind, {} if rate == embedding.optimizer.learning_rate else {"learning_rate": rate})


def _dense_optimizer(parameters: list[Tensor], settings: DenseOptimizerConfig) -> torch.optim.Optimizer:
    rate, decay, eps = settings.learning_rate, settings.weight_decay, settings.eps
    if settings.kind is DenseOptimizerKind.adagrad:
        return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, eps=eps)
    if settings.kind is DenseOptimizerKind.adam:
        betas = (settings.beta1, settings.beta2)
        # On GPUs one kernel reads and writes all once, where the default makes seven passes.
        in_one_pass = all(parameter.is_cuda for parameter in parameters)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, eps=eps, betas=betas, fused=in_one_pass)
    return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, momentum=settings.momentum)


def _flat_optimizer(value: Tensor, settings: DenseOptimizerConfig) -> torch.optim.Optimizer:
    if settings.kind is not DenseOptimizerKind.adagrad:
        return _dense_optimizer([value], settings)
    return Adagrad(value, lr=settings.learning_rate, weight_decay=settings.weight_decay, eps=settings.eps)


def _table_optimizer(parameters: list[Tensor], settings: EmbeddingOptimizerConfig) -> torch.optim.Optimizer:
    rate, decay, eps = settings.learning_rate, settings.weight_decay, settings.eps
    if settings.kind is EmbeddingOptimizerKind.rowwise_adagrad:
        return cast(torch.optim.Optimizer, RowWiseAdagrad(parameters, lr=rate, weight_decay=decay, eps=eps))
    if settings.kind is EmbeddingOptimizerKind.adagrad:
        return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, eps=eps)
    if settings.kind is EmbeddingOptimizerKind.adam:
        betas = (settings.beta1, settings.beta2)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, eps=eps, betas=betas)
    return torch.optim.SGD(parameters, lr=rate, weight_decay=decay)


def set_optimizer_step(model: nn.Module, step: int) -> None:
    """Tell the fused optimizers how many steps they have made (Adam's bias correction), after loading a checkpoint."""
    lookups = fbgemm_lookups(model)
    for lookup in lookups:
        lookup.set_optimizer_step(step)
    read_steps_anew(lookups)
