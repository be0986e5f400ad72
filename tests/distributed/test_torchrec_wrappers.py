"""TorchRec's modules around collections of embeddings: with our sharders inside they give what they give with TorchRec's.

Feature processors, managed collisions and prioritized embedding communication (PEC) call the sharded module by other methods
than ``forward``, or copy its contexts. Of PEC the forward pass alone is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.errors import UsageError
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder
from tests.distributed.launch import run_ranks
from tests.distributed.test_fused_sharder import CPU, RowWiseToo

DIM, ROWS, TABLES, BATCHES, MOST_IDS = 8, 12, 3, 3, 3
FEATURES = [f"feature_{number}" for number in range(TABLES)]
RATE: dict[str, Any] = {"learning_rate": 0.1}
# Row-wise sums are added up in another order where they are of more ranks than two.
RANKS = 2


def bags(*, weighted: bool = False) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=f"table_{number}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature])
        for number, feature in enumerate(FEATURES)
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            EmbeddingConfig(name=f"table_{number}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature])
            for number, feature in enumerate(FEATURES)
        ]
    )


def batch(number: int) -> KeyedJaggedTensor:
    """Of this rank."""
    drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
    lengths = torch.randint(MOST_IDS + 1, (4 * TABLES,), generator=drawn)
    return KeyedJaggedTensor(FEATURES, torch.randint(ROWS, (int(lengths.sum()),), generator=drawn), lengths=lengths)


def sharded(
    module: nn.Module, inner: nn.Module, sharder: ModuleSharder[Any], outer: ModuleSharder[Any], on_one_rank: Sequence[int] = ()
) -> Any:
    """The module around a collection whose tables lie by rows, but for some, by their numbers, on one rank."""
    dist.init_process_group("gloo")
    ways = {f"table_{number}": table_wise(rank=0) if number in on_one_rank else row_wise() for number in range(TABLES)}
    plan = construct_module_sharding_plan(inner, ways, RowWiseToo(sharder), device_type="cpu")
    for of_table in plan.values():
        of_table.compute_kernel = "fused"
    root = nn.ModuleDict({"wrapped": module})
    torch.manual_seed(0)  # ours draws the weights that TorchRec's draws
    model = DistributedModelParallel(root, device=CPU, plan=ShardingPlan({"wrapped": plan}), sharders=[outer])
    return model.module["wrapped"]


def trained(outputs_of: Callable[[KeyedJaggedTensor], Tensor]) -> list[Tensor]:
    """The outputs of some batches, each after the update by the ones before."""
    outputs = []
    for number in range(BATCHES):
        outputs.append(outputs_of(batch(number)))
        outputs[-1].square().sum().backward()
    return [output.detach() for output in outputs]


def bag_sharder(is_ours: bool, **options: Any) -> EmbeddingBagCollectionSharder:
    return FusedEmbeddingBagCollectionSharder(RATE, **options) if is_ours else EmbeddingBagCollectionSharder(RATE)


def sequence_sharder(is_ours: bool) -> EmbeddingCollectionSharder:
    return FusedEmbeddingCollectionSharder(RATE) if is_ours else EmbeddingCollectionSharder(RATE)


def collisions(configs: Sequence[Any]) -> Any:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule

    tables = {
        config.name: MCHManagedCollisionModule(
            zch_size=ROWS,
            device=CPU,
            input_hash_size=1000,
            eviction_interval=1000,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for config in configs
    }
    return ManagedCollisionCollection(tables, configs)


def bags_with_managed_collisions(is_ours: bool, **options: Any) -> Any:
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    inner, sharder = bags(), bag_sharder(is_ours, **options)
    module = ManagedCollisionEmbeddingBagCollection(inner, collisions(inner.embedding_bag_configs()))
    outer = ManagedCollisionEmbeddingBagCollectionSharder(sharder, ManagedCollisionCollectionSharder())
    return sharded(module, inner, sharder, outer)


def managed_collisions_of_bags(is_ours: bool) -> list[Tensor]:
    module = bags_with_managed_collisions(is_ours)
    return trained(lambda features: module(features)[0].wait().values())


def managed_collisions_of_sequences(is_ours: bool) -> list[Tensor]:
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

    inner, sharder = sequences(), sequence_sharder(is_ours)
    module = ManagedCollisionEmbeddingCollection(inner, collisions(inner.embedding_configs()))
    outer = ManagedCollisionEmbeddingCollectionSharder(sharder, ManagedCollisionCollectionSharder())
    wrapped = sharded(module, inner, sharder, outer)

    def values(features: KeyedJaggedTensor) -> Tensor:
        of_features = wrapped(features)[0].wait()
        return torch.cat([of_features[feature].values() for feature in FEATURES])

    return trained(values)


def feature_processors(is_ours: bool) -> list[Tensor]:
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    inner, sharder = bags(weighted=True), bag_sharder(is_ours)
    module = FeatureProcessedEmbeddingBagCollection(
        inner, PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MOST_IDS + 1))
    )
    wrapped = sharded(module, inner, sharder, FeatureProcessedEmbeddingBagCollectionSharder(sharder))
    return trained(lambda features: wrapped(features).wait().values())


def parts_of_batches(is_ours: bool) -> list[Tensor]:
    """Ids that the next batch has again are looked up apart from the others, in a copy of the batch's context."""
    from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

    inner, sharder = sequences(), sequence_sharder(is_ours)
    wrapped = sharded(PECEmbeddingCollection(inner), inner, sharder, PECEmbeddingCollectionSharder(sharder))
    look_up = wrapped.compute_and_output_dist_in_partition
    has_lists = "List" in str(inspect.signature(look_up).parameters["features"].annotation)  # by sharding type, since 1.9
    before: tuple[Any, Any] = (None, None)
    outputs = []
    for number in range(BATCHES):
        context = wrapped.create_context()
        features = wrapped.input_dist(context, batch(number)).wait().wait()
        (parts,) = ((found[0] if isinstance(found, tuple) else found.forward) for found in
                    (awaitable.wait() for awaitable in wrapped.overlap_dist(context, features, *before)))  # fmt: skip
        again, others = (
            look_up(context, *([of_part], [parts.splits]) if has_lists else (of_part, parts.splits), is_again)
            for of_part, is_again in ((parts.ol_features, True), (parts.nol_features, False))
        )
        merged = wrapped.merge_partitioned_embeddings(context, again, others, [parts])
        outputs += [merged[feature].values().detach() for feature in FEATURES]
        before = context, features
    return outputs


