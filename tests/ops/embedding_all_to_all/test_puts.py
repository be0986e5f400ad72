"""The lookup and its gradient between hosts, in slices that kernels put: under Triton's interpreter, with a model of NVSHMEM."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import on_hosts, run_ranks
from tests.ops.embedding_all_to_all.test_kernels import TOLERANCE, largest_difference, run_world, small_world
from tests.ops.embedding_all_to_all.world import Traffic, mixed_world
from tests.ops.test_across_hosts import HOSTS
from tests.symmetric.put_model import with_puts

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("hosts", "epochs"),
    [(HOSTS[0], 12), *(pytest.param(hosts, epochs, marks=pytest.mark.slow) for hosts, epochs in zip(HOSTS, (200, 12, 12, 12)))],
)
def test_epochs_with_uneven_batches_a_straggler_and_a_rank_without_tables(hosts: tuple[int, ...], epochs: int) -> None:
    traffic = Traffic(longest_bag=3, largest_batch=2)
    results = run_ranks(4, on_hosts, hosts, with_puts, run_world, small_world, traffic, epochs, 3, None)
    assert [result.epochs for result in results] == [epochs] * 4
    assert largest_difference(results) < TOLERANCE


@pytest.mark.parametrize(
    ("traffic", "tolerance"), [(Traffic(), TOLERANCE), (Traffic(forward_wire=torch.float16, backward_wire=torch.float16), 5e-3)]
)
def test_poolings_dims_and_index_dtypes_of_all_kinds(traffic: Traffic, tolerance: float) -> None:
    results = run_ranks(3, on_hosts, (0, 1, 1), with_puts, run_world, mixed_world, traffic, 3, 1, None)
    assert largest_difference(results) < tolerance
