"""Wrong uses of the expert layer: of its workspace, and of the operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.symmetric import symmetric_group
from tests.ops.moe.cases import SCALE, Case, draw, evenly, make_workspace, run_fused, run_reference
from tests.ops.wrong_use import SECOND, TIMEOUT_SECONDS, Scene, WrongUse

CASE = Case("wrong uses", tokens=(5, 4), experts=4, top_k=2, choose=evenly, width=8, hidden=16)
MAX_TOKENS = 6


class Layer(Scene):
    """A layer of four experts on two ranks, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = draw(CASE, seed=1)[self.rank]
        self.correct = self.make()
        self.held = [self.call(self.correct)]

    def make(self, **settings: Any) -> ExpertWorkspace:
        return make_workspace(self.group, CASE, **{"max_tokens": MAX_TOKENS, "timeout_seconds": TIMEOUT_SECONDS, **settings})

    def begin(self) -> None:
        self.workspace = self.make()
        self.held[1:] = [self.call(self.workspace)]

    def tables(self) -> Sequence[Tensor]:
        return self.inputs.arguments()

    def call(self, workspace: ExpertWorkspace, gradient_scale: float = SCALE, **changes: Tensor) -> Tensor:
        given = dict(zip(("x", "experts", "gates", "w_in", "w_out"), self.inputs.arguments(), strict=True))
        return expert_layer(workspace, **{**given, **changes}, gradient_scale=gradient_scale)

    def difference(self) -> float:
        fresh = (draw(CASE, seed=1)[self.rank] for _ in range(2))
        ours, plain = run_fused(self.correct, next(fresh)), run_reference(next(fresh))
        return max(float((ours[key] - plain[key]).abs().max()) for key in ours)


def settings(**wrong: Any) -> Callable[[Layer, bool], object]:
    """Make a workspace with other settings."""
    return lambda scene, is_wrong: scene.make(**(wrong if is_wrong else {}))


def given(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Layer, bool], object]:
    """Give another tensor."""

    def attempt(scene: Layer, is_wrong: bool) -> None:
        right = getattr(scene.inputs, key)
        scene.call(scene.workspace, **({key: change(right.detach().clone())} if is_wrong else {}))

    return attempt


def id_of(token: int, choice: int, expert: int) -> Callable[[Layer, bool], object]:
    """Give a token another expert."""

    def change(experts: Tensor) -> Tensor:
        experts[token, choice] = expert
        return experts

    return given("experts", change)


def twice_the_same(experts: Tensor) -> Tensor:
    experts[2] = 3
    return experts


def other_hidden(hidden: int) -> Callable[[Layer, bool], object]:
    def attempt(scene: Layer, is_wrong: bool) -> None:
        size = hidden if is_wrong else CASE.hidden
        scene.call(scene.workspace, w_in=torch.ones(2, size, CASE.width), w_out=torch.ones(2, CASE.width, size))

    return attempt


def half_a_swiglu(scene: Layer, is_wrong: bool) -> None:
    workspace = scene.make(activation="swiglu")
    w_in = scene.inputs.w_in.detach()
    scene.call(workspace, w_in=w_in if is_wrong else torch.cat([w_in, w_in], dim=1))


def too_many_tokens(scene: Layer, is_wrong: bool) -> None:
    tokens = MAX_TOKENS + 1 if is_wrong else 1
    ids = torch.zeros(tokens, CASE.top_k, dtype=torch.int64)
    ids[:, 1] = 1
    scene.call(scene.workspace, x=torch.ones(tokens, CASE.width), experts=ids, gates=torch.ones(tokens, CASE.top_k))


def other_scale(scene: Layer, is_wrong: bool) -> None:
    scene.call(scene.workspace, gradient_scale=1.0 if is_wrong else SCALE)


def no_backward(scene: Layer, is_wrong: bool) -> None:
    out = scene.call(scene.workspace)
    if is_wrong:
        scene.call(scene.workspace)
    else:
        torch.autograd.grad(out, scene.inputs.leaves(), torch.ones_like(out))


def use_a_closed_group(scene: Layer, is_wrong: bool) -> None:
    group = symmetric_group(dist.new_group())
    group.close()
    make_workspace(group, CASE)


def use_a_dropped_exchange(scene: Layer, is_wrong: bool) -> None:
    handle, scene.workspace = scene.workspace.handle, None  # type: ignore[assignment]
    torch.ops.dlrm_fused.expert_layer(*scene.inputs.arguments(), SCALE, handle)


def come_too_late(scene: Layer, is_wrong: bool) -> None:
    scene.workspace = scene.make(timeout_seconds=0.3)
    scene.call(scene.workspace)
    if is_wrong:
        time.sleep(1.0)
    scene.call(scene.workspace)


def go_on_after_an_error(scene: Layer, is_wrong: bool) -> None:
    try:
        given("x", Tensor.half)(scene, is_wrong)
    except UserError:
        scene.call(scene.workspace)


