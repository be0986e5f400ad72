"""An estimator for TorchRec's planner: the cost of a plan whose pooled embeddings travel while others are still looked up.

TorchRec adds the time of the lookup and that of its communication. On the fused path a shard's results leave as soon as they
are pooled, so the longer of the two counts, forward as well as backward. Row-wise tables keep TorchRec's estimate: their
partial sums are added up when all have come, and their ids are sorted by rank before, which it leaves out, and small ones
cannot be replayed as CUDA graphs. A step with the tables of criteo_kaggle took 1.36 times as long with row-wise ones
(docs/performance/training.md). Between hosts the exchange takes longer than the lookup and shares the links with ids and
gradients, so that all of it counts, and ranks get as much of it (docs/scaleout.md).

::

    enumerator = fused_enumerator(topology, batch_size, constraints)
    planner = EmbeddingShardingPlanner(topology, batch_size, enumerator=enumerator, constraints=constraints)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardingOption
from torchrec.distributed.types import ShardingType

from dlrm_fused.sharding.support import TableSettings, reason_against

UNCOVERED_ACROSS_HOSTS = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


class FusedPerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's estimate, with the communication of fused tables that are not row-wise at the same time as their lookup.

    On the CPU the fused path delivers when all lookups are done, so the estimate is TorchRec's there, as it is between hosts.
    """

    def __init__(
        self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None, is_inference: bool = False
    ) -> None:
        super().__init__(topology, constraints, is_inference)
        self._overlaps = topology.compute_device == "cuda" and not _has_hosts(topology)

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Set ``perf`` of every shard of the options; further arguments are those of the TorchRec version."""
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options:
            if self._overlaps and option.sharding_type != ShardingType.ROW_WISE.value and _is_fused(option):
                for shard in option.shards:
                    shard.perf = shard.perf and overlapped(shard.perf)


class FusedEnumerator(EmbeddingEnumerator):
    """TorchRec's, without the plans across hosts that the fused path does not cover, for tables that have another one.

    Table-row-wise and grid plans add up partial results inside a host, so that each crosses between hosts once; the fused path
    does so for table- and column-wise plans, which have no partial results, and for row-wise ones.
    """

    def __init__(self, topology: Topology, *args: Any, **kwargs: Any) -> None:
        super().__init__(topology, *args, **kwargs)
        self._is_across_hosts = _has_hosts(topology)

    def enumerate(self, *args: Any, **kwargs: Any) -> list[ShardingOption]:
        options = super().enumerate(*args, **kwargs)
        if not self._is_across_hosts:
            return options
        has_other = {option.name for option in options if option.sharding_type not in UNCOVERED_ACROSS_HOSTS}
        return [o for o in options if o.sharding_type not in UNCOVERED_ACROSS_HOSTS or o.name not in has_other]


def _has_hosts(topology: Topology) -> bool:
    """More than one."""
    return topology.local_world_size < topology.world_size


def overlapped(perf: Perf) -> Perf:
    """The cost with communication hidden behind computation: only what lasts longer is left of it."""
    return replace(
        perf,
        fwd_comms=max(0.0, perf.fwd_comms - perf.fwd_compute),
        bwd_comms=max(0.0, perf.bwd_comms - perf.bwd_compute),
    )


def fused_enumerator(
    topology: Topology, batch_size: int, constraints: dict[str, ParameterConstraints] | None = None
) -> EmbeddingEnumerator:
    """The argument ``enumerator`` of TorchRec's planner, to plan for the fused path.

    Args:
        batch_size: samples of one rank.
    """
    return FusedEnumerator(
        topology,
        batch_size=batch_size,
        constraints=constraints,
        estimator=[FusedPerfEstimator(topology, constraints), EmbeddingStorageEstimator(topology, constraints)],
    )


def _is_fused(option: ShardingOption) -> bool:
    # The planner decides these; the settings of the lookup are the same for all of its options.
    return reason_against(TableSettings(option.name, option.sharding_type, option.compute_kernel), uses_kernels=True) is None
