"""The optimizers of a sharded model, as one: for dense layers, for data-parallel tables, and those fused into backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_fused.compat.fbgemm import step_counts
from dlrm_fused.compat.torchrec import lookups
from dlrm_fused.config import Config, DenseOptimizerConfig, DenseOptimizerKind, EmbeddingOptimizerConfig, EmbeddingOptimizerKind
from dlrm_fused.ops.adagrad import Adagrad
from dlrm_fused.sharding.flat_parameters import FlatOptimizer, FlatParameters
from dlrm_fused.sharding.groups import ModelParallelGroups, average_gradients, sharded_parameters
from dlrm_fused.sharding.tables import data_parallel_tables, is_table


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

    optimizers = [model.fused_optimizer, KeyedOptimizerWrapper(dense, of_dense)]
    tables = dict(data_parallel_tables(model))
    if tables:
        optimizers.append(KeyedOptimizerWrapper(tables, lambda p: _table_optimizer(p, config.embedding.optimizer)))
    return CombinedOptimizer(optimizers)


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
    """Tell the fused optimizers how many steps they have made, after loading a checkpoint.

    Adam's bias correction depends on it, and the counters of rows.
    """
    for count in _step_counts(model):
        count.fill_(step)


@contextmanager
def without_steps(model: nn.Module) -> Iterator[None]:
    """Within, lookups are no steps of the fused optimizers."""
    counts = _step_counts(model)
    kept = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, value in zip(counts, kept, strict=True):
            count.copy_(value)


def _step_counts(model: nn.Module) -> list[Tensor]:
    """Of all fused optimizers; the live ones."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    # TorchRec keeps lookups in a list, where modules() does not find them.
    modules = [module for own in sharded for lookup in lookups(own) for module in lookup.modules()]
    fused = [module for module in modules if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)]
    return [count for lookup in fused for count in step_counts(lookup)]
