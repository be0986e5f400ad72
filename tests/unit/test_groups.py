"""Sizes of tensor-parallel groups: what divides the ranks of every host and the heads, nothing else."""

from __future__ import annotations

import pytest

from dlrm_fused.config import ModelConfig
from dlrm_fused.errors import ConfigError
from dlrm_fused.sharding.groups import tensor_parallel_size


@pytest.mark.parametrize(
    ("asked", "heads", "hosts", "size"),
    [
        (0, 4, [4] * 4, 4),
        (2, 4, [4] * 4, 2),
        (1, 3, [2, 2], 1),
        (0, 4, [2] * 6, 2),
        (2, 4, [4] * 4 + [2] * 2, 2),
        (0, 4, [1], 1),
    ],
)
def test_the_size_asked_for_or_all_ranks_of_a_host(asked, heads, hosts, size):
    assert tensor_parallel_size(ModelConfig(tensor_parallel=asked, heads=heads), hosts) == size


@pytest.mark.parametrize(
    ("asked", "heads", "hosts", "message"),
    [
        (4, 8, [2, 2], r"model.tensor_parallel=4: allowed: 1, 2; .* the ranks of each host, 2, and model.heads=8"),
        (0, 4, [3] * 3, r"model.tensor_parallel=0, all 3 ranks of a host: allowed: 1; .* model.heads=4"),
        # Hosts of different sizes: the groups must fit into each.
        (0, 4, [4] * 4 + [2] * 2, r"all 4 ranks of a host: allowed: 1, 2; .* the ranks of each host, 2 and 4,"),
        (3, 3, [3] * 3 + [2] * 2, r"model.tensor_parallel=3: allowed: 1;"),
    ],
)
def test_other_sizes_are_refused_with_those_that_are_allowed(asked, heads, hosts, message):
    with pytest.raises(ConfigError, match=message):
        tensor_parallel_size(ModelConfig(tensor_parallel=asked, heads=heads), hosts)