_CREATION = [
    WrongUse("`dtype=torch.float64`", settings(dtype=torch.float64), "dtype=torch.float64", SECOND, "dtype=torch.float64"),
    WrongUse("experts that the ranks do not divide", settings(experts=5), "experts=5", SECOND, "experts=5"),
    WrongUse("no experts", settings(experts=0, top_k=0), "experts=0", SECOND, "experts=0"),
    WrongUse("`top_k` above `experts`", settings(top_k=5), "top_k=5", SECOND, "top_k=5"),
    WrongUse("`max_tokens=2.5`", settings(max_tokens=2.5), "max_tokens=2.5", SECOND, "max_tokens=2.5"),
    WrongUse("rows that are not a multiple of 16 bytes", settings(width=10), "width=10", SECOND, "width=10"),
    WrongUse('`activation="relu"`', settings(activation="relu"), "activation=relu", SECOND, "activation=relu"),
    WrongUse("`timeout_seconds=0`", settings(timeout_seconds=0.0), "timeout_seconds=0.0", SECOND, "timeout_seconds=0.0"),
    *(
        WrongUse(f"`{key}` that differs between ranks", settings(**{key: value}), f"{key} differs", SECOND, f"{key} differs")
        for key, value in {
            "name": "other",
            "dtype": torch.bfloat16,
            "experts": 8,
            "top_k": 1,
            "max_tokens": 7,
            "width": 16,
            "activation": "swiglu",
        }.items()
    ),
    WrongUse("more rows than int32 counts", settings(max_tokens=10**9), "max_tokens=1000000000"),
    WrongUse(
        "more tokens than memory holds", settings(max_tokens=10**8, width=8192), "but this host has", error=CommunicationError
    ),
    WrongUse("a group that is closed", use_a_closed_group, "its group is closed"),
]
_DIFFER = "differ in shapes or settings"
_CALLS = [
    WrongUse("tokens in fp16", given("x", Tensor.half), "x is torch.float16", SECOND),
    WrongUse("one token without its dimension", given("x", lambda x: x[0]), f"x has shape [{CASE.width}]", SECOND),
    WrongUse("tokens of another width", given("x", lambda x: x[:, :4]), "x has shape [4, 4]", SECOND),
    WrongUse("tokens whose columns are contiguous", given("x", lambda x: x.t().contiguous().t()), "strides (1, 4)", SECOND),
    WrongUse("more than `max_tokens`", too_many_tokens, "7 tokens are above max_tokens=6", SECOND),
    WrongUse("ids in int32", given("experts", Tensor.int), "experts is torch.int32", SECOND),
    WrongUse(
        "one expert a token, not `top_k`",
        given("experts", lambda ids: ids[:, :1].contiguous()),
        "experts has shape [4, 1]",
        SECOND,
    ),
    WrongUse("an expert that does not exist", id_of(1, 0, 4), "experts holds 4", SECOND),
    WrongUse("a negative id other than -1", id_of(1, 0, -2), "experts holds -2", SECOND),
    WrongUse("a token with one expert twice", given("experts", twice_the_same), "experts[2] holds 3 twice", SECOND),
    WrongUse("gates in bf16", given("gates", Tensor.bfloat16), "gates is torch.bfloat16", SECOND),
    WrongUse("gates of fewer tokens", given("gates", lambda gates: gates[:3]), "gates has shape [3, 2]", SECOND),
    WrongUse("weights of all ranks' experts", given("w_in", lambda w: w.repeat(2, 1, 1)), "w_in has shape [4, 16, 8]", SECOND),
    WrongUse("`w_in` of SiLU for SwiGLU", half_a_swiglu, "needed: [2, 8, 8]", SECOND),
    WrongUse("one weight for all experts", given("w_in", lambda w: w[0]), "w_in has shape [16, 8]", SECOND),
    WrongUse(
        "`w_out` laid out as `w_in`",
        given("w_out", lambda w: w.transpose(1, 2).contiguous()),
        "w_out has shape [2, 16, 8]",
        SECOND,
    ),
    WrongUse("`w_out` in fp64", given("w_out", Tensor.double), "w_out is torch.float64", SECOND),
    WrongUse("hidden rows that are not a multiple of 16 bytes", other_hidden(10), "hidden width=10", SECOND),
    WrongUse("a hidden width that differs between ranks", other_hidden(8), _DIFFER, SECOND, error=CommunicationError),
    WrongUse("`gradient_scale` that differs between ranks", other_scale, _DIFFER, SECOND, error=CommunicationError),
    WrongUse("a forward pass where others run the backward pass", no_backward, _DIFFER, SECOND, error=CommunicationError),
    WrongUse("a workspace that is no longer", use_a_dropped_exchange, "no such ExpertWorkspace"),
    WrongUse("a call later than `timeout_seconds`", come_too_late, "longer than 0.3 s", SECOND, error=CommunicationError),
    WrongUse("calls after one that failed", go_on_after_an_error, "did not take part", SECOND, error=CommunicationError),
]
USES = [*_CREATION, *_CALLS]
