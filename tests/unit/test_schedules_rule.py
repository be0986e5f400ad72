"""The rule that chooses schedules: its estimates, what it takes; how it fares with measured calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dlrm_fused.ops.common.gpus import GPUS, INTERPRETER
from dlrm_fused.ops.gemv_all_reduce.schedule import OF_MANY_ROWS as OF_MANY
from dlrm_fused.ops.gemv_all_reduce.schedule import by_rule
from dlrm_fused.ops.schedules import SCHEDULES, Lane, Mover, Pair
from dlrm_fused.ops.schedules.estimate import FEW_ROWS, Size, estimate
from dlrm_fused.ops.schedules.machines import H100, H200, machine_of
from dlrm_fused.ops.schedules.rule import _HOST_STEP_US, SPACE, choose, copies, estimates, schedule_of, space_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results/schedules"
FILES = [
    RESULTS / f"{name}_2_h200.json" for name in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_to_all", "gemv_all_reduce")
]
# Interquartile range over median, from which on a time was disturbed.
NOT_STEADY = 0.5
GATHER = Size(Pair.all_gather_gemm, 2, 16384, 1280, 8192)
SIZES = [
    GATHER,
    Size(Pair.gemm_reduce_scatter, 4, 16384, 8192, 1024),
    Size(Pair.gemm_all_to_all, 2, 8192, 4096, 4096),
    Size(Pair.gemm_all_reduce, 2, 8, 8192, 4096),
    Size(Pair.gemm_all_reduce, 8, 8192, 8192, 4096),
]


def microseconds(size: Size, name: str, machine: object = H100) -> float:
    return estimate(size, schedule_of(size, name), machine).microseconds  # type: ignore[arg-type]


def test_sizes_of_a_call() -> None:
    """x [8192, 8192] of each of two ranks, weight [1280, 8192], 16 bits."""
    assert GATHER.link_bytes == 2 * 8192 * 8192
    assert GATHER.operations == 2 * 16384 * 1280 * 8192
    assert GATHER.memory_bytes == 2 * (16384 * 8192 + 1280 * 8192 + 16384 * 1280)
    assert Size(Pair.gemm_all_reduce, 4, 64, 8, 8).link_bytes == 2 * 2 * 64 * 8 * 3 / 4


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.pair}-{size.ranks}")
def test_no_schedule_is_faster_than_the_links_or_the_product(size: Size) -> None:
    product_us = size.operations / H100.teraflops / 1e6
    for name, timeline in estimates(size, H100).items():
        fastest_link = max(H100.peer_copies, H100.peer_stores) * 1e3
        assert timeline.microseconds >= max(product_us, size.link_bytes / fastest_link), name


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.pair}-{size.ranks}")
def test_slower_links_never_help(size: Size) -> None:
    slower = replace(H100, peer_copies=H100.peer_copies / 4, peer_stores=H100.peer_stores / 4)
    for name in space_of(size):
        assert microseconds(size, name, slower) >= microseconds(size, name), name


def test_pieces_hide_what_a_shard_cannot() -> None:
    """Where links take longer than the product of own rows, the rest of a shard is waited for, but only one of its pieces."""
    slow = replace(H100, peer_copies=H100.peer_copies / 3)
    assert microseconds(GATHER, "chunks_4", slow) < microseconds(GATHER, "chunks", slow)
    fast = replace(H100, peer_copies=H100.peer_copies * 100)
    assert microseconds(GATHER, "chunks", fast) < microseconds(GATHER, "chunks_4", fast)


def test_copies_that_disturb_a_product_count() -> None:
    disturbed = replace(H100, contention=2.0)
    assert microseconds(GATHER, "chunks", disturbed) > 1.3 * microseconds(GATHER, "chunks")


def test_small_calls_go_in_one_kernel_and_large_ones_by_a_copy_engine() -> None:
    assert choose(Size(Pair.gemm_reduce_scatter, 2, 256, 1024, 512), H100) == "kernel"
    assert SCHEDULES[choose(Size(Pair.gemm_reduce_scatter, 2, 65536, 8192, 1024), H100)].mover is Mover.copy_engine
    assert SCHEDULES[choose(Size(Pair.all_gather_gemm, 2, 65536, 4096, 4096), H100)].mover is Mover.copy_engine


def test_few_rows_are_not_summed_beside_their_product() -> None:
    assert "sums_beside" not in estimates(Size(Pair.gemm_all_reduce, 16, 8, 8192, 1792), H100)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.pair}-{size.ranks}")
def test_tasks_lie_within_the_call(size: Size) -> None:
    for timeline in estimates(size, H200).values():
        assert all(0 <= span.begin <= span.end <= timeline.microseconds + 1e-6 for span in timeline.spans)


@pytest.mark.parametrize("name", ["chunks", "chunks_4", "tapered"])
def test_a_lane_does_one_thing_at_a_time(name: str) -> None:
    spans = estimate(GATHER, SCHEDULES[name], H100).spans
    for lane in Lane:
        own = sorted((span.begin, span.end) for span in spans if span.lane is lane)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(own))


def test_machines() -> None:
    assert machine_of(INTERPRETER) is H100
    assert machine_of(GPUS["NVIDIA H200"]) is H200
    b200, card = machine_of(GPUS["NVIDIA B200"]), machine_of(GPUS["NVIDIA H100 PCIe"])
    assert b200.teraflops == pytest.approx(2250 / 989 * H100.teraflops)
    assert b200.peer_copies == 2 * H100.peer_copies
    assert card.peer_stores == pytest.approx(64 / 450 * H100.peer_stores)  # nobody knows of a bridge


def test_a_schedule_of_another_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="all_gather_gemm: schedule sums_beside adds up"):
        estimate(GATHER, SCHEDULES["sums_beside"], H100)


Calls = dict[Size, dict[str, float]]


def read_cell(cell: dict[str, Any]) -> tuple[Size, dict[str, str]]:
    """The size of a recorded cell, and the names that its contestants have as schedules."""
    size = Size(Pair(cell.get("pair", Pair.gemm_all_to_all)), 2, cell["m"], cell["n"], cell["k"])
    if "size" not in cell:
        return size, {name: name for name in space_of(size)}
    size = replace(size, pair=Pair.gemm_all_reduce, depth=cell["k"] // 2)
    # Of many rows, the schedule that auto took has the name of ``fused``.
    names = {"chunks": "sums_beside", "scatter": "kernel"}
    taken = next((name for name in names if name not in cell["us"]), "")
    return size, {"fused" if name == taken else name: own for name, own in names.items()}


@pytest.fixture(scope="module")
def calls() -> Calls:
    """Microseconds by schedule of calls for which each schedule that the rule may take has a time that was not disturbed."""
    found: Calls = {}
    for file in FILES:
        for cell in json.loads(file.read_text())["cells"]:
            size, names = read_cell(cell)
            if size.pair is Pair.gemm_all_reduce and size.rows <= FEW_ROWS:  # one schedule
                continue
            spread = cell["spread"]
            steady = {
                own: cell["us"][name] for name, own in names.items() if spread.get(name, spread.get("fused")) < NOT_STEADY
            }
            if cell["passed"] and set(space_of(size)) <= steady.keys():
                found[size] = steady
    return found


def losses(calls: Calls, choose_: Callable[[Size], str]) -> list[float]:
    """By how much the schedules that are chosen take longer than the fastest."""
    return [us[choose_(size)] / min(us[name] for name in space_of(size)) - 1 for size, us in calls.items()]


def test_the_rule_is_better_than_any_schedule_for_all(calls: Calls) -> None:
    """With the costs that are in the package, on all measured calls."""
    assert len(calls) == 102
    assert {size.pair for size in calls} == set(SPACE)
    of_rule = losses(calls, partial(choose, machine=H200))
    assert sum(loss == 0 for loss in of_rule) > 0.79 * len(calls)
    assert sum(loss <= 0.03 for loss in of_rule) > 0.92 * len(calls)
    assert fmean(of_rule) < 0.01
    for mover in (Mover.same_kernel, Mover.copy_engine):

        def always(size: Size, mover: Mover = mover) -> str:
            return next((name for name in space_of(size) if SCHEDULES[name].mover is mover), "kernel")

        of_rival = losses(calls, always)
        assert of_rule.count(0) > of_rival.count(0)
        assert fmean(of_rule) < fmean(of_rival)


OF_MANY_ROWS = json.loads((RESULTS.parent / "gemm_all_reduce_2_h100.json").read_text())["cells"]


def many_rows(cell: dict[str, Any]) -> tuple[Size, dict[str, float]]:
    """The size of a sum of many rows on two H100s, and its microseconds by schedule of the operator."""
    us = cell["us"]
    size = Size(Pair.gemm_all_reduce, 2, cell["m"], cell["n"], cell["k"] // 2)
    return size, {name: us.get(name, us["fused"]) for name in ("chunks", "scatter", "copies", "nccl")}


def test_sums_by_copy_engines_take_what_they_take_on_paper() -> None:
    off = []
    for size, us in map(many_rows, OF_MANY_ROWS):
        off.append(estimate(size, copies(size, H100), H100).microseconds / us["copies"] - 1)
    assert len(off) == 24
    assert max(map(abs, off)) < 0.12
    assert fmean(map(abs, off)) < 0.05


def test_the_rule_takes_copies_where_they_are_worth_their_start() -> None:
    """Beside the fastest that was measured, and cuBLAS with NCCL; and no call for whose device the host would be too slow."""
    of_rule, taken = [], []
    for size, us in map(many_rows, OF_MANY_ROWS):
        schedule = by_rule(size, H100)
        of_rule.append(us[schedule] / us["nccl"])
        if schedule == "copies":
            taken.append(us["copies"])
            assert us["copies"] < 1.02 * min(us.values())
    assert len(taken) >= 8
    assert min(taken) > 17 * _HOST_STEP_US
    assert fmean(of_rule) < 0.89
    assert max(of_rule) < 0.96
    assert (
        fmean(of_rule) < fmean(us[OF_MANY[choose(size, H100)]] / us["nccl"] for size, us in map(many_rows, OF_MANY_ROWS)) - 0.02
    )
