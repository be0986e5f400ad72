"""DLRM and DLRM-DCNv2, TorchRec's implementations. With ``model.experts``, their top MLP has a Mixture of Experts.

Sources: Naumov et al., *Deep Learning Recommendation Model*, arXiv 1906.00091; Wang et al., *DCN V2*, arXiv 2008.13535.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrec import EmbeddingBagCollection
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionDCNArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.dense_part import CompiledForTraining, is_compiled
from dlrm_fused.models.embedding_tables import SparseArch, embedding_tables
from dlrm_fused.models.interaction import Interaction, dims_of
from dlrm_fused.models.moe import MixtureOfExperts, build_experts
from dlrm_fused.models.multi_task import top_widths


class _InTwoParts(DLRM):
    """The tables, and all that follows: :meth:`logits_of` makes a :class:`~dlrm_fused.models.dense_part.DensePart`.

    Tables may have other dimensions than D, the last width of the bottom MLP.
    """

    def __init__(
        self, tables: EmbeddingBagCollection, dense_features: int, bottom_mlp: list[int], top_mlp: list[int], *arguments: Any
    ) -> None:
        super().__init__(_of_one_dim(tables, bottom_mlp[-1]), dense_features, bottom_mlp, top_mlp, *arguments)
        self.sparse_arch = SparseArch(tables)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Map [b, dense features] and features of stride b to logits [b, labels]."""
        return self.logits_of(dense_features, self.sparse_arch(sparse_features))

    def interactions_of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Map [b, dense features] and pooled embeddings [b, sum of dimensions] to what the top MLP reads, [b, N]."""
        return self.inter_arch(self.dense_arch(dense), pooled)

    def logits_of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Map [b, dense features] and pooled embeddings [b, sum of dimensions] to logits [b, labels]."""
        return self.over_arch(self.interactions_of(dense, pooled))


def _of_one_dim(tables: EmbeddingBagCollection, dim: int) -> EmbeddingBagCollection:
    """Tables as TorchRec's models take them."""
    configs = [replace(config, embedding_dim=dim) for config in tables.embedding_bag_configs()]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


class Dlrm(_InTwoParts):
    """TorchRec's DLRM; arguments are the same."""

    def __init__(self, tables: EmbeddingBagCollection, dense_features: int, bottom_mlp: list[int], top_mlp: list[int]) -> None:
        super().__init__(tables, dense_features, bottom_mlp, top_mlp)
        self.inter_arch = Interaction(dims_of(tables), bottom_mlp[-1])


class Dcnv2(_InTwoParts, DLRM_DCN):
    """TorchRec's DLRM_DCN; arguments are the same.

    Its cross layers take vectors of any dimensions side by side, as their source has it (section 3.1).
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        dense_features: int,
        bottom_mlp: list[int],
        top_mlp: list[int],
        cross_layers: int,
        cross_rank: int,
    ) -> None:
        super().__init__(tables, dense_features, bottom_mlp, top_mlp, cross_layers, cross_rank)
        dims = dims_of(tables).values()
        columns = bottom_mlp[-1] + sum(dims)
        if columns != bottom_mlp[-1] * (1 + len(dims)):
            self.inter_arch = InteractionDCNArch(len(dims), LowRankCrossNet(columns, cross_layers, cross_rank))
            self.over_arch = OverArch(columns, top_mlp)

    def interactions_of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        features = torch.cat((self.dense_arch(dense), pooled), dim=1)
        return cross_layers(self.inter_arch.crossnet, features)


def cross_layers(parameters: LowRankCrossNet, x_0: Tensor) -> Tensor:
    """x_0 * (W V x + b) + x by layer, from x = x_0 [b, N] on; results have the dtype of x_0.

    TorchRec's module lets results grow to float32 where the bias has that, twice the bytes that the layers read and write; here
    only what is computed in between does. For x_0 in float32 the bits are the same.

    An attribute ``multiply`` of the parameters takes the place of :func:`linear_plus_bias`.

    Source: arXiv 2008.13535, equation 2, in the low-rank form of its section 3.
    """
    multiply = getattr(parameters, "multiply", linear_plus_bias)
    x = x_0
    for v, w, bias in zip(parameters.V_kernels, parameters.W_kernels, parameters.bias, strict=True):
        x = (x_0 * (multiply(multiply(x, v), w, bias)) + x).to(x_0.dtype)
    return x


def linear_plus_bias(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer whose bias is added in its own dtype, also under autocast."""
    product = linear(x, weight)
    return product if bias is None else product + bias


