"""Sizes of groups that share weights: what divides their ranks and what they share, nothing else."""

from __future__ import annotations

import pytest

from dlrm_fused.config import ExpertsConfig, ModelConfig
from dlrm_fused.errors import ConfigError
from dlrm_fused.sharding.groups import expert_parallel_size, tensor_parallel_size


@pytest.mark.parametrize(
    ("asked", "heads", "hosts", "size"),
    [
        (0, 4, [4] * 4, 4),
        (2, 4, [4] * 4, 2),
        (1, 3, [2, 2], 1),
        (0, 4, [2] * 6, 2),
        (2, 4, [4] * 4 + [2] * 2, 2),
        (0, 4, [1], 1),
        # Over hosts, if that is asked for.
        (4, 8, [2, 2, 2, 2], 4),
        (2, 4, [1, 3, 3, 3], 2),
    ],
)
def test_the_size_asked_for_or_all_ranks_of_a_host(asked, heads, hosts, size):
    assert tensor_parallel_size(ModelConfig(tensor_parallel=asked, heads=heads), hosts) == size


@pytest.mark.parametrize(
    ("asked", "heads", "hosts", "message"),
    [
        (4, 8, [2, 2], r"model.tensor_parallel=4: allowed: 1, 2; .* all ranks, 2, and model.heads=8"),
        (0, 4, [3] * 3, r"model.tensor_parallel=0, all 3 ranks of a host: allowed: 1; .* model.heads=4"),
        # Hosts of different sizes: the groups must fit into each.
        (0, 4, [4] * 4 + [2] * 2, r"all 4 ranks of a host: allowed: 1, 2; .* the ranks of each host, 2 and 4,"),
        (3, 3, [3] * 3 + [2] * 2, r"model.tensor_parallel=3: allowed: 1;"),
    ],
)
def test_other_sizes_are_refused_with_those_that_are_allowed(asked, heads, hosts, message):
    with pytest.raises(ConfigError, match=message):
        tensor_parallel_size(ModelConfig(tensor_parallel=asked, heads=heads), hosts)


@pytest.mark.parametrize(("asked", "count", "ranks", "size"), [(0, 8, 4, 4), (2, 8, 4, 2), (1, 3, 4, 1), (3, 6, 6, 3)])
def test_experts_are_shared_by_the_ranks_asked_for_or_by_all(asked, count, ranks, size):
    assert expert_parallel_size(ExpertsConfig(parallel=asked, count=count), ranks) == size


@pytest.mark.parametrize(
    ("asked", "count", "ranks", "message"),
    [
        (4, 8, 6, r"model.experts.parallel=4: allowed: 1, 2; it must divide the number of ranks, 6, and model.experts.count=8"),
        (0, 8, 3, r"model.experts.parallel=0, all 3 ranks: allowed: 1; .* ranks, 3, and model.experts.count=8"),
        (8, 8, 4, r"model.experts.parallel=8: allowed: 1, 2, 4;"),
    ],
)
def test_other_numbers_of_ranks_for_experts_are_refused_with_those_that_are_allowed(asked, count, ranks, message):
    with pytest.raises(ConfigError, match=message):
        expert_parallel_size(ExpertsConfig(parallel=asked, count=count), ranks)
