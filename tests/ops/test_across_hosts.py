"""Operators whose ranks lie on several hosts, on the CPU: they compute what they compute on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlrm_fused.ops.schedules import Pair
from tests.distributed.launch import on_hosts, run_ranks
from tests.ops.all_gather_gemm import cases as layers
from tests.ops.gemm_all_to_all import cases as products
from tests.ops.gemv_all_reduce import test_op as sums
from tests.ops.moe import cases as experts

# Two hosts with two ranks each, whose numbers may alternate; one rank beside three; and three hosts.
HOSTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 2)]
EQUAL, SMALL = products.Case(72, 40, rows=24), products.Case(40, 24, rows=48)
GATHERED, SCATTERED = layers.Case(Pair.all_gather_gemm, 24, 72, 40), layers.Case(Pair.gemm_reduce_scatter, 24, 72, 40)


@pytest.mark.parametrize("hosts", HOSTS)
def test_products_and_their_gradients_with_a_straggler(hosts: tuple[int, ...]) -> None:
    cases = [EQUAL, SMALL, products.Case(40, 32, rows=12, fp8=True)]
    products.check(cases, 4, calls=16, with_gradients=True, hosts=hosts)


@pytest.mark.parametrize("hosts", [*HOSTS, (0, 0, 1)])
def test_products_of_sharded_rows_and_their_gradients_with_a_straggler(hosts: tuple[int, ...]) -> None:
    cases = [GATHERED, SCATTERED, replace(GATHERED, rows=5), replace(SCATTERED, rows=5)]
    layers.check(cases, len(hosts), calls=18, with_gradients=True, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_sums_are_the_same_bits_on_all_ranks_and_those_of_the_reference(hosts: tuple[int, ...]) -> None:
    fused = run_ranks(4, on_hosts, hosts, sums.results_and_gradients, "auto")
    expected = run_ranks(4, sums.results_and_gradients, None)
    for own, wanted in zip(fused, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(own["out"], fused[0]["out"])


@pytest.mark.parametrize("hosts", HOSTS)
def test_experts_are_the_dense_computation(hosts: tuple[int, ...]) -> None:
    by_rank = run_ranks(4, on_hosts, hosts, experts.run_cases, experts.CASES[4])
    for number, case in enumerate(experts.CASES[4]):
        for rank, wanted in enumerate(experts.expected(case, number)):
            for own in by_rank[rank][number]:
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


def test_steps_of_experts_with_a_straggler_and_passes_in_flight_repeat_to_the_bit() -> None:
    case = experts.CASES[4][0]
    for rank, by_seed in enumerate(run_ranks(4, on_hosts, HOSTS[0], experts.run_steps, case, 40)):
        for seed, own in enumerate(by_seed):
            torch.testing.assert_close(own, experts.expected(case, seed)[rank], rtol=1e-5, atol=1e-5)
