"""Wrong uses of GEMM + All-to-All: of its workspace, and of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, gemm_all_to_all, reference
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.workspace_wrong_use import (
    CALL_AFTER_AN_ERROR,
    CLOSED_GROUP,
    LATE_CALL,
    Attempt,
    WorkspaceScene,
    by_schedule,
    calls_that_differ,
    dropped,
    given,
    settings_that_differ,
    wrong_setting,
)
from tests.ops.wrong_use import SECOND, WrongUse

ROWS, DEPTH, COLUMNS = 4, 16, 12
MAX_ROWS, MAX_COLUMNS = 32, 16


class Blocks(WorkspaceScene):
    """Equal blocks over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        shapes = {"x": (ROWS, DEPTH), "weight": (COLUMNS, DEPTH)}
        self.inputs = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        self.gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        self.hold_results()

    def create(self, group: SymmetricGroup, **settings: Any) -> GemmWorkspace:
        usual = {"name": "products", "max_rows": MAX_ROWS, "max_columns": MAX_COLUMNS, "dtype": torch.float32}
        return GemmWorkspace(group, **{**usual, **settings})

    def tables(self) -> Sequence[Tensor]:
        return [*self.inputs.values()]

    def results(self, workspace: GemmWorkspace, **changes: Any) -> list[Tensor]:
        return [gemm_all_to_all(workspace, **{**self.inputs, **changes})]

    def difference(self) -> float:
        seen = []
        for is_fused in (True, False):
            x, weight = (self.inputs[key].clone().requires_grad_() for key in ("x", "weight"))
            result = gemm_all_to_all(self.correct, x, weight) if is_fused else reference(self.group.process_group, x, weight)
            (result * self.gradient).sum().backward()
            seen.append([result.detach(), x.grad, weight.grad])
        return max(float((our - plain).abs().max()) for our, plain in zip(*seen, strict=True))


def ones(columns: int, **settings: str) -> Attempt:
    """Give a weight of so many columns."""
    return lambda scene, is_wrong: scene.results(
        scene.workspace, weight=torch.ones(columns if is_wrong else COLUMNS, DEPTH), **settings
    )


def eight_bits_by(schedule: str) -> Attempt:
    def call(scene: Blocks, is_wrong: bool) -> None:
        eight_bits = {"weight": scene.inputs["weight"].to(FP8), "scale": torch.ones(COLUMNS), "schedule": schedule}
        scene.results(scene.workspace, **(eight_bits if is_wrong else {}))

    return call


USES = [
    wrong_setting(dtype=torch.float64),
    wrong_setting(max_rows=0),
    wrong_setting("more rows than 31 bits count", max_rows=2**30),
    *settings_that_differ(dtype=torch.bfloat16, max_rows=8, max_columns=8),
    CLOSED_GROUP,
    WrongUse("x in fp16", given(x=Tensor.half), "x is torch.float16", SECOND),
    WrongUse("weights in fp8 without scale", given(weight=lambda weight: weight.to(FP8)), "without scale", SECOND),
    WrongUse("fp8 by chunks", eight_bits_by("chunks"), "schedule=chunks", SECOND),
    WrongUse('`schedule="fast"`', by_schedule("fast"), "schedule=fast", SECOND),
    WrongUse("rows that do not divide by the ranks", given(x=lambda x: x[:3]), "x has 3 rows", SECOND),
    WrongUse("K of x and weight differ", given(x=lambda x: x[:, :8].contiguous()), "their K must be equal", SECOND),
    WrongUse("rows of 15 elements", given(x=lambda x: x[:, :15].contiguous()), "a multiple of 16 bytes", SECOND),
    WrongUse("x that is not contiguous", given(x=lambda x: x.t().contiguous().t()), f"strides (1, {ROWS})", SECOND),
    WrongUse("M above `max_rows`", given(x=lambda x: x.repeat(9, 1)), "rows=36 is above max_rows=32", SECOND),
    WrongUse("N above `max_columns`", ones(MAX_COLUMNS + 4), "columns=20 is above max_columns=16", SECOND),
    calls_that_differ("M that differs between ranks", given(x=lambda x: x.repeat(2, 1))),
    dropped(
        "GemmWorkspace",
        lambda scene, handle: torch.ops.dlrm_fused.gemm_all_to_all(*scene.inputs.values(), None, "auto", handle),
    ),
    LATE_CALL,
    CALL_AFTER_AN_ERROR,
]
