"""Tensor parallelism: linear layers whose weights are sharded over the ranks of a group, and the way into and out of it.

A column-parallel layer holds some of the output features and gives its part of the result; a row-parallel layer takes such a
part, holds the weights of these input features, and sums the products over the ranks. Between :func:`gather_samples` and
:func:`own_samples` the ranks of a group work on the samples of all of them, and their activations outside sharded layers are
equal. Gradients there are those of the mean of the ranks' losses, as DDP's average is elsewhere, whether a parameter is sharded
or not. The parameters of sharded layers carry ``shard_dim``, the dimension that is sharded: rank r of n holds the r-th of n
equal pieces of it.

With :attr:`LayerProducts.shards` each rank keeps its own samples between the layers (sequence parallelism): column-parallel
layers gather them while they multiply, row-parallel ones give each rank its own.

Sources: Shoeybi et al., *Megatron-LM*, arXiv 1909.08053; Korthikanti et al., *Reducing Activation Recomputation in Large
Transformer Models*, arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce, reference

NORM_EPS = 1e-6  # of all RMS norms


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of a tensor-parallel group; None is this rank alone."""
    return 1 if group is None else group.size()


def gather_samples(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather [b, ...] of each rank to [n * b, ...] of all, on all of them; b must not differ. Collective.

    Backward, each rank takes the gradient of its own samples, times n: the gradient of the mean of the ranks' losses becomes
    that of this rank's.
    """
    if group is None or group.size() == 1:
        return x
    return _both_ways(x, lambda x: _all_gather(x, group), lambda gradient: _own(gradient, group) * group.size())


def numbers_of_ranks(number: int, group: ProcessGroup | None) -> list[int]:
    """Return the ranks' numbers. Collective between processes: nobody waits for a GPU."""
    if group is None or group.size() == 1:
        return [number]
    numbers = [torch.empty((), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(numbers, torch.tensor(number), group)
    return [int(of_rank) for of_rank in numbers]


def own_samples(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's [b, ...] of [n * b, ...], equal on all ranks.

    Backward, the gradients of all ranks' samples are gathered, and divided by n: they are of the mean of the ranks' losses.
    """
    if group is None or group.size() == 1:
        return x
    return _both_ways(x, lambda x: _own(x, group).clone(), lambda gradient: _all_gather(gradient, group) / group.size())


class _ColumnParallel(torch.autograd.Function):
    """x @ weight.T, where x is equal on all ranks: backward, the gradients of the ranks' pieces are summed (Megatron's f).

    While they are, the gradient of the weight is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x = rows @ weight
        summed = dist.all_reduce(of_x, group=ctx.group, async_op=True)
        of_weight = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        summed.wait()
        return of_x.view_as(x), of_weight, None


def _mean_of_ranks(weight: Tensor, ranks: int) -> Tensor:
    """Return a weight whose gradient is of the sum of the ranks' losses, as one of their mean."""
    return _both_ways(weight, lambda x: x.view_as(x), lambda gradient: gradient / ranks)


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group)
    return gathered


def _own(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.unflatten(0, (group.size(), -1))[group.rank()]


def _both_ways(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``forward(x)``, whose gradient reaches x as ``backward`` of it."""
    return cast(Tensor, _BothWays.apply(x, forward, backward))


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


@dataclass(frozen=True)
class LayerProducts:
    """The products and exchanges of sharded layers: the one place where ``comm`` matters to a tensor-parallel model.

    Attributes:
        group: the ranks that hold the pieces; None: this rank alone. One rank communicates nothing.
        workspace: of the fused operator, over the same ranks, for any number of rows; None: a matrix product, then an
            all-reduce.
        shards: of the operators of sequence parallelism, over the same ranks: then each rank has its own samples between
            layers, and ``workspace`` is not used.
    """

    group: ProcessGroup | None = None
    workspace: GemvWorkspace | None = None
    shards: ShardWorkspace | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return this rank's samples [b, ...] as the layers take them: those of all ranks, [n * b, ...], or its own."""
        return x if self.shards else gather_samples(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return this rank's samples [b, ...] of the layers' results."""
        return x if self.shards else own_samples(x, self.group)

    def of_all_ranks(self, parameter: Tensor) -> Tensor:
        """Return a sharded parameter as a function takes it that computes samples of all ranks, between two products."""
        return parameter if self.shards is None else _mean_of_ranks(parameter, self.shards.world_size)

    def columns(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of a column-parallel layer.

        Args:
            x: [s, ..., K], the samples between layers.
            weight: [N_local, K].

        Returns:
            [n * b, ..., N_local], of the samples of all ranks.
        """
        if self.group is None or self.group.size() == 1:
            return F.linear(x, weight)
        x, weight = self._in_compute_dtype(x), self._in_compute_dtype(weight)
        if self.shards is None:
            return cast(Tensor, _ColumnParallel.apply(x, weight, self.group))
        workspace, ranks = self.shards, self.shards.world_size
        weight = self.of_all_ranks(weight)
        rows = x.flatten(0, -2).contiguous()
        # Rows beyond the workspace's memory go in further calls.
        parts = [all_gather_gemm(workspace, part, weight) for part in rows.split(workspace.max_rows // ranks)]
        if len(parts) == 1:
            out = parts[0]
        else:
            out = torch.cat([part.unflatten(0, (ranks, -1)) for part in parts], dim=1).flatten(0, 1)
        return out.view(ranks * x.shape[0], *x.shape[1:-1], len(weight))

    def _in_compute_dtype(self, x: Tensor) -> Tensor:
        """Return ``x`` in autocast's dtype, where it is enabled."""
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    def _scatter(self, workspace: ShardWorkspace, x: Tensor, weight: Tensor) -> Tensor:
        """Return [rows of own samples, N]: the sum over ranks of x [rows of all, K_local] @ weight.T."""
        ranks = workspace.world_size
        weight = self.of_all_ranks(weight)
        parts = x.unflatten(0, (ranks, -1)).split(workspace.max_rows // ranks, dim=1)
        return torch.cat([gemm_reduce_scatter(workspace, part.flatten(0, 1).contiguous(), weight) for part in parts])

    def __call__(self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``out``, the sum over ranks of x @ weight.T, plus ``residual``, and its RMS norm times ``norm_weight``.

        All are computed in autocast's dtype where it is enabled.

        Args:
            x: [n * b, ..., K_local], this rank's part of the features, of the samples of all ranks.
            weight: [N, K_local].
            residual: [s, ..., N], the samples between layers.
            norm_weight: [N].

        Returns:
            out and its norm, each [s, ..., N].
        """
        shape = residual.shape
        x = self._in_compute_dtype(x).flatten(0, -2)
        residual, weight, norm_weight = residual.to(x.dtype).flatten(0, -2), weight.to(x.dtype), norm_weight.to(x.dtype)
        if self.shards is not None:
            out = self._scatter(self.shards, x, weight) + residual
            return out.view(shape), rms_norm(out, norm_weight).view(shape)
        if self.workspace is None:
            out, normed = reference(self.group, x, weight, None, residual, norm_weight, NORM_EPS)
        else:
            # Rows beyond the workspace's memory go in further calls.
            rows = zip(x.split(self.workspace.max_rows), residual.split(self.workspace.max_rows), strict=True)
            results = [gemv_all_reduce(self.workspace, x, weight, None, r, norm_weight, NORM_EPS) for x, r in rows]
            out, normed = results[0] if len(results) == 1 else map(torch.cat, zip(*results, strict=True))
        return out.view(shape), cast(Tensor, normed).view(shape)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., N] over the root of the mean of its squares, times weight [N], in x's dtype."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), NORM_EPS)


class ColumnParallelLinear(nn.Module):
    """x @ weight.T for this rank's part of the output features, without bias.

    Attributes:
        weight: [out_features / ranks, in_features].
    """

    def __init__(self, in_features: int, out_features: int, products: LayerProducts) -> None:
        super().__init__()
        self._products = products
        self.weight = _shard_of_weight(in_features, out_features, 0, products.group)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, ..., in_features], the samples between layers, to [n * b, ..., out_features / ranks]."""
        return self._products.columns(x, self.weight)


class RowParallelLinear(nn.Module):
    """x @ weight.T summed over the ranks, each of which has a part of the input features; with what follows in a block.

    Attributes:
        weight: [out_features, in_features / ranks].
    """

    def __init__(self, in_features: int, out_features: int, product: LayerProducts) -> None:
        super().__init__()
        self._product = product
        self.weight = _shard_of_weight(in_features, out_features, 1, product.group)

    def forward(self, x: Tensor, residual: Tensor, norm_weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the layer's output and its norm, as :class:`LayerProducts` does.

        Args:
            scales: of in_features / ranks elements, by which features of x are multiplied; None: they are not. Where gradients
                are wanted, columns of the weight are multiplied instead: the gradient of scales is then no sum over all of x.
        """
        weight: Tensor = self.weight
        if scales is not None and torch.is_grad_enabled():
            weight = weight * scales.flatten()
        elif scales is not None:
            x = x * scales.flatten()
        return self._product(x, weight, residual, norm_weight)


def _shard_of_weight(in_features: int, out_features: int, dim: int, group: ProcessGroup | None) -> nn.Parameter:
    """Return this rank's piece of a weight [out_features, in_features], sharded along ``dim``.

    The whole is drawn on the CPU, as nn.Linear draws it: nothing drawn then or later depends on how many ranks there are.
    """
    ranks = group_size(group)
    features = (out_features, in_features)[dim]
    if features % ranks:
        kind = ("out_features", "in_features")[dim]
        raise UsageError(f"{kind}={features}: must be a multiple of the {ranks} ranks of the tensor-parallel group")
    bound = in_features**-0.5
    return _own_piece(torch.empty(out_features, in_features).uniform_(-bound, bound), dim, group)


def parameter_of_heads(whole: Tensor, product: LayerProducts) -> nn.Parameter:
    """Return this rank's rows of a parameter [heads, ...], whose heads are spread over the ranks of ``product``."""
    return _own_piece(whole, 0, product.group)


def _own_piece(whole: Tensor, dim: int, group: ProcessGroup | None) -> nn.Parameter:
    """Return this rank's piece of a parameter that is sharded along ``dim``."""
    if group is not None:
        whole = whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    return sharded_parameter(whole, dim, group)


def sharded_parameter(piece: Tensor, dim: int, group: ProcessGroup | None) -> nn.Parameter:
    """Return this rank's piece as a parameter; one rank alone has the whole, an ordinary parameter."""
    parameter = nn.Parameter(piece)
    if group_size(group) > 1:
        parameter.shard_dim = dim  # type: ignore[attr-defined]
    return parameter
