"""The fused sharder beside TorchRec's on several GPUs: what a user changes in the middle of training, also in replays.

With ``TRITON_INTERPRET=1`` it runs on the CPU too, where nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torchrec import fbgemm_lookups
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import MARKS, ON_GPU, SHARE_A_GPU, checked_on_all_ranks

pytestmark = [*MARKS, pytest.mark.skipif(SHARE_A_GPU, reason="TorchRec's collectives need a GPU for each rank")]

FUSED = EmbeddingComputeKernel.FUSED.value
ROWWISE_ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
KEYS = ("feature_0", "feature_1", "feature_2")
ROWS, DIM, BATCH = 40, 16, 6
# So many steps of one kind are run before they are captured, and some more to be replayed.
STEPS = 6 if ON_GPU else 2

Course = Callable[[DistributedModelParallel], list[Tensor]]


class Model(nn.Module):
    """Tables sharded in three ways, and a sum over their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f"table_{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[key])
                for i, key in enumerate(KEYS)
            ],
            device=torch.device("meta"),
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embeddings = self.tables(features)
        return torch.cat([embeddings[key] for key in KEYS], dim=1).sin().sum()


def sharded(group: SymmetricGroup, sharder: EmbeddingBagCollectionSharder) -> DistributedModelParallel:
    """A sharded model; its weights are the same whatever the sharder."""
    model, device = Model(), group.device
    typed = cast(ModuleSharder[nn.Module], sharder)
    shardings: dict[str, Any] = {
        "table_0": table_wise(rank=group.world_size - 1, compute_kernel=FUSED),
        "table_1": row_wise(compute_kernel=FUSED),
        "table_2": column_wise(ranks=[0, group.world_size - 1], compute_kernel=FUSED),
    }
    plan = construct_module_sharding_plan(
        model.tables,
        shardings,
        typed,
        local_size=group.world_size,
        world_size=group.world_size,
        device_type="cuda" if ON_GPU else "cpu",
    )
    module = DistributedModelParallel(
        model, device=device, plan=ShardingPlan({"tables": plan}), sharders=[typed], init_data_parallel=False
    )
    for table, weight in enumerate(module.state_dict().values()):
        whole = torch.randn(weight.size(), generator=torch.Generator().manual_seed(table))
        for shard in weight.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    return module


def batch(step: int) -> KeyedJaggedTensor:
    """This rank's; all steps have the same shapes, also after the input dist: each rank's rows get as many ids."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids, ranks = 2 * BATCH * len(KEYS), dist.get_world_size()
    rows_of_rank = -(-ROWS // ranks)
    first_rows = rows_of_rank * (torch.arange(ids) % ranks)
    values = first_rows + torch.randint(0, ROWS - rows_of_rank * (ranks - 1), (ids,), generator=generator)
    lengths = torch.full((BATCH * len(KEYS),), 2)
    features = KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths)
    return features.to(torch.device("cuda")) if ON_GPU else features


def train(model: DistributedModelParallel, first: int) -> list[Tensor]:
    """Losses of STEPS steps."""
    losses = []
    for step in range(first, first + STEPS):
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.detach())
    return losses


def fused_lookups(model: DistributedModelParallel) -> Any:
    """None of TorchRec's."""
    return getattr(get_unwrapped_module(model).tables, "_path", None)


def equals_torchrec(group: SymmetricGroup, settings: dict[str, Any], course: Course) -> None:
    """Observations of a course, and what it leaves in the tables."""
    found = []
    for sharder in (FusedEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder):
        model = sharded(group, sharder(dict(settings)))
        found.append([*course(model), *(_weights(lookup).clone() for lookup in fbgemm_lookups(model))])
        fused = fused_lookups(model)
        assert fused is None or len(fused._replayed._captures) == ON_GPU, "replayed at the end"
    ours, torchrecs = found
    torch.testing.assert_close(ours, torchrecs, rtol=1e-4, atol=1e-4)


def _weights(lookup: Any) -> Tensor:
    return cast(Tensor, lookup.weights_host if lookup.use_cpu else lookup.weights_dev).detach()


def with_other_eps(model: DistributedModelParallel) -> list[Tensor]:
    """Each before replays have begun, and again when they have; largest changes of tables are of the new number."""
    observed = []
    for number, eps in enumerate((1.0, 0.1)):
        observed += train(model, 2 * number * STEPS)
        model.fused_optimizer.update_hyper_parameters({"eps": eps})
        before = [_weights(lookup).clone() for lookup in fbgemm_lookups(model)]
        observed += train(model, (2 * number + 1) * STEPS)
        observed += [(_weights(lookup) - old).abs().max() for lookup, old in zip(fbgemm_lookups(model), before, strict=True)]
    return observed


def with_another_rate(model: DistributedModelParallel) -> list[Tensor]:
    observed = train(model, 0)
    for lookup in fbgemm_lookups(model):
        lookup.set_learning_rate(0.5)
    return [*observed, *train(model, STEPS)]


def with_numbers_set_before_backward(model: DistributedModelParallel) -> list[Tensor]:
    """A step is made with the numbers of its forward pass, though a replay waits with it."""
    observed = train(model, 0)
    loss = model(batch(STEPS))
    model.fused_optimizer.update_hyper_parameters({"eps": 2.0})
    loss.backward()
    return [*observed, loss.detach(), *train(model, STEPS + 1)]


def with_tables_that_move(model: DistributedModelParallel) -> list[Tensor]:
    observed = train(model, 0)
    for lookup in fbgemm_lookups(model):
        weights = lookup.weights_host if lookup.use_cpu else lookup.weights_dev
        weights.data = weights.data.clone()
    return [*observed, *train(model, STEPS)]


def with_an_inference_first(model: DistributedModelParallel) -> list[Tensor]:
    """Begin with batches under inference mode, which TorchRec's sharder does not stand; they leave state for later ones."""
    observed = []
    for step in range(2):
        with torch.no_grad() if fused_lookups(model) is None else torch.inference_mode():
            observed.append(model(batch(step)))
    return [*(tensor.clone() for tensor in observed), *train(model, 2)]


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    "eps of row-wise Adagrad": partial(equals_torchrec, settings=ROWWISE_ADAGRAD, course=with_other_eps),
    "the learning rate": partial(equals_torchrec, settings=SGD, course=with_another_rate),
    "eps before backward": partial(equals_torchrec, settings=ROWWISE_ADAGRAD, course=with_numbers_set_before_backward),
    "tables that move": partial(equals_torchrec, settings=ROWWISE_ADAGRAD, course=with_tables_that_move),
    "inference first": partial(equals_torchrec, settings=ROWWISE_ADAGRAD, course=with_an_inference_first),
}
failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