class ExpertTop(nn.Module):
    """A top MLP with experts after its first layer: the rest of x + experts(x).

    Args:
        layer_sizes: two or more; the first is the experts' width.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], experts: MixtureOfExperts) -> None:
        super().__init__()
        *hidden, last = layer_sizes
        self.first = MLP(in_features, hidden[:1])
        self.experts = experts
        self.rest = nn.Sequential(MLP(hidden[0], hidden[1:]), nn.Linear(hidden[-1], last))


class ExpertDLRM(nn.Module):
    """DLRM or DCNv2 with experts in its top MLP. Its parts have the names of TorchRec's.

    Args:
        dlrm: whose other parts are taken.
        is_compiled: what is before the experts, and what is after them, as a graph each. The experts themselves are operators
            of this package, and tell other ranks, by the host, how many tokens they get.
    """

    def __init__(self, dlrm: _InTwoParts, layer_sizes: list[int], experts: MixtureOfExperts, is_compiled: bool) -> None:
        super().__init__()
        self.sparse_arch, self.dense_arch, self.inter_arch = dlrm.sparse_arch, dlrm.dense_arch, dlrm.inter_arch
        in_features = next(dlrm.over_arch.parameters()).shape[1]
        self.over_arch = ExpertTop(in_features, layer_sizes, experts)
        del dlrm.over_arch
        self._interactions_of = dlrm.interactions_of
        top = self.over_arch
        before, after = (self.dense_arch, self.inter_arch, top.first), (top.rest,)
        self._into_experts = CompiledForTraining(self._before_experts, is_compiled, lambda: before)
        self._out_of_experts = CompiledForTraining(self._after_experts, is_compiled, lambda: after)

    def logits_of(self, dense: Tensor, pooled: Tensor, real: Tensor) -> Tensor:
        """Return the logits, [b, labels].

        Args:
            dense: [b, dense features].
            pooled: embeddings, [b, sum of dimensions].
            real: [b] bool, false for padding.
        """
        x = self._into_experts(dense, pooled)
        return self._out_of_experts(x, self.over_arch.experts(x, real))

    def _before_experts(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over_arch.first(self._interactions_of(dense, pooled))

    def _after_experts(self, x: Tensor, of_experts: Tensor) -> Tensor:
        return self.over_arch.rest(x + of_experts)


def build_dlrm(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model of ``model.kind=dlrm``; a :data:`~dlrm_fused.models.task.BuildModel`."""
    return _build(Dlrm, (), config, schema, device, group)


def build_dcnv2(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model of ``model.kind=dcnv2``; a :data:`~dlrm_fused.models.task.BuildModel`."""
    return _build(Dcnv2, (config.model.cross_layers, config.model.cross_rank), config, schema, device, group)


def _build(
    kind: type[_InTwoParts],
    arguments: tuple[int, ...],
    config: Config,
    schema: DatasetSchema,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> nn.Module:
    tables, top = embedding_tables(config.embedding, schema.sparse_features), top_widths(config, schema)
    dlrm = kind(tables, len(schema.dense_features), config.model.bottom_mlp, top, *arguments)
    if not config.model.experts.count:
        return dlrm
    (experts,) = build_experts(config, group, layers=1, width=top[0], tokens=1, device=device)
    return ExpertDLRM(dlrm, top, experts, is_compiled(config.training.compile, device))
