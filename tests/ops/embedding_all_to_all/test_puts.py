"""The lookup and its gradient between hosts, in slices that kernels put: under Triton's interpreter, by a model of NVSHMEM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dlrm_fused.ops.embedding_all_to_all import kernel, scatter
from tests.distributed.launch import on_hosts, run_ranks
from tests.ops.embedding_all_to_all.test_kernels import TOLERANCE, assert_noticed, largest_difference, run_world, small_world
from tests.ops.embedding_all_to_all.world import Result, Traffic, mixed_world
from tests.ops.test_across_hosts import HOSTS
from tests.symmetric.put_model import use_model, with_puts
from tests.symmetric.test_puts import accept_the_slice_before, count_twice, put_before_it_is_complete

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("hosts", "epochs"),
    [
        (HOSTS[0], 12),
        *(pytest.param(hosts, 12, marks=pytest.mark.slow) for hosts in HOSTS[1:]),
        pytest.param(HOSTS[0], 200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)]),
    ],
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


def use_in_kernels(name: str, function: object) -> None:
    for module in (kernel, scatter):
        if hasattr(module, name):
            setattr(module, name, function)


def signal_before_data() -> None:
    network = use_model()
    network.signals_first = True
    network.longest_delay = 0.01


def wait_for_the_slice_before() -> None:
    """In a network so slow that slices come after they are read, also where the interpreter takes its time."""
    use_model().longest_delay = 0.2
    use_in_kernels("wait_for_slice", accept_the_slice_before)


MUTANTS: dict[str, Callable[[], None]] = {
    "signal before data": signal_before_data,
    "put before it is complete": lambda: use_in_kernels("put_slice", put_before_it_is_complete),
    "slice counted twice": lambda: use_in_kernels("put_slice", count_twice),
    "wait for the slice before": wait_for_the_slice_before,
}


# Its network is so slow that ranks poll for a long time.
LONG = {"wait for the slice before"}


@pytest.mark.parametrize("mutant", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in MUTANTS])
def test_a_broken_protocol_is_noticed(mutant: str) -> None:
    assert_noticed(lambda: run_ranks(4, on_hosts, HOSTS[0], with_puts, run_mutant, mutant))


def run_mutant(mutant: str) -> Result:
    MUTANTS[mutant]()
    return run_world(small_world, Traffic(), 10, 5, None)
