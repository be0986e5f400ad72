"""Wrong uses of AllGather + GEMM and GEMM + ReduceScatter: of their workspace, and of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter, reference, scatter_reference
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.workspace_wrong_use import (
    CALL_AFTER_AN_ERROR,
    CLOSED_GROUP,
    LATE_CALL,
    Attempt,
    Change,
    WorkspaceScene,
    calls_that_differ,
    changed,
    dropped,
    settings_that_differ,
    too_large,
    wrong_setting,
)
from tests.ops.wrong_use import RANKS, SECOND, WrongUse

ROWS, COLUMNS, DEPTH = 4, 12, 16  # of a shard, N, K
MAX_ROWS, MAX_COLUMNS = 32, 16
GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
OPERATORS = {GATHER: all_gather_gemm, SCATTER: gemm_reduce_scatter}
REFERENCES = {GATHER: reference, SCATTER: scatter_reference}


class Layers(WorkspaceScene):
    """A product of gathered rows, and one whose rows are scattered, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        rows = {GATHER: ROWS, SCATTER: RANKS * ROWS}
        self.inputs_of = {
            pair: {
                "x": torch.randn(rows[pair], DEPTH, generator=generator),
                "weight": torch.randn(COLUMNS, DEPTH, generator=generator),
            }
            for pair in OPERATORS
        }
        self.inputs = self.inputs_of[GATHER]
        self.hold_results()

    def create(self, group: SymmetricGroup, **settings: Any) -> ShardWorkspace:
        usual = {"name": "layers", "max_rows": MAX_ROWS, "max_columns": MAX_COLUMNS, "dtype": torch.float32}
        return ShardWorkspace(group, **{**usual, **settings})

    def tables(self) -> Sequence[Tensor]:
        return [tensor for own in self.inputs_of.values() for tensor in own.values()]

    def results(self, workspace: ShardWorkspace, **changes: Any) -> list[Tensor]:
        """Gathered rows, which changes concern, and scattered ones."""
        return [self.call(workspace, GATHER, **changes), self.call(workspace, SCATTER)]

    def call(self, workspace: ShardWorkspace, pair: Pair, **changes: Any) -> Tensor:
        return OPERATORS[pair](workspace, **{**self.inputs_of[pair], **changes})

    def difference(self) -> float:
        differences = []
        for pair, own in self.inputs_of.items():
            seen = []
            for is_fused in (True, False):
                x, weight = (own[key].clone().requires_grad_() for key in ("x", "weight"))
                if is_fused:
                    result = OPERATORS[pair](self.correct, x, weight)
                else:
                    result = REFERENCES[pair](self.group.process_group, x, weight)
                result.sin().sum().backward()
                seen.append([result.detach(), x.grad, weight.grad])
            differences += [float((our - plain).abs().max()) for our, plain in zip(*seen, strict=True)]
        return max(differences)


def given(pair: Pair, schedule: str = "auto", **changes: Change) -> Attempt:
    """Give an operator other tensors."""

    def attempt(scene: Layers, is_wrong: bool) -> None:
        scene.call(scene.workspace, pair, schedule=schedule, **(changed(scene.inputs_of[pair], changes) if is_wrong else {}))

    return attempt


def by_schedule(pair: Pair, schedule: str) -> Attempt:
    return lambda scene, is_wrong: scene.call(scene.workspace, pair, schedule=schedule if is_wrong else "auto")


def dropped_before(pair: Pair, verb: str) -> WrongUse:
    return dropped(
        "ShardWorkspace",
        lambda scene, handle: getattr(torch.ops.dlrm_fused, pair)(*scene.inputs_of[pair].values(), "auto", handle),
        f"a workspace that is no longer, to {verb}",
    )


def make_calls_in_another_order(scene: Layers, is_wrong: bool) -> None:
    for pair in (SCATTER, GATHER) if is_wrong else (GATHER, SCATTER):
        scene.call(scene.workspace, pair)


