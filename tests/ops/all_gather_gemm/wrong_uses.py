"""Wrong uses of AllGather + GEMM and GEMM + ReduceScatter: of their workspace, and of the operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter, reference, scatter_reference
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import symmetric_group
from tests.ops.wrong_use import RANKS, SECOND, TIMEOUT_SECONDS, Scene, WrongUse

NAME = "layers"
ROWS, COLUMNS, DEPTH = 4, 12, 16  # of a shard, N, K
MAX_ROWS, MAX_COLUMNS = 32, 16
GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
OPERATORS = {GATHER: all_gather_gemm, SCATTER: gemm_reduce_scatter}
REFERENCES = {GATHER: reference, SCATTER: scatter_reference}


class Layers(Scene):
    """A product of gathered rows, and one whose rows are scattered, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        rows = {GATHER: ROWS, SCATTER: RANKS * ROWS}
        self.inputs = {
            pair: {
                "x": torch.randn(rows[pair], DEPTH, generator=generator),
                "weight": torch.randn(COLUMNS, DEPTH, generator=generator),
            }
            for pair in OPERATORS
        }
        self.correct = self.make()
        self.held = self.results(self.correct)

    def make(self, **settings: Any) -> ShardWorkspace:
        defaults = {
            "name": NAME,
            "max_rows": MAX_ROWS,
            "max_columns": MAX_COLUMNS,
            "dtype": torch.float32,
            "timeout_seconds": TIMEOUT_SECONDS,
        }
        return ShardWorkspace(self.group, **{**defaults, **settings})

    def begin(self) -> None:
        self.workspace = self.make()
        self.held[2:] = self.results(self.workspace)

    def tables(self) -> Sequence[Tensor]:
        return [tensor for own in self.inputs.values() for tensor in own.values()]

    def results(self, workspace: ShardWorkspace) -> list[Tensor]:
        return [self.call(workspace, pair) for pair in OPERATORS]

    def call(self, workspace: ShardWorkspace, pair: Pair, schedule: str = "auto", **changes: Tensor) -> Tensor:
        return OPERATORS[pair](workspace, **{**self.inputs[pair], **changes}, schedule=schedule)

    def difference(self) -> float:
        differences = []
        for pair, own in self.inputs.items():
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


Attempt = Callable[[Layers, bool], object]


def settings(**wrong: Any) -> Attempt:
    """Make a workspace with other settings."""
    return lambda scene, is_wrong: scene.make(**(wrong if is_wrong else {}))


def given(pair: Pair, schedule: str = "auto", **changes: Callable[[Tensor], Tensor]) -> Attempt:
    """Give other tensors."""

    def attempt(scene: Layers, is_wrong: bool) -> None:
        wrong = {key: change(scene.inputs[pair][key]) for key, change in changes.items()} if is_wrong else {}
        scene.call(scene.workspace, pair, schedule, **wrong)

    return attempt


def by_schedule(pair: Pair, schedule: str) -> Attempt:
    return lambda scene, is_wrong: scene.call(scene.workspace, pair, schedule if is_wrong else "auto")


def use_a_closed_group(scene: Layers, is_wrong: bool) -> None:
    group = symmetric_group(dist.new_group())
    group.close()
    ShardWorkspace(group, name=NAME, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=torch.float32)


def use_a_dropped_workspace(pair: Pair) -> Attempt:
    def attempt(scene: Layers, is_wrong: bool) -> None:
        handle, scene.workspace = scene.workspace.handle, None  # type: ignore[assignment]
        getattr(torch.ops.dlrm_fused, pair)(*scene.inputs[pair].values(), "auto", handle)

    return attempt


def come_too_late(scene: Layers, is_wrong: bool) -> None:
    scene.workspace = scene.make(timeout_seconds=0.3)
    scene.call(scene.workspace, GATHER)
    if is_wrong:
        time.sleep(1.0)
    scene.call(scene.workspace, GATHER)


def make_calls_in_another_order(scene: Layers, is_wrong: bool) -> None:
    for pair in (SCATTER, GATHER) if is_wrong else (GATHER, SCATTER):
        scene.call(scene.workspace, pair)


def go_on_after_an_error(scene: Layers, is_wrong: bool) -> None:
    try:
        given(GATHER, x=Tensor.half)(scene, is_wrong)
    except UserError:
        scene.call(scene.workspace, GATHER)


_OTHER_SETTINGS = {"dtype": torch.bfloat16, "max_rows": 8, "max_columns": 8, "measures_schedules": False}
_CREATION = [
    WrongUse("`dtype=torch.float64`", settings(dtype=torch.float64), "dtype=torch.float64", SECOND, "dtype=torch.float64"),
    WrongUse("`max_rows=0`", settings(max_rows=0), "max_rows=0", SECOND, "max_rows=0"),
    WrongUse("`max_columns=1.5`", settings(max_columns=1.5), "max_columns=1.5", SECOND, "max_columns=1.5"),
    WrongUse("more rows than 31 bits count", settings(max_rows=2**30), "max_rows=1073741824", SECOND, "max_rows=1073741824"),
    *(
        WrongUse(f"`{key}` that differs between ranks", settings(**{key: value}), f"{key} differs", SECOND, f"{key} differs")
        for key, value in _OTHER_SETTINGS.items()
    ),
    WrongUse("more columns than memory holds", settings(max_columns=10**13), "but this host has", error=CommunicationError),
    WrongUse("a group that is closed", use_a_closed_group, "its group is closed"),
]
_DIFFER = "differ in shapes or settings"
_CALLS = [
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
    WrongUse("a schedule of the other operator", by_schedule(SCATTER, "arriving_4"), "schedule=arriving_4", SECOND),
    WrongUse('`schedule="chunks_8"`, to gather', by_schedule(GATHER, "chunks_8"), "schedule=chunks_8", SECOND),
    *(
        WrongUse(f"{what} that differs between ranks, {way}", attempt, _DIFFER, SECOND, error=CommunicationError)
        for what, way, attempt in (
            ("M", "gathered", given(GATHER, x=lambda x: x.repeat(2, 1))),
            ("N", "gathered", given(GATHER, weight=lambda weight: weight[:8])),
            ("M", "scattered", given(SCATTER, x=lambda x: x.repeat(2, 1))),
            ("N", "gathered by the library", given(GATHER, "library", weight=lambda weight: weight[:8])),
            ("M", "scattered by the library", given(SCATTER, "library", x=lambda x: x.repeat(2, 1))),
            ("the schedule", "gathered", by_schedule(GATHER, "library")),
        )
    ),
    WrongUse("calls in another order", make_calls_in_another_order, _DIFFER, SECOND, error=CommunicationError),
    WrongUse("a workspace that is no longer, to gather", use_a_dropped_workspace(GATHER), "no such ShardWorkspace"),
    WrongUse("a workspace that is no longer, to scatter", use_a_dropped_workspace(SCATTER), "no such ShardWorkspace"),
    WrongUse("a call later than `timeout_seconds`", come_too_late, "longer than 0.3 s", SECOND, error=CommunicationError),
    WrongUse("calls after one that failed", go_on_after_an_error, "did not take part", SECOND, error=CommunicationError),
]
USES = [*_CREATION, *_CALLS]
