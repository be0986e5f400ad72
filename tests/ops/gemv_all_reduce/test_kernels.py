"""GEMV + AllReduce: the kernels themselves, in real processes under Triton's interpreter."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce import kernel as gemv_kernel
from dlrm_fused.ops.gemv_all_reduce import tuning as gemv_tuning
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks
from dlrm_fused.ops.schedules import rule, schedule
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import cpu_group, run_ranks
from tests.ops.checked_calls import SMALL_TILES

pytestmark = pytest.mark.interpreted

ONE_SHOT = Blocks(columns=16, depth=16, splits=1, warps=1, stages=2, two_shot=False, flagged=False)
SPLIT = replace(ONE_SHOT, splits=2)
TWO_SHOT = replace(ONE_SHOT, two_shot=True)
SPLIT_TWO_SHOT = replace(SPLIT, two_shot=True)
FLAGGED = replace(SPLIT_TWO_SHOT, splits=3, flagged=True)
# All programs of a norm are resident; the interpreter has one at a time.
ONE_TILE = replace(ONE_SHOT, columns=128)


@dataclass(frozen=True)
class Case:
    """One call: x [m, k] times weight [n, k] on each rank."""

    m: int
    n: int
    k: int
    blocks: Blocks = ONE_SHOT
    with_bias: bool = False
    with_residual: bool = False
    with_norm: bool = False
    schedule: str = "auto"

    def draw(self, ranks: int, seed: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor | None, Any, Any]:
        """x and weight of all ranks, bias, residual, norm_weight."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return (
            [normal(self.m, self.k) for _ in range(ranks)],
            [normal(self.n, self.k) for _ in range(ranks)],
            normal(self.n) if self.with_bias else None,
            normal(self.m, self.n) if self.with_residual else None,
            normal(self.n) if self.with_norm else None,
        )


def expected(case: Case, ranks: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """In fp64."""
    xs, weights, bias, residual, norm_weight = case.draw(ranks, seed, dtype)
    out = sum((x.double() @ weight.double().T for x, weight in zip(xs, weights, strict=True)), torch.zeros(1))
    out = out + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())
    if norm_weight is None:
        return out, None
    return out, out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6) * norm_weight.double()


Results = list[tuple[Tensor, Tensor | None]]


def run_calls(
    cases: list[Case], calls: int, dtype: torch.dtype, straggler: int | None, mutate: Callable[[], None] | None
) -> Results:
    """Calls of all cases in turn through one workspace, with delays of its own on each rank."""
    if mutate is not None:
        mutate()
    with cpu_group() as group:
        most_rows, most_columns = max(case.m for case in cases), max(case.n for case in cases)
        workspace = GemvWorkspace(
            group, name="sum", max_columns=most_columns, max_rows=most_rows, dtype=dtype, timeout_seconds=100.0
        )
        delays = random.Random(group.rank)
        results: Results = []
        gemm_tuning.override(SMALL_TILES)
        for call in range(calls):
            case = cases[call % len(cases)]
            xs, weights, bias, residual, norm_weight = case.draw(group.world_size, call, dtype)
            if delays.random() < 0.3 or group.rank == straggler:
                time.sleep(delays.uniform(0, 0.02))
            gemv_tuning.override(case.blocks)
            x, weight = xs[group.rank], weights[group.rank]
            results.append(gemv_all_reduce(workspace, x, weight, bias, residual, norm_weight, schedule=case.schedule))
        workspace.raise_fault()
        return results


def check(
    cases: list[Case],
    ranks: int,
    calls: int,
    dtype: torch.dtype = torch.float32,
    straggler: int | None = None,
    mutate: Callable[[], None] | None = None,
) -> None:
    """All ranks have the same bits, and those are right to one rounding."""
    by_rank = run_ranks(ranks, run_calls, cases, calls, dtype, straggler, mutate)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for call in range(calls):
        wanted = expected(cases[call % len(cases)], ranks, call, dtype)
        for number, (right, own) in enumerate(zip(wanted, by_rank[0][call], strict=True)):
            assert (right is None) == (own is None)
            if right is None or own is None:
                continue
            scale = 8 if number else 1  # the norm is taken of rounded values
            torch.testing.assert_close(own.double(), right, rtol=scale * tolerance, atol=scale * tolerance)
            for other in by_rank[1:]:
                assert torch.equal(other[call][number], own), f"call {call}: ranks differ"


@pytest.mark.parametrize("blocks", [ONE_SHOT, SPLIT, TWO_SHOT, SPLIT_TWO_SHOT, FLAGGED], ids=str)
def test_sums_with_bias_and_residual(blocks: Blocks) -> None:
    full = Case(5, 64, 40, blocks, with_bias=True, with_residual=True)
    check([full, Case(1, 50, 64, blocks)], ranks=2, calls=2)


def test_sixteen_bits() -> None:
    # The interpreter has no product of bf16.
    cases = [Case(3, 48, 32, blocks, with_residual=blocks.two_shot) for blocks in (ONE_SHOT, TWO_SHOT, FLAGGED)]
    check(cases, ranks=2, calls=6, dtype=torch.float16)


@pytest.mark.parametrize("two_shot", [False, True])
def test_norm_of_the_result(two_shot: bool) -> None:
    blocks = replace(ONE_TILE, two_shot=two_shot)
    check([Case(4, 96, 32, blocks, with_residual=True, with_norm=True)], ranks=1 if two_shot else 2, calls=3)


