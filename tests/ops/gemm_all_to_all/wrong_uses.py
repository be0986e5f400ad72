"""Wrong uses of GEMM + All-to-All: of its workspace, and of the operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, Routes, gemm_all_to_all, reference, routed_gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.symmetric import symmetric_group
from tests.ops.wrong_use import SECOND, TIMEOUT_SECONDS, Scene, WrongUse

NAME = "products"
ROWS, DEPTH, COLUMNS = 4, 16, 12
MAX_ROWS, MAX_COLUMNS = 32, 16
TILE_ROWS, GROUPS = 16, 2


class BlocksAndRoutes(Scene):
    """Equal blocks, and rows of two groups that all stay where they are, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        shapes = {"x": (ROWS, DEPTH), "weight": (COLUMNS, DEPTH)}
        self.inputs = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        self.gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        rows = GROUPS * TILE_ROWS
        self.routed = {
            "x": torch.randn(rows, DEPTH, generator=generator),
            "weight": torch.randn(GROUPS, COLUMNS, DEPTH, generator=generator),
            "bounds": torch.arange(GROUPS + 1, dtype=torch.int32),
            "local_from": torch.arange(GROUPS, dtype=torch.int32),
            "destinations": torch.arange(self.rank * rows, (self.rank + 1) * rows, dtype=torch.int32),
        }
        self.correct = self.make()
        self.held = self.results(self.correct)

    def make(self, **settings: Any) -> GemmWorkspace:
        defaults = {
            "name": NAME,
            "max_rows": MAX_ROWS,
            "max_columns": MAX_COLUMNS,
            "dtype": torch.float32,
            "timeout_seconds": TIMEOUT_SECONDS,
        }
        return GemmWorkspace(self.group, **{**defaults, **settings})

    def begin(self) -> None:
        self.workspace = self.make()
        self.held[2:] = self.results(self.workspace)

    def tables(self) -> Sequence[Tensor]:
        return [*self.inputs.values(), *self.routed.values()]

    def results(self, workspace: GemmWorkspace) -> list[Tensor]:
        return [self.blocks(workspace), self.route(workspace)]

    def blocks(self, workspace: GemmWorkspace, schedule: str = "auto", **changes: Tensor | None) -> Tensor:
        return gemm_all_to_all(workspace, **{**self.inputs, **changes}, schedule=schedule)  # type: ignore[arg-type]

    def route(
        self, workspace: GemmWorkspace, tile_rows: int = TILE_ROWS, slots: int = GROUPS * TILE_ROWS, **changes: Tensor
    ) -> Tensor:
        given = {**self.routed, **changes}
        groups = Groups(tile_rows, given["bounds"], given["local_from"])
        return routed_gemm_all_to_all(workspace, given["x"], given["weight"], Routes(groups, given["destinations"], slots))

    def difference(self) -> float:
        seen = []
        for is_fused in (True, False):
            x, weight = (self.inputs[key].clone().requires_grad_() for key in ("x", "weight"))
            result = gemm_all_to_all(self.correct, x, weight) if is_fused else reference(self.group.process_group, x, weight)
            (result * self.gradient).sum().backward()
            seen.append([result.detach(), x.grad, weight.grad])
        routed = torch.einsum("grk,gnk->grn", self.routed["x"].view(GROUPS, TILE_ROWS, DEPTH), self.routed["weight"])
        pairs = [*zip(*seen, strict=True), (self.route(self.correct), routed.flatten(0, 1))]
        return max(float((our - plain).abs().max()) for our, plain in pairs)


def settings(**wrong: Any) -> Callable[[BlocksAndRoutes, bool], object]:
    """Make a workspace with other settings."""
    return lambda scene, is_wrong: scene.make(**(wrong if is_wrong else {}))


def given(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[BlocksAndRoutes, bool], object]:
    """Give another tensor, for equal blocks."""
    return lambda scene, is_wrong: scene.blocks(scene.workspace, **({key: change(scene.inputs[key])} if is_wrong else {}))


def routed(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[BlocksAndRoutes, bool], object]:
    """Give another tensor, for routed rows."""
    return lambda scene, is_wrong: scene.route(scene.workspace, **({key: change(scene.routed[key])} if is_wrong else {}))


