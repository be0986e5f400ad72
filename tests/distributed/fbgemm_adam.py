"""FBGEMM's Adam on the CPU, where it has none: its own tables, states and count of steps, with its two kernels in plain torch.

What they compute: fbgemm_gpu/codegen/genscript/optimizers.py of FBGEMM, ``adam`` and ``partial_rowwise_adam``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_codegen_lookup_invokers import lookup_adam, lookup_partial_rowwise_adam
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_split_state,
)
from torch import Tensor

_ADAMS = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)


def provide_adam_on_the_cpu() -> None:
    """In this process, from now on."""
    make = SplitTableBatchedEmbeddingBagsCodegen.__init__

    def make_with_adam(self: Any, *args: Any, optimizer: EmbOptimType = EmbOptimType.EXACT_SGD, **settings: Any) -> None:
        if optimizer not in _ADAMS:
            make(self, *args, optimizer=optimizer, **settings)
            return
        # It has the first moment, under the same name.
        make(self, *args, optimizer=EmbOptimType.EXACT_ADAGRAD, **settings)
        self.optimizer = optimizer
        rowwise = optimizer == EmbOptimType.PARTIAL_ROWWISE_ADAM
        states = construct_split_state(self.embedding_specs, rowwise=rowwise, cacheable=False)
        self._apply_split(states, prefix="momentum2", dtype=torch.float32)

    SplitTableBatchedEmbeddingBagsCodegen.__init__ = make_with_adam
    lookup_adam.invoke = partial(_look_up, rowwise=False)
    lookup_partial_rowwise_adam.invoke = partial(_look_up, rowwise=True)


def _look_up(given: Any, optimizer: Any, momentum1: Any, momentum2: Any, step: int, *, rowwise: bool, **_: Any) -> Tensor:
    update = partial(_update, given, optimizer, momentum1, momentum2, step, rowwise)
    return _Lookup.apply(given.host_weights, given, update)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, given: Any, update: Any) -> Tensor:
        ctx.given, ctx.update = given, update
        begins, features = given.D_offsets.tolist(), len(given.D_offsets) - 1
        batch = (given.offsets.numel() - 1) // features
        output = torch.zeros(batch, begins[-1])
        for feature in range(features):
            indices, bags, coefficients = _positions(given, feature, batch)
            rows = weights[_elements(given.weights_offsets, begins, feature, indices)]
            output[:, begins[feature] : begins[feature + 1]].index_add_(0, bags, rows * coefficients)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        given, by_table = ctx.given, {}
        begins = given.D_offsets.tolist()
        for feature, table in enumerate(given.weights_offsets.tolist()):
            indices, bags, coefficients = _positions(given, feature, len(gradient))
            of_positions = gradient[bags, begins[feature] : begins[feature + 1]].double() * coefficients
            by_table.setdefault(table, []).append((feature, indices, of_positions))
        for parts in by_table.values():
            rows, places = torch.cat([indices for _, indices, _ in parts]).unique(return_inverse=True)
            gradients = torch.cat([of_positions for _, _, of_positions in parts])
            ctx.update(rows, gradients.new_zeros(len(rows), gradients.shape[1]).index_add_(0, places, gradients), parts[0][0])
        return None, None, None


def _positions(given: Any, feature: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a feature: rows, bags and coefficients [n, 1]."""
    offsets = given.offsets[feature * batch : (feature + 1) * batch + 1]
    lengths, own = offsets.diff(), slice(int(offsets[0]), int(offsets[-1]))
    bags = torch.repeat_interleave(torch.arange(batch), lengths)
    coefficients = torch.ones(len(bags)) if given.indice_weights is None else given.indice_weights[own]
    if given.pooling_mode == PoolingMode.MEAN.value:
        coefficients = coefficients / lengths[bags]
    return given.indices[own].long(), bags, coefficients[:, None]


def _elements(offsets: Tensor, begins: list[int], feature: int, rows: Tensor) -> Tensor:
    """Where in a flat tensor the elements of rows lie, [n, dim]."""
    dim = begins[feature + 1] - begins[feature]
    return offsets[feature] + rows[:, None] * dim + torch.arange(dim)


def _update(
    given: Any,
    optimizer: Any,
    momentum1: Any,
    momentum2: Any,
    step: int,
    rowwise: bool,
    rows: Tensor,
    gradients: Tensor,
    feature: int,
) -> None:
    """Args:
    rows: of the feature's table, each once.
    gradients: float64 [rows, dim].
    """
    # Its kernels take fp32 betas.
    beta1, beta2 = (torch.tensor(beta).double().item() for beta in (optimizer.beta1, optimizer.beta2))
    begins = given.D_offsets.tolist()
    places = _elements(given.weights_offsets, begins, feature, rows)
    at_mean = _elements(momentum1.offsets, begins, feature, rows)
    mean = beta1 * momentum1.host[at_mean].double() + (1 - beta1) * gradients
    squares = gradients.square()
    if rowwise:
        at_variance, squares = momentum2.offsets[feature] + rows[:, None], squares.mean(1, keepdim=True)
    else:
        at_variance = _elements(momentum2.offsets, begins, feature, rows)
    variance = beta2 * momentum2.host[at_variance].double() + (1 - beta2) * squares
    deviation = (variance / (1 - beta2**step)).sqrt() + optimizer.eps
    weights = given.host_weights.detach()
    old = weights[places].double()
    change = mean / (1 - beta1**step) / deviation + optimizer.weight_decay * old
    weights[places] = (old - given.learning_rate_tensor.double() * change).float()
    momentum1.host.detach()[at_mean] = mean.float()
    momentum2.host.detach()[at_variance] = variance.float()
