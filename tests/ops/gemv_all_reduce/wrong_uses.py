"""Wrong uses of GEMV + AllReduce: of its workspace, and of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce, reference
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.workspace_wrong_use import (
    CALL_AFTER_AN_ERROR,
    CLOSED_GROUP,
    LATE_CALL,
    WorkspaceScene,
    by_schedule,
    calls_that_differ,
    dropped,
    given,
    settings_that_differ,
    too_large,
    wrong_setting,
)
from tests.ops.wrong_use import SECOND, WrongUse

ROWS, DEPTH, COLUMNS = 3, 8, 6
MAX_ROWS, MAX_COLUMNS = 4, 10


class Product(WorkspaceScene):
    """A product with everything that may follow it, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        own = {"x": (ROWS, DEPTH), "weight": (COLUMNS, DEPTH)}
        of_all = {"bias": (COLUMNS,), "residual": (ROWS, COLUMNS), "norm_weight": (COLUMNS,)}
        self.inputs = {key: torch.randn(shape, generator=generator) for key, shape in own.items()}
        generator.manual_seed(len(own))
        self.inputs |= {key: torch.randn(shape, generator=generator) for key, shape in of_all.items()}
        self.gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        self.hold_results()

    def create(self, group: SymmetricGroup, **settings: Any) -> GemvWorkspace:
        usual = {"name": "products", "max_columns": MAX_COLUMNS, "max_rows": MAX_ROWS, "dtype": torch.float32}
        return GemvWorkspace(group, **{**usual, **settings})

    def tables(self) -> Sequence[Tensor]:
        return list(self.inputs.values())

    def results(self, workspace: GemvWorkspace, **changes: Any) -> list[Tensor]:
        """The sum and its norm."""
        given: dict[str, Any] = {**self.inputs, **changes}
        return [result for result in gemv_all_reduce(workspace, **given) if result is not None]

    def difference(self) -> float:
        seen = []
        for function in (gemv_all_reduce, reference):
            leaves = {key: tensor.clone().requires_grad_() for key, tensor in self.inputs.items()}
            summed_by: Any = self.correct if function is gemv_all_reduce else self.group.process_group
            out, normed = function(summed_by, **leaves)
            assert normed is not None
            (out * self.gradient + normed).sum().backward()
            seen.append([out, normed, *(leaf.grad for leaf in leaves.values())])
        return max(float((our - plain).abs().max()) for our, plain in zip(*seen, strict=True))


def scatter_odd_rows(scene: Product, is_wrong: bool) -> None:
    """On the CPU all schedules are one; what they ask for is the same."""
    workspace = scene.make(name="many rows", max_rows=65)
    changes = {"x": torch.ones(65, DEPTH), "bias": None, "residual": None, "norm_weight": None}
    scene.results(workspace, **changes, schedule="scatter" if is_wrong else "auto")


def more_columns(scene: Product, is_wrong: bool) -> None:
    count = MAX_COLUMNS + 1 if is_wrong else COLUMNS
    scene.results(scene.workspace, weight=torch.ones(count, DEPTH), bias=None, residual=None, norm_weight=None)


USES = [
    wrong_setting(dtype=torch.float64),
    wrong_setting(max_columns=0),
    wrong_setting(max_rows=1.5),
    wrong_setting("`timeout_seconds=0`", timeout_seconds=0.0),
    *settings_that_differ(name="other", dtype=torch.bfloat16, max_columns=7, max_rows=2, measures_schedules=False),
    too_large("more columns than memory holds", max_columns=10**13),
    CLOSED_GROUP,
    WrongUse("x in fp16", given(x=Tensor.half), "x is torch.float16", SECOND),
    WrongUse("weights in fp64", given(weight=Tensor.double), "weight is torch.float64", SECOND),
    WrongUse("a vector for x", given(x=lambda x: x[0]), f"x has shape [{DEPTH}]", SECOND),
    WrongUse("no rows", given(x=lambda x: x[:0]), f"x has shape [0, {DEPTH}]", SECOND),
    WrongUse("nothing to add up", given(x=lambda x: x[:, :0]), f"x has shape [{ROWS}, 0]", SECOND),
    WrongUse(
        "weights of columns, not rows, that are contiguous",
        given(weight=lambda weight: weight.t().contiguous().t()),
        f"strides (1, {COLUMNS})",
        SECOND,
    ),
    WrongUse("K of x and weight differ", given(x=lambda x: x[:, :7]), "their K must be equal", SECOND),
    WrongUse("all of K on one rank", given(x=lambda x: x.repeat(1, 2)), "their K must be equal", SECOND),
    WrongUse("m above `max_rows`", given(x=lambda x: x.repeat(2, 1)), "m=6 is above max_rows=4", SECOND),
    WrongUse("N above `max_columns`", more_columns, "N=11 is above max_columns=10", SECOND),
    WrongUse("a bias for fewer columns", given(bias=lambda bias: bias[:-1]), "bias has shape [5]", SECOND),
    WrongUse("a residual for one row", given(residual=lambda residual: residual[:1]), "residual has shape [1, 6]", SECOND),
    WrongUse(
        "a residual that is not contiguous",
        given(residual=lambda residual: residual.t().contiguous().t()),
        f"residual has shape [{ROWS}, {COLUMNS}], strides (1, {ROWS})",
        SECOND,
    ),
    WrongUse("a norm's weight in bf16", given(norm_weight=Tensor.bfloat16), "norm_weight is torch.bfloat16", SECOND),
    WrongUse(
        "`schedule=fastest`",
        by_schedule("fastest"),
        "schedule=fastest; allowed: auto, kernel, product, chunks, scatter, copies",
        SECOND,
    ),
    WrongUse("`schedule=chunks` for few rows", by_schedule("chunks"), f"schedule=chunks for m={ROWS}", SECOND),
    WrongUse(
        "rows to scatter that the ranks do not divide", scatter_odd_rows, "needed: a multiple of the 2 ranks for m", SECOND
    ),
    calls_that_differ("m that differs between ranks", given(x=lambda x: x[:-1], residual=lambda residual: residual[:-1])),
    calls_that_differ("a bias on one rank only", given(bias=lambda _: None)),
    dropped(
        "GemvWorkspace",
        lambda scene, handle: torch.ops.dlrm_fused.gemv_all_reduce(*scene.inputs.values(), 1e-6, handle),
    ),
    LATE_CALL,
    CALL_AFTER_AN_ERROR,
]
