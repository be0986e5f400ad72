"""Kernels whose ranks lie on several hosts, under Triton's interpreter: stores inside a host, messages between hosts."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.common.scatter_rows import ItemsByRank
from dlrm_fused.ops.moe.op import expert_layer_with_slots
from tests.distributed.launch import cpu_group, on_hosts, run_ranks
from tests.ops.all_gather_gemm import cases as layers
from tests.ops.embedding_all_to_all.test_kernels import TOLERANCE, largest_difference, run_world, small_world
from tests.ops.embedding_all_to_all.world import Traffic, mixed_world
from tests.ops.gemm_all_to_all import cases as products
from tests.ops.gemv_all_reduce import test_op as sums
from tests.ops.moe import cases as experts
from tests.ops.test_across_hosts import EQUAL, GATHERED, HOSTS, SCATTERED, SMALL

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("hosts", [HOSTS[0], *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in HOSTS[1:])])
def test_epochs_of_the_lookup_with_uneven_batches_and_a_straggler(hosts: tuple[int, ...]) -> None:
    results = run_ranks(4, on_hosts, hosts, run_world, small_world, Traffic(longest_bag=3, largest_batch=2), 12, 3, None)
    assert [result.epochs for result in results] == [12] * 4
    assert largest_difference(results) < TOLERANCE


@pytest.mark.parametrize(
    ("traffic", "tolerance"), [(Traffic(), TOLERANCE), (Traffic(forward_wire=torch.float16, backward_wire=torch.float16), 5e-3)]
)
def test_poolings_dims_and_index_dtypes_of_all_kinds(traffic: Traffic, tolerance: float) -> None:
    results = run_ranks(3, on_hosts, (0, 1, 1), run_world, mixed_world, traffic, 3, 1, None)
    assert largest_difference(results) < tolerance


def forbid_sorting() -> None:
    """On a rank: fail where what goes to each rank is found by a sort, after which the host asks the device for numbers."""
    mock.patch.object(ItemsByRank, "of", side_effect=AssertionError("the host waits for the device")).start()


def test_products_and_their_gradients() -> None:
    products.check([EQUAL, SMALL], 4, calls=2, with_gradients=True, hosts=HOSTS[0], mutate=forbid_sorting)


def test_products_of_sharded_rows_and_their_gradients() -> None:
    layers.check([GATHERED, SCATTERED], 4, calls=2, with_gradients=True, hosts=HOSTS[0], mutate=forbid_sorting)


def test_sums_are_the_same_bits_on_all_ranks() -> None:
    fused = run_ranks(4, on_hosts, HOSTS[0], sums.results_and_gradients, "auto")
    for own, wanted in zip(fused, run_ranks(4, sums.results_and_gradients, None), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(own["out"], fused[0]["out"])


def run_experts(cases: list[experts.Case]) -> list[tuple[experts.Results, experts.Results]]:
    forbid_sorting()
    return experts.run_cases(cases)


def with_wrong_ids(tokens: int, case: experts.Case, generator: torch.Generator) -> Tensor:
    """Chosen with gaps, where some gaps are ids that do not exist, and some repeat one of the token's."""
    chosen = experts.with_gaps(tokens, case, generator)
    spoiled = torch.where(chosen == -1, torch.tensor([2**32 + 1, case.experts, 1 - 2**32]), chosen)
    is_repeated = (chosen[:, 1] == -1) & (chosen[:, 0] >= 0)
    spoiled[is_repeated, 1] = chosen[is_repeated, 0]
    return spoiled


@pytest.mark.parametrize("hosts", [HOSTS[2], HOSTS[3]])
def test_wrong_ids_of_experts_count_as_none_on_uneven_hosts(hosts: tuple[int, ...]) -> None:
    right = experts.Case("with gaps", (7, 0, 6, 3), 8, 3, experts.with_gaps)
    chosen = torch.cat([inputs.experts for inputs in experts.draw(right, 0)])
    by_rank = run_ranks(4, on_hosts, hosts, results_and_slots, replace(right, choose=with_wrong_ids))
    for (own, slots), wanted in zip(by_rank, experts.expected(right, 0), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(slots, torch.bincount(chosen[chosen >= 0], minlength=right.experts))


def results_and_slots(case: experts.Case) -> tuple[experts.Results, torch.Tensor]:
    """On a rank: the layer's result and gradients, and how many tokens of all ranks have each expert."""
    with cpu_group() as group:
        inputs, workspace = experts.draw(case, 0)[group.rank], experts.make_workspace(group, case)
        out, slots = expert_layer_with_slots(workspace, *inputs.arguments(), experts.SCALE)
        return experts.results(out, inputs), slots


def test_experts_are_the_dense_computation() -> None:
    case = experts.CASES[4][0]
    by_rank = run_ranks(4, on_hosts, HOSTS[0], run_experts, [case])
    for rank, wanted in enumerate(experts.expected(case, 0)):
        for own in by_rank[rank][0]:
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