USES = [
    wrong_setting(dtype=torch.float64),
    wrong_setting(max_rows=0),
    wrong_setting(max_columns=1.5),
    wrong_setting("more rows than 31 bits count", max_rows=2**30),
    *settings_that_differ(dtype=torch.bfloat16, max_rows=8, max_columns=8, measures_schedules=False),
    too_large("more columns than memory holds", max_columns=10**13),
    CLOSED_GROUP,
    WrongUse("x in fp16", given(GATHER, x=Tensor.half), "x is torch.float16", SECOND),
    WrongUse("weights in fp64", given(SCATTER, weight=Tensor.double), "weight is torch.float64", SECOND),
    WrongUse("a vector for x", given(GATHER, x=lambda x: x[0]), f"x has shape [{DEPTH}]", SECOND),
    WrongUse("a number for x", given(GATHER, x=Tensor.sum), "x has shape []", SECOND),
    WrongUse("no rows", given(GATHER, x=lambda x: x[:0]), f"x has shape [0, {DEPTH}]", SECOND),
    WrongUse("no features", given(SCATTER, weight=lambda weight: weight[:0]), f"weight has shape [0, {DEPTH}]", SECOND),
    WrongUse("x that is not contiguous", given(GATHER, x=lambda x: x.t().contiguous().t()), f"strides (1, {ROWS})", SECOND),
    WrongUse("K of x and weight differ", given(GATHER, x=lambda x: x[:, :8].contiguous()), "their K must be equal", SECOND),
    WrongUse(
        "rows of 15 elements",
        given(GATHER, x=lambda x: x[:, :15].contiguous(), weight=lambda weight: weight[:, :15].contiguous()),
        "K=15 elements of torch.float32; needed: a multiple of 16 bytes",
        SECOND,
    ),
    WrongUse(
        "rows of the result of 11 elements",
        given(SCATTER, weight=lambda weight: weight[:11]),
        "N=11 elements of torch.float32; needed: a multiple of 16 bytes",
        SECOND,
    ),
    WrongUse("M above `max_rows`", given(GATHER, x=lambda x: x.repeat(5, 1)), "M=40 is above max_rows=32", SECOND),
    WrongUse(
        "M above `max_rows`, to be scattered", given(SCATTER, x=lambda x: x.repeat(5, 1)), "M=40 is above max_rows=32", SECOND
    ),
    WrongUse(
        "K above `max_columns`, to be gathered",
        given(GATHER, x=lambda x: x.repeat(1, 2), weight=lambda weight: weight.repeat(1, 2)),
        "K=32 is above max_columns=16",
        SECOND,
    ),
    WrongUse(
        "N above `max_columns`, to be scattered",
        given(SCATTER, weight=lambda weight: weight.repeat(2, 1)),
        "N=24 is above max_columns=16",
        SECOND,
    ),
    WrongUse("rows that do not divide by the ranks", given(SCATTER, x=lambda x: x[:7]), "x has 7 rows", SECOND),
    WrongUse('`schedule="fast"`', by_schedule(GATHER, "fast"), "schedule=fast", SECOND),
    WrongUse("a schedule of the other operator", by_schedule(SCATTER, "arriving"), "schedule=arriving", SECOND),
    WrongUse('`schedule="sums_beside"`, to gather', by_schedule(GATHER, "sums_beside"), "schedule=sums_beside", SECOND),
    *(
        calls_that_differ(f"{what} that differs between ranks, {way}", attempt)
        for what, way, attempt in (
            ("M", "gathered", given(GATHER, x=lambda x: x.repeat(2, 1))),
            ("N", "gathered", given(GATHER, weight=lambda weight: weight[:8])),
            ("M", "scattered", given(SCATTER, x=lambda x: x.repeat(2, 1))),
            ("the schedule", "gathered", by_schedule(GATHER, "chunks")),
        )
    ),
    calls_that_differ("calls in another order", make_calls_in_another_order),
    dropped_before(GATHER, "gather"),
    dropped_before(SCATTER, "scatter"),
    LATE_CALL,
    CALL_AFTER_AN_ERROR,
]
