"""GEMM + All-to-All: the kernels themselves, in real processes under Triton's interpreter."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dlrm_fused.ops.gemm_all_to_all import kernel as gemm_kernel
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, gemm, grouped_gemm
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.gemm_all_to_all.tuning import override
from dlrm_fused.ops.gemm_all_to_all.weight_gradient import grouped_weight_gradient
from dlrm_fused.symmetric import device
from tests.distributed.launch import RankFailed
from tests.ops.checked_calls import SMALL_TILES
from tests.ops.gemm_all_to_all.cases import Case, check

pytestmark = pytest.mark.interpreted

EQUAL, NARROW, CHUNKS = Case(72, 40, rows=24), Case(8, 24, rows=12), Case(72, 40, rows=24, schedule="chunks")
SMALL, WIDE = Case(40, 24, rows=48), Case(80, 48, rows=48)


def groups_of(tiles: list[int], remote: list[int]) -> Groups:
    bounds = torch.tensor([0, *tiles]).cumsum(0).int()
    return Groups(16, bounds, bounds[:-1] + torch.tensor(remote, dtype=torch.int32))


def test_tiles_for_other_ranks_come_first() -> None:
    order = groups_of([2, 0, 3, 1], [1, 0, 3, 0]).order(8)
    assert order[:, :6].tolist() == [[0, 2, 3, 4, 1, 5], [0, 2, 2, 2, 0, 3]]


def test_products_of_groups() -> None:
    override(SMALL_TILES)
    groups = groups_of([2, 0, 3, 1], [1, 0, 3, 0])
    x, weight = torch.randn(128, 40), torch.randn(4, 72, 40)
    right = torch.full((128, 72), 7.0)
    for group, (first, end) in enumerate([(0, 32), (32, 32), (32, 80), (80, 96)]):
        right[first:end] = x[first:end] @ weight[group].T
    for is_transposed in (False, True):
        out = torch.full((128, 72), 7.0)
        of_x = weight.mT.contiguous() if is_transposed else weight
        grouped_gemm(x, of_x, groups, out, weight_is_transposed=is_transposed)
        torch.testing.assert_close(out, right)  # rows of no group are left as they are

    gradient = torch.empty(4, 72, 40)
    grouped_weight_gradient(right, x, groups, gradient, factor=0.5)
    torch.testing.assert_close(gradient[2], 0.5 * right[32:80].T @ x[32:80])
    assert (gradient[1] == 0).all()


def test_one_product() -> None:
    override(SMALL_TILES)
    x, weight, out = torch.randn(50, 40), torch.randn(72, 40), torch.empty(50, 72)
    gemm(x, weight, out)
    torch.testing.assert_close(out, x @ weight.T)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_products_of_pieces(splits: int) -> None:
    """Also of fewer steps than pieces; and again, with what the first launch has left behind."""
    override(replace(SMALL_TILES, splits=splits))
    arrivals = Arrivals(torch.device("cpu"))
    for depth in (40, 136, 136):
        x, weight, out = torch.randn(50, depth), torch.randn(72, depth), torch.empty(50, 72)
        gemm(x, weight, out, arrivals=arrivals)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-4)


def split_in_four() -> None:
    gemm_tuning.override = lambda tiles: override(replace(tiles, splits=4))


def test_results_of_pieces() -> None:
    check([EQUAL, SMALL, NARROW], ranks=2, calls=6, with_gradients=True, mutate=split_in_four)


@pytest.mark.parametrize(("ranks", "calls"), [(1, 6), (2, 20), (3, 10), (4, 10), pytest.param(2, 100, marks=pytest.mark.slow)])
def test_results_with_a_straggler(ranks: int, calls: int) -> None:
    check([EQUAL, SMALL, NARROW, CHUNKS, WIDE], ranks, calls)


def test_gradients() -> None:
    check([EQUAL, SMALL, CHUNKS, WIDE], ranks=2, calls=10, with_gradients=True)


def test_sixteen_and_eight_bits() -> None:
    # The interpreter has no product of bf16.
    cases = [EQUAL, SMALL, Case(40, 32, rows=12, fp8=True), Case(40, 16, rows=24, fp8=True)]
    check(cases, ranks=2, calls=8, dtype=torch.float16, with_gradients=True)


# Kernels that are wrong must fail the checks above.


@triton.jit
def _do_not_wait(channel, epoch, fingerprint):
    return tl.full((), 1, tl.int1)


def store_before_peers_are_ready() -> None:
    gemm_kernel.wait_until_all_ready = _do_not_wait


@triton.jit
def _complete_at_once(channel, epoch):
    tl.atomic_xchg(channel.state, epoch, sem="relaxed", scope="gpu")


def _wait_and_be_late(channel: Any, epoch: Any, fingerprint: Any) -> Any:
    """The last rank stores late, as the interpreter allows: a rank that does not wait ends before."""
    all_ready = device.wait_until_all_ready(channel, epoch, fingerprint)
    if os.environ["RANK"] == "1":
        time.sleep(0.1)
    return all_ready


def do_not_wait_for_arrivals() -> None:
    device._wait_for_arrivals = _complete_at_once
    gemm_kernel.wait_until_all_ready = _wait_and_be_late


@pytest.mark.parametrize("mutate", [store_before_peers_are_ready, do_not_wait_for_arrivals])
def test_mutants_of_the_kernel_are_noticed(mutate: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, RankFailed)):
        check([EQUAL, SMALL], ranks=2, calls=10, delay_seconds=0.5, mutate=mutate)
