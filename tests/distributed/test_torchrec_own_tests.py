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

# The wheel's tests import the name of a sharder for sequences, and the wheel does not have it.
_sequences = ModuleType("torchrec.distributed.tests.test_sequence_model")
_sequences.TestEmbeddingCollectionSharder = object  # type: ignore[attr-defined]
sys.modules.setdefault("torchrec.distributed.tests", ModuleType("torchrec.distributed.tests"))
sys.modules.setdefault(_sequences.__name__, _sequences)

pytest.importorskip("hypothesis")
theirs = pytest.importorskip("torchrec.distributed.test_utils.test_model_parallel")
their_states = pytest.importorskip("torchrec.distributed.test_utils.test_model_parallel_base")
their_sharding = pytest.importorskip("torchrec.distributed.test_utils.test_sharding")

from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.sharding_plan import get_default_sharders  # noqa: E402
from torchrec.distributed.types import ShardingType  # noqa: E402

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder  # noqa: E402
from tests.distributed.launch import run_ranks  # noqa: E402


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
