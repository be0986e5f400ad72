"""Wrong uses of GEMV + AllReduce: of its workspace, and of the operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce, reference
from dlrm_fused.symmetric import symmetric_group
from tests.ops.wrong_use import SECOND, TIMEOUT_SECONDS, Scene, WrongUse

NAME = "products"
ROWS, DEPTH, COLUMNS = 3, 8, 6
MAX_ROWS, MAX_COLUMNS = 4, 10


class Product(Scene):
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
        self.correct = self.make()
        self.held = self.results(self.correct)

    def make(self, **settings: Any) -> GemvWorkspace:
        defaults = {
            "name": NAME,
            "max_columns": MAX_COLUMNS,
            "max_rows": MAX_ROWS,
            "dtype": torch.float32,
            "timeout_seconds": TIMEOUT_SECONDS,
        }
        return GemvWorkspace(self.group, **{**defaults, **settings})

    def begin(self) -> None:
        self.workspace = self.make()
        self.held[2:] = self.results(self.workspace)

    def tables(self) -> Sequence[Tensor]:
        return list(self.inputs.values())

    def results(self, workspace: GemvWorkspace, **changes: Tensor | str | None) -> list[Tensor]:
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


def settings(**wrong: Any) -> Callable[[Product, bool], object]:
    """Make a workspace with other settings."""
    return lambda scene, is_wrong: scene.make(**(wrong if is_wrong else {}))


def given(key: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Product, bool], object]:
    """Give another tensor."""

    def attempt(scene: Product, is_wrong: bool) -> None:
        scene.results(scene.workspace, **({key: change(scene.inputs[key])} if is_wrong else {}))

    return attempt


def by_schedule(name: str) -> Callable[[Product, bool], object]:
    return lambda scene, is_wrong: scene.results(scene.workspace, schedule=name if is_wrong else "auto")


def scatter_odd_rows(scene: Product, is_wrong: bool) -> None:
    """On the CPU all schedules are one; what they ask for is the same."""
    workspace = scene.make(name="many rows", max_rows=65)
    changes = {"x": torch.ones(65, DEPTH), "bias": None, "residual": None, "norm_weight": None}
    scene.results(workspace, **changes, schedule="scatter" if is_wrong else "auto")


def more_columns(scene: Product, is_wrong: bool) -> None:
    count = MAX_COLUMNS + 1 if is_wrong else COLUMNS
    scene.results(scene.workspace, weight=torch.ones(count, DEPTH), bias=None, residual=None, norm_weight=None)


def fewer_rows(scene: Product, is_wrong: bool) -> None:
    rows = ROWS - 1 if is_wrong else ROWS
    scene.results(scene.workspace, x=scene.inputs["x"][:rows], residual=scene.inputs["residual"][:rows])


def use_a_closed_group(scene: Product, is_wrong: bool) -> None:
    group = symmetric_group(dist.new_group())
    group.close()
    GemvWorkspace(group, name=NAME, max_columns=MAX_COLUMNS, dtype=torch.float32)


def use_a_dropped_exchange(scene: Product, is_wrong: bool) -> None:
    handle, scene.workspace = scene.workspace.handle, None  # type: ignore[assignment]
    torch.ops.dlrm_fused.gemv_all_reduce(*scene.inputs.values(), 1e-6, handle)


def come_too_late(scene: Product, is_wrong: bool) -> None:
    scene.workspace = scene.make(timeout_seconds=0.3)
    scene.results(scene.workspace)
    if is_wrong:
        time.sleep(1.0)
    scene.results(scene.workspace)


def go_on_after_an_error(scene: Product, is_wrong: bool) -> None:
    try:
        given("x", Tensor.half)(scene, is_wrong)
    except UserError:
        scene.results(scene.workspace)


_OTHER_SETTINGS = {
    "name": "other",
    "dtype": torch.bfloat16,
    "max_columns": 7,
    "max_rows": 2,
    "measures_schedules": False,
}
_CREATION = [
    WrongUse("`dtype=torch.float64`", settings(dtype=torch.float64), "dtype=torch.float64", SECOND, "dtype=torch.float64"),
    WrongUse("`max_columns=0`", settings(max_columns=0), "max_columns=0", SECOND, "max_columns=0"),
    WrongUse("`max_rows=1.5`", settings(max_rows=1.5), "max_rows=1.5", SECOND, "max_rows=1.5"),
    WrongUse("`timeout_seconds=0`", settings(timeout_seconds=0.0), "timeout_seconds=0.0", SECOND, "timeout_seconds=0.0"),
    *(
        WrongUse(f"`{key}` that differs between ranks", settings(**{key: value}), f"{key} differs", SECOND, f"{key} differs")
        for key, value in _OTHER_SETTINGS.items()
    ),
    WrongUse("more columns than memory holds", settings(max_columns=10**13), "but this host has", error=CommunicationError),
    WrongUse("a group that is closed", use_a_closed_group, "its group is closed"),
]
_DIFFER = "differ in shapes or settings"
_CALLS = [
    WrongUse("x in fp16", given("x", Tensor.half), "x is torch.float16", SECOND),
    WrongUse("weights in fp64", given("weight", Tensor.double), "weight is torch.float64", SECOND),
    WrongUse("a vector for x", given("x", lambda x: x[0]), f"x has shape [{DEPTH}]", SECOND),
    WrongUse("no rows", given("x", lambda x: x[:0]), f"x has shape [0, {DEPTH}]", SECOND),
    WrongUse("nothing to add up", given("x", lambda x: x[:, :0]), f"x has shape [{ROWS}, 0]", SECOND),
    WrongUse(
        "weights of columns, not rows, that are contiguous",
        given("weight", lambda weight: weight.t().contiguous().t()),
        f"strides (1, {COLUMNS})",
        SECOND,
    ),
    WrongUse("K of x and weight differ", given("x", lambda x: x[:, :7]), "their K must be equal", SECOND),
    WrongUse("all of K on one rank", given("x", lambda x: x.repeat(1, 2)), "their K must be equal", SECOND),
    WrongUse("m above `max_rows`", given("x", lambda x: x.repeat(2, 1)), "m=6 is above max_rows=4", SECOND),
    WrongUse("N above `max_columns`", more_columns, "N=11 is above max_columns=10", SECOND),
    WrongUse("a bias for fewer columns", given("bias", lambda bias: bias[:-1]), "bias has shape [5]", SECOND),
    WrongUse("a residual for one row", given("residual", lambda residual: residual[:1]), "residual has shape [1, 6]", SECOND),
    WrongUse(
        "a residual that is not contiguous",
        given("residual", lambda residual: residual.t().contiguous().t()),
        f"residual has shape [{ROWS}, {COLUMNS}], strides (1, {ROWS})",
        SECOND,
    ),
    WrongUse("a norm's weight in bf16", given("norm_weight", Tensor.bfloat16), "norm_weight is torch.bfloat16", SECOND),
    WrongUse(
        "`schedule=fastest`",
        by_schedule("fastest"),
        "schedule=fastest; allowed: auto, kernel, chunks, scatter, library",
        SECOND,
    ),
    WrongUse("`schedule=chunks` for few rows", by_schedule("chunks"), f"schedule=chunks for m={ROWS}", SECOND),
    WrongUse(
        "rows to scatter that the ranks do not divide", scatter_odd_rows, "needed: a multiple of the 2 ranks for m", SECOND
    ),
    WrongUse("m that differs between ranks", fewer_rows, _DIFFER, SECOND, error=CommunicationError),
    WrongUse("a bias on one rank only", given("bias", lambda _: None), _DIFFER, SECOND, error=CommunicationError),
    WrongUse("a workspace that is no longer", use_a_dropped_exchange, "no such GemvWorkspace"),
    WrongUse("a call later than `timeout_seconds`", come_too_late, "longer than 0.3 s", SECOND, error=CommunicationError),
    WrongUse("calls after one that failed", go_on_after_an_error, "did not take part", SECOND, error=CommunicationError),
]
USES = [*_CREATION, *_CALLS]
