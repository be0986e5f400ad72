"""The expert layer between processes on the CPU: equal to plain loops over tokens, whoever gets how many of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dlrm_fused.ops.moe import expert_layer, expert_memory
from dlrm_fused.ops.moe import workspace as moe_workspace
from dlrm_fused.ops.moe.workspace import ExpertMemory
from tests.distributed.launch import cpu_group, on_hosts, run_ranks
from tests.ops.moe.cases import (
    CASES,
    SCALE,
    Case,
    all_to_one,
    draw,
    evenly,
    expected,
    make_workspace,
    results,
    run_cases,
    run_float32_weights,
    run_fused,
    run_steps,
)
from tests.ops.sequence_all_to_all.test_op import WithoutGradient


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fused_and_reference_are_the_dense_computation(ranks: int) -> None:
    by_rank = run_ranks(ranks, run_cases, CASES[ranks])
    for number, case in enumerate(CASES[ranks]):
        for rank, wanted in enumerate(expected(case, number)):
            for own in by_rank[rank][number]:
                assert own.keys() == wanted.keys()
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


def test_sixteen_bits() -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        case = CASES[2][0]
        for rank, cases in enumerate(run_ranks(2, run_cases, [case], dtype)):
            for own in cases[0]:
                assert own["out"].dtype == own["dw_in"].dtype == dtype
                assert own["dgates"].dtype == torch.float32
                for key, wanted in expected(case, 0)[rank].items():
                    torch.testing.assert_close(own[key].float(), wanted, rtol=tolerance, atol=4 * tolerance)


def test_weights_in_float32_have_the_gradients_of_rounded_ones() -> None:
    for rounded, exact in run_ranks(2, run_float32_weights, CASES[2][0], torch.bfloat16):
        assert exact["dw_in"].dtype == exact["dw_out"].dtype == torch.float32
        for key, wanted in rounded.items():
            assert torch.equal(exact[key], wanted.to(exact[key].dtype)), key


def test_steps_with_a_straggler_and_passes_in_flight_repeat_to_the_bit() -> None:
    case = CASES[3][0]
    for rank, by_seed in enumerate(run_ranks(3, run_steps, case, 100)):
        for seed, own in enumerate(by_seed):
            torch.testing.assert_close(own, expected(case, seed)[rank], rtol=1e-5, atol=1e-5)


def gradients_where_rank_0_gives_none() -> dict[str, torch.Tensor]:
    with cpu_group() as group:
        case = CASES[2][0]
        workspace, inputs = make_workspace(group, case), draw(case, 0)[group.rank]
        out = expert_layer(workspace, *inputs.arguments(), SCALE)
        return results(WithoutGradient.apply(out) if group.rank == 0 else out, inputs)


def test_a_rank_whose_output_gets_no_gradient_sends_zeros() -> None:
    whole = expected(CASES[2][0], 0, without_gradient=[0])
    for own, wanted in zip(run_ranks(2, gradients_where_rank_0_gives_none), whole, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


def opcheck(activation: str, dtype: torch.dtype) -> None:
    """The operator with tokens of a dtype, and weights in float32."""
    with cpu_group() as group:
        case = replace(CASES[group.world_size][1], activation=activation)
        workspace = make_workspace(group, case, dtype=dtype)
        x, *others = draw(case, seed=1)[group.rank].arguments()
        arguments = x.detach().to(dtype).requires_grad_(), *others
        torch.library.opcheck(torch.ops.dlrm_fused.expert_layer.default, (*arguments, SCALE, workspace.handle))


@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", torch.float32), ("swiglu", torch.float32), ("silu", torch.bfloat16)]
)
def test_opcheck(activation: str, dtype: torch.dtype) -> None:
    run_ranks(2, opcheck, activation, dtype)


def test_opcheck_between_hosts() -> None:
    run_ranks(2, on_hosts, (0, 1), opcheck, "silu", torch.float32)


def graphs_for_numbers_of_tokens() -> int:
    """How many graphs a compiler makes for calls with 3 to 6 tokens, when it is told that the number changes."""
    with cpu_group() as group:
        case, counter = Case("alone", (6,), 4, 2, evenly), CompileCounter()
        workspace, inputs = make_workspace(group, case), draw(case, 0)[0]
        compiled = torch.compile(expert_layer, backend=counter, fullgraph=True, dynamic=True)
        for tokens in range(3, 7):
            x, experts, gates = (tensor[:tokens].detach() for tensor in (inputs.x, inputs.experts, inputs.gates))
            compiled(workspace, x, experts, gates, inputs.w_in, inputs.w_out)
        return counter.frame_count


def test_a_compiler_makes_one_graph_for_all_numbers_of_tokens() -> None:
    assert run_ranks(1, graphs_for_numbers_of_tokens) == [1]


WORST = Case("all tokens to one rank, which has fewer experts than a token wants", (5, 5), 4, 3, all_to_one)


def memory_of_the_worst_case() -> tuple[int, int, int, list[int]]:
    with cpu_group() as group:
        before = len(group._memories)
        workspace = make_workspace(group, WORST, max_tokens=5)
        allocated = sum(memory.size for memory in group._memories[before:])
        held = torch.ops.dlrm_fused.expert_layer(*draw(WORST, 1)[group.rank].arguments(), 1.0, workspace.handle)
        _, _, received, hidden, activated, combined, _, bounds, *_ = held
        rows_bytes, combined_bytes = received.numel(), combined.numel()
        assert hidden.nbytes + activated.nbytes == workspace.memory.hidden_bytes(WORST.hidden)
        return allocated, rows_bytes, combined_bytes, bounds.tolist()


def test_memory_is_as_predicted_and_the_worst_case_fills_it() -> None:
    predicted = expert_memory(
        WORST.ranks, WORST.experts, WORST.top_k, max_tokens=5, width=WORST.width, dtype=torch.float32, with_kernels=False
    )
    by_rank = run_ranks(2, memory_of_the_worst_case)
    for allocated, received_bytes, combined_bytes, _ in by_rank:
        assert allocated == predicted.symmetric_bytes
        assert received_bytes == predicted.received_bytes
        assert combined_bytes == predicted.combined_bytes
    assert predicted.rows == 2 * 5 * 2
    assert by_rank[0][3][-1] == predicted.rows
    assert by_rank[1][3] == [0, 10, 10]


@pytest.mark.parametrize(("hosts", "served"), [((0, 1), 1), ((0, 0, 1, 1), 1), ((0, 1, 1, 2), 3)])
def test_memory_between_hosts_has_room_for_the_results_of_guests(hosts: tuple[int, ...], served: int) -> None:
    case = replace(WORST, tokens=(5,) * len(hosts))
    for own in run_ranks(len(hosts), on_hosts, hosts, memory_of, case):
        assert own == expert_memory(
            case.ranks, case.experts, case.top_k, max_tokens=5, width=case.width, dtype=torch.float32, with_kernels=False,
            served=served,
        )  # fmt: skip


def memory_of(case: Case) -> ExpertMemory:
    """Of a workspace that has seen all tokens of all ranks at the experts of rank 0."""
    with cpu_group() as group:
        workspace = make_workspace(group, case, max_tokens=5)
        run_fused(workspace, draw(case, 1)[group.rank])
        return workspace.memory


def test_memory_with_kernels_has_room_for_the_pads_of_each_expert() -> None:
    few = expert_memory(4, 32, 2, max_tokens=1024, width=64, dtype=torch.bfloat16, with_kernels=True)
    many = expert_memory(4, 8, 8, max_tokens=1024, width=64, dtype=torch.bfloat16, with_kernels=True)
    assert few.tile_rows == many.tile_rows == 128
    assert few.rows == 4 * 1024 * 2 + 7 * 128, "the rows of eight experts, which cannot all be one too many"
    assert many.rows == 4 * 1024 * 2 + 128
    assert many.hidden_bytes(64, "swiglu") == 1.5 * many.hidden_bytes(64)


@pytest.mark.parametrize(("tokens", "tile_rows"), [(8192, 128), (4096, 64), (1024, 32), (768, 32), (512, 16), (1, 16)])
def test_tiles_have_few_rows_where_experts_have_few(tokens: int, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = expert_memory(4, 128, 1, tokens, 64, torch.bfloat16, with_kernels=True)
    assert on_gpus.tile_rows == max(64, tile_rows), "smaller ones are not the default there yet"
    monkeypatch.setattr(moe_workspace, "_FEWEST_TILE_ROWS", 16)
    memory = expert_memory(4, 128, 1, tokens, 64, torch.bfloat16, with_kernels=True)
    assert memory.tile_rows == tile_rows
    assert memory.rows <= 4 * tokens + 32 * (tile_rows - 1)