def more_columns(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    scene.blocks(scene.workspace, weight=torch.ones(MAX_COLUMNS + 4 if is_wrong else COLUMNS, DEPTH))


def eight_bits_by(schedule: str) -> Callable[[BlocksAndRoutes, bool], object]:
    def call(scene: BlocksAndRoutes, is_wrong: bool) -> None:
        eight_bits = {"weight": scene.inputs["weight"].to(FP8), "scale": torch.ones(COLUMNS)}
        scene.blocks(scene.workspace, **({"schedule": schedule, **eight_bits} if is_wrong else {}))  # type: ignore[arg-type]

    return call


def other_columns_by_the_library(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    columns = COLUMNS + 4 if is_wrong else COLUMNS
    scene.blocks(scene.workspace, "library", weight=torch.ones(columns, DEPTH))


def use_a_closed_group(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    group = symmetric_group(dist.new_group())
    group.close()
    GemmWorkspace(group, name=NAME, max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=torch.float32)


def use_a_dropped_exchange(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    handle, scene.workspace = scene.workspace.handle, None  # type: ignore[assignment]
    torch.ops.dlrm_fused.gemm_all_to_all(*scene.inputs.values(), None, None, None, None, 0, 0, "auto", handle)


def come_too_late(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    scene.workspace = scene.make(timeout_seconds=0.3)
    scene.blocks(scene.workspace)
    if is_wrong:
        time.sleep(1.0)
    scene.blocks(scene.workspace)


def go_on_after_an_error(scene: BlocksAndRoutes, is_wrong: bool) -> None:
    try:
        given("x", Tensor.half)(scene, is_wrong)
    except UserError:
        scene.blocks(scene.workspace)


_CREATION = [
    WrongUse("`dtype=torch.float64`", settings(dtype=torch.float64), "dtype=torch.float64", SECOND, "dtype=torch.float64"),
    WrongUse("`max_rows=0`", settings(max_rows=0), "max_rows=0", SECOND, "max_rows=0"),
    WrongUse("more rows than 31 bits count", settings(max_rows=2**30), "max_rows=1073741824", SECOND, "max_rows=1073741824"),
    *(
        WrongUse(f"`{key}` that differs between ranks", settings(**{key: value}), f"{key} differs", SECOND, f"{key} differs")
        for key, value in {"dtype": torch.bfloat16, "max_rows": 8, "max_columns": 8}.items()
    ),
    WrongUse("a group that is closed", use_a_closed_group, "its group is closed"),
]
_DIFFER = "differ in shapes or settings"
_CALLS = [
    WrongUse("x in fp16", given("x", Tensor.half), "x is torch.float16", SECOND),
    WrongUse("weights in fp8 without scale", given("weight", lambda weight: weight.to(FP8)), "without scale", SECOND),
    WrongUse("fp8 by chunks", eight_bits_by("chunks"), "schedule=chunks", SECOND),
    WrongUse("fp8 by the library", eight_bits_by("library"), "schedule=library", SECOND),
    WrongUse("other columns, by the library", other_columns_by_the_library, "differ", SECOND, error=CommunicationError),
    WrongUse(
        '`schedule="fast"`',
        lambda scene, wrong: scene.blocks(scene.workspace, "fast" if wrong else "auto"),
        "schedule=fast",
        SECOND,
    ),
    WrongUse("rows that do not divide by the ranks", given("x", lambda x: x[:3]), "x has 3 rows", SECOND),
    WrongUse("K of x and weight differ", given("x", lambda x: x[:, :8].contiguous()), "their K must be equal", SECOND),
    WrongUse("rows of 15 elements", given("x", lambda x: x[:, :15].contiguous()), "a multiple of 16 bytes", SECOND),
    WrongUse("x that is not contiguous", given("x", lambda x: x.t().contiguous().t()), f"strides (1, {ROWS})", SECOND),
    WrongUse("M above `max_rows`", given("x", lambda x: x.repeat(9, 1)), "rows=36 is above max_rows=32", SECOND),
    WrongUse("N above `max_columns`", more_columns, "columns=20 is above max_columns=16", SECOND),
    WrongUse("M that differs between ranks", given("x", lambda x: x.repeat(2, 1)), _DIFFER, SECOND, error=CommunicationError),
    WrongUse("rows that fill no whole tiles", routed("x", lambda x: x[:20]), "positive number of whole tiles", SECOND),
    WrongUse("destinations in int64", routed("destinations", Tensor.long), "destinations is torch.int64", SECOND),
    WrongUse("bounds without an end", routed("bounds", lambda bounds: bounds[:-1]), "bounds has shape [2]", SECOND),
    WrongUse("one weight for all groups", routed("weight", lambda weight: weight[0]), "needed: 3-D", SECOND),
    WrongUse(
        "`slots` above `max_rows`",
        lambda scene, wrong: scene.route(scene.workspace, slots=33 if wrong else 32),
        "slots=33; allowed: 1 to max_rows=32",
        SECOND,
    ),
    WrongUse("a workspace that is no longer", use_a_dropped_exchange, "no such GemmWorkspace"),
    WrongUse("a call later than `timeout_seconds`", come_too_late, "longer than 0.3 s", SECOND, error=CommunicationError),
    WrongUse("calls after one that failed", go_on_after_an_error, "did not take part", SECOND, error=CommunicationError),
]
USES = [*_CREATION, *_CALLS]
