"""TorchRec's own tests of model parallelism, those that its wheel has and gloo can run, with our sharder in place of its own.

They compare a sharded model, after steps of training, with one that is not sharded. hypothesis draws their settings; without it
they are skipped. Those over several processes are exhaustive.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn

# The wheel's tests import the name of a sharder for sequences, and the wheel does not have it.
_sequences = ModuleType("torchrec.distributed.tests.test_sequence_model")
_sequences.TestEmbeddingCollectionSharder = object  # type: ignore[attr-defined]
sys.modules.setdefault("torchrec.distributed.tests", ModuleType("torchrec.distributed.tests"))
sys.modules.setdefault(_sequences.__name__, _sequences)

pytest.importorskip("hypothesis")
theirs = pytest.importorskip("torchrec.distributed.test_utils.test_model_parallel")
if not hasattr(theirs, "_ModelParallelBase"):
    pytest.skip("TorchRec 1.6 has its tests by other names", allow_module_level=True)
their_states = pytest.importorskip("torchrec.distributed.test_utils.test_model_parallel_base")
their_sharding = pytest.importorskip("torchrec.distributed.test_utils.test_sharding")
their_models = pytest.importorskip("torchrec.distributed.test_utils.test_model")

from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.sharding_plan import get_default_sharders  # noqa: E402
from torchrec.distributed.types import ShardingType  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingConfig  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingCollection  # noqa: E402

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder, FusedEmbeddingCollectionSharder  # noqa: E402
from tests.distributed.launch import run_ranks  # noqa: E402

# Ids of a sample that the model of sequences reads, at most.
LONGEST = 20


class OurTestSharder(their_sharding.TestEBCSharder, FusedEmbeddingBagCollectionSharder):  # type: ignore[misc,name-defined]
    """Ours, with the one sharding type and kernel that a test chooses."""


def our_default_sharders() -> list[Any]:
    others = [sharder for sharder in get_default_sharders() if type(sharder) is not EmbeddingBagCollectionSharder]
    return [FusedEmbeddingBagCollectionSharder(), *others]


@pytest.fixture(autouse=True)
def with_our_sharder() -> Iterator[None]:
    with (
        mock.patch.object(their_sharding, "TestEBCSharder", OurTestSharder),
        mock.patch.object(their_states, "get_default_sharders", our_default_sharders),
        mock.patch("torchrec.distributed.model_parallel.get_default_sharders", our_default_sharders),
    ):
        yield


class InOurProcesses(theirs.ModelParallelTestShared):  # type: ignore[misc,name-defined]
    """Their tests over several processes, which are forked from a server that has imported torchrec."""

    def _run_multi_process_test(self, *, callable: Callable[..., None], world_size: int = 2, **arguments: Any) -> None:
        run_ranks(world_size, _be_rank, callable, world_size, arguments)


def _be_rank(function: Callable[..., None], world_size: int, arguments: dict[str, Any]) -> None:
    function(rank=int(os.environ["RANK"]), world_size=world_size, **arguments)


class TestModules(their_states.ModelParallelSparseOnlyBase):  # type: ignore[misc,name-defined]
    backend = "gloo"


class TestStates(their_states.ModelParallelStateDictBase):  # type: ignore[misc,name-defined]
    backend = "gloo"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
class TestModels(InOurProcesses, theirs._ModelParallelBase):  # type: ignore[misc,name-defined]
    backend = "gloo"


class Sequences(their_models.TestSparseNNBase):  # type: ignore[misc,name-defined]
    """A model of rows in the order of their ids, in place of that of TorchRec's tests, which its wheel does not have."""

    def __init__(self, tables: list[EmbeddingConfig], num_float_features: int, **options: Any) -> None:
        devices = {name: options.get(name) for name in ("dense_device", "sparse_device")}
        super().__init__(tables=tables, **devices)
        self.rows = EmbeddingCollection(tables=tables, device=devices["sparse_device"])
        self.names = [name for table in tables for name in table.feature_names]
        self.dense = nn.Linear(num_float_features, 1, device=devices["dense_device"])
        self.positions = nn.Parameter(torch.linspace(-1, 1, LONGEST, device=devices["dense_device"]))

    def forward(self, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        found = self.rows(batch.idlist_features)
        padded = torch.stack([found[name].to_padded_dense(LONGEST).sum(dim=-1) for name in self.names])
        predicted = (self.dense(batch.float_features).squeeze(1) + (padded * self.positions).sum(dim=(0, 2))).sigmoid()
        return (nn.functional.binary_cross_entropy(predicted, batch.label), predicted) if self.training else predicted


class OurSequenceSharder(FusedEmbeddingCollectionSharder):
    """Ours, with the one sharding type that a test chooses."""

    def __init__(self, sharding_type: str) -> None:
        super().__init__({"learning_rate": 0.1}, strict=True)
        self._sharding_type = sharding_type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


@pytest.mark.parametrize("sharding_type", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE])
def test_sequences(sharding_type: ShardingType) -> None:
    """TorchRec's comparison of a model with one that is not sharded."""
    names = [f"feature_{number}" for number in range(4)]
    arguments = {
        "model_class": Sequences,
        "tables": [
            EmbeddingConfig(num_embeddings=11 * number + 11, embedding_dim=16, name=f"table_{number}", feature_names=[name])
            for number, name in enumerate(names)
        ],
        "embedding_groups": {"group_0": names},
        "sharders": [OurSequenceSharder(sharding_type.value)],
        "optim": EmbOptimType.EXACT_SGD,
        "backend": "gloo",
    }
    run_ranks(2, _be_rank, their_sharding.sharding_single_rank_test, 2, arguments)


def test_tables_that_move() -> None:
    """TorchRec's test of resharding, whose cases its wheel does not have; with gloo its column-wise ones fail."""

    class Resharding(InOurProcesses):
        def runTest(self) -> None:  # noqa: N802
            sharder = their_sharding.create_test_sharder(
                their_sharding.SharderType.EMBEDDING_BAG_COLLECTION.value,
                ShardingType.TABLE_WISE.value,
                EmbeddingComputeKernel.FUSED.value,
                device=self.device,
            )
            self._test_dynamic_sharding(sharders=[sharder], sharding_type=ShardingType.TABLE_WISE)

    case = Resharding()
    case.setUp(backend="gloo")
    case.runTest()
    case.tearDown()