@pytest.mark.parametrize("blocks", [ONE_SHOT, TWO_SHOT, FLAGGED], ids=str)
def test_a_product_of_the_library_is_added_up(blocks: Blocks) -> None:
    full = Case(20, 64, 40, blocks, with_bias=True, with_residual=True, schedule="product")
    check([full, Case(17, 50, 64, blocks, schedule="product")], ranks=2, calls=2, dtype=torch.float16)


def test_a_product_of_the_library_has_a_norm_and_follows_one_of_the_kernel() -> None:
    with_norm = Case(18, 96, 32, ONE_TILE, with_residual=True, with_norm=True, schedule="product")
    check([with_norm, Case(3, 64, 32, schedule="kernel")], ranks=3, calls=4, dtype=torch.float16, straggler=2)


def test_one_rank() -> None:
    check([Case(2, 32, 32, SPLIT, with_bias=True)], ranks=1, calls=2)


MIXED = [Case(1, 48, 16), Case(2, 64, 32, SPLIT_TWO_SHOT), Case(2, 33, 16, SPLIT), Case(1, 64, 16, FLAGGED)]


@pytest.mark.parametrize(("ranks", "calls"), [(2, 30), (3, 8), (4, 4)])
def test_calls_of_mixed_shapes_with_a_straggler(ranks: int, calls: int) -> None:
    check(MIXED, ranks=ranks, calls=calls, straggler=1)


def test_many_rows_are_summed_by_chunks() -> None:
    check([Case(70, 40, 16, with_bias=True), Case(65, 64, 16, with_residual=True), Case(2, 32, 16)], ranks=3, calls=6)


def test_schedules_may_follow_each_other() -> None:
    few, many = Case(2, 32, 16), Case(70, 32, 16, with_residual=True)
    check([few, many, replace(many, schedule="scatter"), few, replace(many, schedule="copies")], ranks=2, calls=10, straggler=1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["scatter", "copies"])
def test_products_go_to_the_ranks_that_add_them_up(schedule: str, ranks: int) -> None:
    cases = [
        Case(72, 36, 20, with_bias=True, with_residual=True, schedule=schedule),
        Case(66, 48, 16, with_residual=True, with_norm=True, schedule=schedule),
    ]
    check(cases, ranks=ranks, calls=6, straggler=ranks - 1)


def operands_that_are_kept() -> list[str]:
    """The schedules by which a workspace keeps an operand of a call alive."""
    kept = []
    with cpu_group() as group:
        workspace = GemvWorkspace(group, name="sums", max_columns=32, max_rows=72, dtype=torch.float32)
        for rows, schedule in ((2, "kernel"), (72, "chunks"), (72, "scatter"), (72, "copies")):
            x, weight = torch.ones(rows, 16, requires_grad=True), torch.ones(32, 16)
            operand = x.tanh()
            out, _ = gemv_all_reduce(workspace, operand, weight, schedule=schedule)
            out.sum().backward()
            is_alive = weakref.ref(operand)
            del operand, out
            gc.collect()
            kept += [schedule] * (is_alive() is not None)
    return kept


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_operand_outlives_its_call(ranks: int) -> None:
    assert run_ranks(ranks, operands_that_are_kept) == [[]] * ranks


def shards_in_pieces() -> None:
    rule._COPIES = ("chunks_4",)


def test_pieces_of_a_shard_travel_while_the_next_are_multiplied() -> None:
    cases = [Case(72, 20, 16, with_bias=True, schedule="copies"), Case(78, 64, 16, with_residual=True, schedule="copies")]
    check(cases, ranks=3, calls=6, straggler=1, mutate=shards_in_pieces)


def many_rows_in_chunks() -> None:
    schedule._SUMMED_ELEMENTS = 700


def test_chunks_of_one_call_follow_each_other() -> None:
    check([Case(70, 40, 16)], ranks=2, calls=3, mutate=many_rows_in_chunks)


# Kernels that are wrong must fail the checks above.


@triton.jit
def _take_what_is_there(channel, places, inside, tag, epoch, peer):
    return tl.load(places, mask=inside, other=0, volatile=True)


def do_not_wait() -> None:
    gemv_kernel._receive = _take_what_is_there


@triton.jit
def _same_for_ever(epoch):
    return epoch * 0 + 1


def use_one_tag() -> None:
    gemv_kernel._tag = _same_for_ever


@pytest.mark.parametrize("mutate", [do_not_wait, use_one_tag])
def test_mutants_of_the_kernel_are_noticed(mutate: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        check([Case(2, 64, 32), Case(1, 64, 32)], ranks=2, calls=12, straggler=1, mutate=mutate)


def differing_calls(which: str) -> str:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = GemvWorkspace(group, name="sum", max_columns=64, dtype=torch.float32, timeout_seconds=100.0)
        rows = 2 + (which == "m" and rank.index == 1)
        x, weight = torch.ones(rows, 32), torch.ones(64, 32)
        if which == "refused" and rank.index == 1:
            x = x.double()
        gemv_tuning.override(ONE_SHOT)
        answer = "no error"
        try:
            gemv_all_reduce(workspace, x, weight)
            workspace.raise_fault()
        except (UsageError, CommunicationError) as error:
            answer = f"{type(error).__name__}: {error}"
        dist.barrier()  # who ends earlier is taken for lost
        return answer


@pytest.mark.parametrize("which", ["m", "refused"])
def test_ranks_that_differ_are_told_at_once(which: str) -> None:
    began = time.monotonic()
    first, second = run_ranks(2, differing_calls, which)
    assert time.monotonic() - began < 60
    assert CommunicationError.__name__ in first
    assert "rank 1" in first
    assert ("differ" in second) if which == "m" else ("UsageError" in second and "float64" in second)
