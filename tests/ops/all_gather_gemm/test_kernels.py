"""AllGather + GEMM and GEMM + ReduceScatter by every schedule: the kernels, in real processes under Triton's interpreter."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton

from dlrm_fused.ops.all_gather_gemm import kernel
from dlrm_fused.ops.all_gather_gemm.op import NAMES
from dlrm_fused.ops.schedules import Pair, piece_flags
from tests.distributed.launch import RankFailed
from tests.ops.all_gather_gemm.cases import Case, check

pytestmark = pytest.mark.interpreted

GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
# Rows that are no whole tiles, and fewer and more columns than those of a tile.
BY_SCHEDULE = [
    *(Case(GATHER, 40, 72, 24, name) for name in NAMES[GATHER]),
    *(Case(SCATTER, 40, 72, 24, name) for name in NAMES[SCATTER]),
]
OTHER_SHAPES = [Case(GATHER, 7, 8, 48, "arriving"), Case(SCATTER, 7, 8, 48, "chunks_4"), Case(GATHER, 3, 40, 16, "tapered")]


def test_all_schedules_with_a_straggler() -> None:
    check(BY_SCHEDULE, ranks=2, calls=len(BY_SCHEDULE), with_gradients=True)


def test_three_ranks_with_more_shapes() -> None:
    check([*BY_SCHEDULE[1:9:3], *OTHER_SHAPES, *BY_SCHEDULE[8::2]], ranks=3, calls=9, with_gradients=True)


@pytest.mark.parametrize("first", ["kernel", "chunks"])
def test_a_peer_that_is_ahead_does_not_send_while_gathered_rows_are_read(first: str) -> None:
    """In the backward pass of the first call."""
    check([Case(GATHER, 40, 72, 24, first), Case(GATHER, 40, 72, 24, "chunks_2")], ranks=2, calls=40, with_gradients=True)


def test_sixteen_bits() -> None:
    check(
        [Case(GATHER, 20, 40, 32, "arriving"), Case(SCATTER, 20, 40, 32, "chunks_2")], 2, 2, torch.float16, with_gradients=True
    )


@triton.jit
def look_without_waiting(channel, pieces, source, number, epoch):
    pass


@triton.jit
def assume_calls(channel, pieces, epoch, fingerprint):
    return True


def without_waits_between_products() -> None:
    piece_flags.PieceFlags.wait = lambda self, source, number: None  # type: ignore[method-assign]


def without_waits_in_kernels() -> None:
    kernel.wait_for_piece = look_without_waiting


def without_meetings() -> None:
    piece_flags.wait_for_calls = assume_calls
    kernel.wait_for_calls = assume_calls


@pytest.mark.parametrize(
    ("case", "mutate"),
    [
        (Case(GATHER, 40, 72, 24, "chunks_2"), without_waits_between_products),
        (Case(GATHER, 40, 72, 24, "arriving"), without_waits_in_kernels),
        (Case(SCATTER, 40, 72, 24, "chunks_2"), without_waits_in_kernels),
        (Case(GATHER, 40, 72, 24, "kernel"), without_waits_in_kernels),
        (Case(SCATTER, 40, 72, 24, "kernel"), without_waits_in_kernels),
        (Case(GATHER, 40, 72, 24, "chunks"), without_meetings),
        (Case(GATHER, 40, 72, 24, "kernel"), without_meetings),
    ],
    ids=[
        "chunks without waits",
        "arriving without waits",
        "sums without waits",
        "a kernel that gathers without waits",
        "a kernel that sums without waits",
        "copies into memory that is read",
        "stores into memory that is read",
    ],
)
def test_a_broken_protocol_is_noticed(case: Case, mutate: Callable[[], None]) -> None:
    """Else the tests above would pass by luck."""
    with pytest.raises((AssertionError, RankFailed)):
        check([case], ranks=2, calls=30, delay_seconds=0.05, mutate=mutate)
