"""The kernels of the expert layer, in real processes under Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.ops.moe import between_hosts, expert_layer_with_slots
from dlrm_fused.ops.moe import dispatch as routing
from dlrm_fused.ops.moe.activations import ACTIVATIONS
from dlrm_fused.ops.moe.between_hosts import all_tokens_cross
from dlrm_fused.ops.moe.dispatch import count_slots, place_experts, route
from dlrm_fused.ops.moe.steps import HostSteps, KernelSteps
from dlrm_fused.symmetric import Channel
from tests.distributed.launch import cpu_group, on_hosts, run_ranks
from tests.ops.moe.cases import (
    CASES,
    Case,
    Results,
    all_to_one,
    draw,
    expected,
    make_workspace,
    run_cases,
    run_float32_weights,
    run_fused,
    run_steps,
    with_gaps,
)

pytestmark = pytest.mark.interpreted

# 70 rows of an expert are more than a tile of 64.
LONG = Case("two tiles of two experts, and none of the others", (40, 30), 4, 2, all_to_one)
# 75 rows of an expert are two tiles of 64. The other cases have tiles of 16, which are multiplied the other way round.
GATED = Case("SwiGLU in tiles of 64", (40, 35), 2, 2, all_to_one, activation="swiglu")
CASE_OF_RANKS = {1: CASES[1][1], 2: LONG, 3: CASES[3][0], 4: CASES[4][0]}


@pytest.mark.parametrize(
    "case", [*CASE_OF_RANKS.values(), CASES[1][3], CASES[2][3], GATED], ids=lambda case: f"{case.ranks} {case.name}"
)
def test_the_kernels_are_the_dense_computation(case: Case) -> None:
    ranks = case.ranks
    by_rank = run_ranks(ranks, run_cases, [case])
    for own, wanted in zip(by_rank, expected(case, 0), strict=True):
        torch.testing.assert_close(own[0][0], wanted, rtol=1e-5, atol=1e-5)


def test_weights_in_float32_have_the_gradients_of_rounded_ones() -> None:
    """In fp16: the interpreter has no product of bf16."""
    for rounded, exact in run_ranks(2, run_float32_weights, CASES[2][0], torch.float16):
        assert exact["dw_in"].dtype == exact["dw_out"].dtype == torch.float32
        for key, wanted in rounded.items():
            assert torch.equal(exact[key], wanted.to(exact[key].dtype)), key


SHORT = Case("steps", (3, 4), 2, 2, with_gaps, hidden=4)


def test_steps_with_a_straggler_and_passes_in_flight_repeat_to_the_bit() -> None:
    for rank, by_seed in enumerate(run_ranks(2, run_steps, SHORT, 8)):  # each of five epochs
        for seed, own in enumerate(by_seed):
            torch.testing.assert_close(own, expected(SHORT, seed)[rank], rtol=1e-5, atol=1e-5)


def run_between_hosts(case: Case, all_cross: bool) -> tuple[Results, Tensor, Tensor]:
    """On a rank: results, and how many tokens have each expert as the layer says: with the ids of the case, and with wrong ones
    in place of none."""
    with cpu_group() as group, mock.patch.object(between_hosts, "all_tokens_cross", return_value=all_cross):
        workspace = make_workspace(group, case, max_tokens=9)  # more than there are
        found = run_fused(workspace, draw(case, 0)[group.rank])
        x, experts, *others = draw(case, 0)[group.rank].arguments()
        told = [
            expert_layer_with_slots(workspace, x, ids, *others)[1] for ids in (experts, with_wrong_ids(experts, case.experts))
        ]
        workspace.raise_fault()
        return found, *told


@pytest.mark.parametrize("all_cross", [True, False], ids=["all tokens cross", "those that cross are counted"])
@pytest.mark.parametrize("hosts", [(0, 1, 0), (0, 1, 2)])
def test_between_hosts_the_kernels_are_the_dense_computation(hosts: tuple[int, ...], all_cross: bool) -> None:
    case = Case("a rank has no tokens", (7, 0, 4), 6, 3, with_gaps)
    chosen = torch.cat([inputs.experts for inputs in draw(case, 0)])
    slots = torch.bincount(chosen[chosen >= 0], minlength=case.experts)
    by_rank = run_ranks(3, on_hosts, hosts, run_between_hosts, case, all_cross)
    for (found, *told), wanted in zip(by_rank, expected(case, 0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for of_ids in told:
            assert torch.equal(of_ids, slots)


def test_all_tokens_cross_where_few_do_so_in_vain() -> None:
    """On two hosts a fourth of the tokens have both of their experts on their own."""
    assert all_tokens_cross(hosts=2, top_k=2, max_tokens=4096, row_bytes=2048)
    assert not all_tokens_cross(hosts=2, top_k=2, max_tokens=4096, row_bytes=2064)
    assert all_tokens_cross(hosts=2, top_k=8, max_tokens=65536, row_bytes=4096)
    assert not all_tokens_cross(hosts=8, top_k=2, max_tokens=4096, row_bytes=2048)


EXPERTS, TOP_K, TILE_ROWS = 39, 3, 4


def choose(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
    chosen[torch.rand(chosen.shape, generator=generator) < 0.2] = -1
    return chosen


def with_wrong_ids(experts: Tensor, count: int = EXPERTS) -> Tensor:
    """What was none becomes an id that does not exist, or one that the token has already."""
    spoiled = torch.where(experts == -1, 2**32 + 5, experts)
    spoiled[:, 1:2] = spoiled[:, 1:2].where(spoiled[:, 1:2] < count, -5)
    is_repeated = (experts[:, 2] == -1) & (experts[:, 0] >= 0)
    spoiled[is_repeated, 2] = experts[is_repeated, 0]
    return spoiled


def routes_of_calls(tokens: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """As they should be, and with wrong ids."""
    routing._SCAN_CHUNKS = 2  # so that there is more than one step
    with cpu_group() as group:
        channel = Channel(group, "routes", 60.0)
        window = ReceiveWindow(group.allocate("counts", group.world_size * EXPERTS * 4), channel, offset=0, fingerprint=1)
        chosen = choose(tokens[group.rank], group.rank)
        seen = []
        for experts in (chosen, with_wrong_ids(chosen)):
            targets, groups, slots = route(experts, window, count=EXPERTS, tile_rows=TILE_ROWS, rows_per_rank=10_000)
            seen.append((targets, groups.bounds, groups.local_from, slots))
        dist.barrier()
        channel.raise_fault()
        return seen


def test_routes_are_those_of_the_host_and_wrong_ids_count_as_none() -> None:
    tokens = [300, 0, 140]
    by_rank = run_ranks(len(tokens), routes_of_calls, tokens)
    chosen = [choose(count, rank).flatten() for rank, count in enumerate(tokens)]
    counted = [count_slots(slots, EXPERTS) for slots in chosen]
    counts = torch.stack([counts for counts, _ in counted])
    for rank, (slots, (_, positions)) in enumerate(zip(chosen, counted, strict=True)):
        first_rows, groups = place_experts(counts, rank, TILE_ROWS)
        wanted = torch.where(slots >= 0, slots // 13 * 10_000 + first_rows[rank][slots] + positions, -1)
        for targets, bounds, local_from, slots_of_all in by_rank[rank]:
            assert torch.equal(slots_of_all, counts.sum(0))
            assert torch.equal(targets, wanted.int())
            assert torch.equal(bounds, groups.bounds)
            assert torch.equal(local_from, groups.local_from)


def test_rows_of_a_rank_are_those_after_it_first_and_its_own_last() -> None:
    # Rank 1 of 3 has expert 1, in tiles of 4: three rows of rank 2, two of rank 0, then four of its own.
    counts = torch.tensor([[1, 2, 0], [0, 4, 0], [0, 3, 5]])
    first_rows = [int(row) for row in place_experts(counts, 1, TILE_ROWS)[0][:, 1]]
    assert first_rows == [3, 5, 0]
    _, groups = place_experts(counts, 1, TILE_ROWS)
    assert groups.bounds.tolist() == [0, 3]
    assert groups.local_from.tolist() == [2]


def test_sums_and_gradients_of_gates_leave_out_slots_without_target() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, gates = torch.randn(12, 2052, generator=generator), torch.randn(4, 3, generator=generator)
    gradient = torch.randn(4, 2052, generator=generator)
    targets = torch.tensor([3, -1, 4, -1, -1, -1, 0, 1, 2, 7, 8, -1], dtype=torch.int32)
    slots[targets < 0] = torch.nan
    kernels, host = (kind(ACTIVATIONS["silu"]) for kind in (KernelSteps, HostSteps))
    for weights in (gates, None):
        torch.testing.assert_close(
            kernels.sum_slots(slots, targets, weights, 4, 3), host.sum_slots(slots, targets, weights, 4, 3)
        )
    torch.testing.assert_close(
        kernels.gates_gradient(gradient, slots, targets, 3),
        host.gates_gradient(gradient, slots, targets, 3),
        rtol=1e-4,
        atol=1e-4,
    )


def test_pads_become_zeros_and_nothing_else() -> None:
    groups = Groups(16, torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    rows, destinations = torch.full((64, 12), torch.nan), torch.full((64,), -1, dtype=torch.int32)
    is_used = torch.cat([torch.arange(19), torch.arange(32, 33)])
    destinations[is_used] = 5
    KernelSteps(ACTIVATIONS["silu"]).zero_pads(rows, destinations, groups)
    is_zero = torch.ones(64, dtype=torch.bool)
    is_zero[is_used] = is_zero[48:] = False
    assert (rows[is_zero] == 0).all()
    assert rows[~is_zero].isnan().all()