@pytest.mark.parametrize(
    "outputs_of", [managed_collisions_of_bags, managed_collisions_of_sequences, feature_processors, parts_of_batches]
)
def test_wrappers_give_what_they_give_with_torchrecs_sharder(outputs_of: Callable[[bool], list[Tensor]]) -> None:
    if outputs_of is parts_of_batches:
        pytest.importorskip("torchrec.distributed.pec_embedding")
    ours, theirs = (run_ranks(RANKS, outputs_of, is_ours) for is_ours in (True, False))
    for own, their in zip(ours, theirs, strict=True):
        assert len(own) == len(their)
        assert all(map(torch.equal, own, their))


def said_of_managed_collisions(strict: bool) -> tuple[dict[str, str], str | None]:
    """The paths of the tables after a batch, and what is said against it."""
    module = bags_with_managed_collisions(is_ours=True, strict=strict)
    try:
        module(batch(0))[0].wait()
    except UsageError as error:
        return module._embedding_module.paths, str(error)
    return module._embedding_module.paths, None


def test_managed_collisions_of_bags_are_said_to_take_torchrecs_path() -> None:
    why = "a lookup by compute() and a delivery by output_dist()"
    for paths, error in run_ranks(RANKS, said_of_managed_collisions, False):
        assert paths == {f"table_{number}": f"torchrec: {why}" for number in range(TABLES)}
        assert error is None
    for _, error in run_ranks(RANKS, said_of_managed_collisions, True):
        assert error is not None
        assert f"does not cover {why};" in error


def columns_by_two_calls(in_feature_order: bool) -> tuple[list[str], list[str]]:
    """The order of features in an output of ``forward``, and of ``compute`` and ``output_dist``."""
    sharder = bag_sharder(is_ours=True, in_feature_order=in_feature_order)
    inner = bags()
    module = sharded(inner, inner, sharder, sharder, on_one_rank=(0, 2))
    context = module.create_context()
    features = module.input_dist(context, batch(0)).wait().wait()
    by_two = module.output_dist(context, module.compute(context, features)).wait()
    return module(batch(0)).wait().keys(), by_two.keys()


def test_in_feature_order_deliveries_in_two_calls_have_it_too() -> None:
    by_sharding_type = ["feature_0", "feature_2", "feature_1"]
    for in_feature_order, expected in ((True, FEATURES), (False, by_sharding_type)):
        assert run_ranks(RANKS, columns_by_two_calls, in_feature_order) == [(expected, expected)] * RANKS
