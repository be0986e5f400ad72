"""DLRM's interaction of pooled embeddings that need not have one dimension.

Dot products need vectors of one dimension D. An embedding of another one is mapped to it by a matrix that is learned with its
table: the *mixed dimension embeddings* of Ginart et al., arXiv 1909.11810.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection
from torchrec.models.dlrm import InteractionArch

from dlrm_fused.datasets.feature_names import module_name


class Interaction(nn.Module):
    """TorchRec's ``InteractionArch``, of the bottom MLP's result and of pooled embeddings side by side.

    Args:
        dims: columns of each feature, in the order of the features.
        dim: D.

    Attributes:
        projections: by module name of a feature whose embedding does not have D columns, a linear map without bias to D.
    """

    def __init__(self, dims: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self._dims, self._dim = {module_name(feature): own for feature, own in dims.items()}, dim
        self.projections = nn.ModuleDict({module: _projection(own, dim) for module, own in self._dims.items() if own != dim})
        self.products = InteractionArch(len(dims))

    def number_features(self) -> None:
        """Call features by numbers: torch.export writes a program in Python, which has no attribute ``class``."""
        numbers = {module: str(number) for number, module in enumerate(self._dims)}
        self.projections = nn.ModuleDict({numbers[module]: layer for module, layer in self.projections.items()})
        self._dims = {numbers[module]: own for module, own in self._dims.items()}

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Map [b, D] and [b, sum of dims] to ``dense`` and the products of all pairs of vectors, [b, D + pairs]."""
        return self.products(dense, self._of_one_dim(pooled))

    def _of_one_dim(self, pooled: Tensor) -> Tensor:
        """Map [b, sum of dims] to [b, features, D]."""
        if not self.projections:
            return pooled.unflatten(1, (-1, self._dim))
        of_features = zip(self._dims, pooled.split(list(self._dims.values()), dim=1), strict=True)
        return torch.stack([self._project(name, own) if name in self.projections else own for name, own in of_features], dim=1)

    def _project(self, module: str, pooled: Tensor) -> Tensor:
        projection = cast(nn.Linear, self.projections[module])
        return projection(pooled.to(projection.weight.dtype))  # pooled embeddings may be in 16 bits


def dims_of(tables: EmbeddingBagCollection) -> dict[str, int]:
    """Columns of each feature, in the order of the tables."""
    return {feature: config.embedding_dim for config in tables.embedding_bag_configs() for feature in config.feature_names}


def _projection(own: int, dim: int) -> nn.Linear:
    """Drawn so that it neither enlarges nor shrinks vectors and gradients: Glorot and Bengio, AISTATS 2010, equation 16."""
    projection = nn.Linear(own, dim, bias=False)
    nn.init.xavier_uniform_(projection.weight)
    return projection
