"""Models of tables that differ in columns: DLRM projects embeddings to one dimension, DCNv2 takes them as they are."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.models.dlrm import Dcnv2, Dlrm
from dlrm_fused.models.interaction import Interaction

BATCH, DENSE, DIM = 5, 3, 8
DIMS = {"user": 12, "item": DIM, "genre": 4}
CROSS = (2, 4)


def tables(dims: dict[str, int]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=7, embedding_dim=dim) for name, dim in dims.items()
    ]
    return EmbeddingBagCollection(configs)


@pytest.fixture
def dense() -> Tensor:
    return torch.randn(BATCH, DIM)


@pytest.fixture
def pooled() -> Tensor:
    return torch.randn(BATCH, sum(DIMS.values()))


@pytest.fixture
def interaction() -> Interaction:
    torch.manual_seed(0)
    return Interaction(DIMS, DIM)


def test_embeddings_of_other_dimensions_are_projected_before_the_products(
    interaction: Interaction, dense: Tensor, pooled: Tensor
) -> None:
    weights = dict(interaction.named_parameters())
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "projections.user.weight": (DIM, 12),
        "projections.genre.weight": (DIM, 4),
    }
    user, item, genre = pooled.split(list(DIMS.values()), dim=1)
    vectors = [dense, user @ weights["projections.user.weight"].T, item, genre @ weights["projections.genre.weight"].T]
    products = [(left * right).sum(1, keepdim=True) for left, right in combinations(vectors, 2)]
    torch.testing.assert_close(interaction(dense, pooled), torch.cat([dense, *products], dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_in_16_bits_are_projected_in_the_precision_of_the_weights(
    interaction: Interaction, dense: Tensor, pooled: Tensor, dtype: torch.dtype
) -> None:
    found = interaction(dense, pooled.to(dtype))
    assert torch.equal(found, interaction(dense, pooled.to(dtype).float()))


def ids() -> KeyedJaggedTensor:
    lengths = torch.ones(len(DIMS) * BATCH, dtype=torch.int64)
    return KeyedJaggedTensor(list(DIMS), torch.randint(0, 7, (len(lengths),)), lengths=lengths)


@pytest.mark.parametrize("kind", [(Dlrm, DLRM, ()), (Dcnv2, DLRM_DCN, CROSS)], ids=["dlrm", "dcnv2"])
def test_with_one_dimension_models_are_torchrecs(kind: tuple[type, type, tuple[int, ...]], dense: Tensor) -> None:
    own, torchrecs, arguments = kind
    models = []
    for model in (own, torchrecs):
        torch.manual_seed(0)
        models.append(model(tables(dict.fromkeys(DIMS, DIM)), DENSE, [6, DIM], [6, 1], *arguments))
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    features, sparse = dense[:, :DENSE], ids()
    assert torch.equal(*(model(features, sparse) for model in models))


def test_dcnv2_takes_embeddings_of_any_dimension_side_by_side(pooled: Tensor) -> None:
    model, columns = Dcnv2(tables(DIMS), DENSE, [6, DIM], [6, 1], *CROSS), DIM + sum(DIMS.values())
    assert not [name for name in model.state_dict() if "projection" in name]
    assert [tuple(v.shape) for v in model.inter_arch.crossnet.V_kernels] == [(CROSS[1], columns)] * CROSS[0]
    dense = torch.randn(BATCH, DENSE)
    interactions = model.interactions_of(dense, pooled)
    assert torch.equal(interactions, model.inter_arch.crossnet(torch.cat((model.dense_arch(dense), pooled), dim=1)))
    assert model.logits_of(dense, pooled).shape == (BATCH, 1)
