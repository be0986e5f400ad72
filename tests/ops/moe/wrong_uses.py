"""Wrong uses of the expert layer: of its workspace, and of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.moe.cases import SCALE, Case, draw, evenly, make_workspace, run_fused, run_reference
from tests.ops.workspace_wrong_use import (
    CALL_AFTER_AN_ERROR,
    CLOSED_GROUP,
    LATE_CALL,
    Attempt,
    WorkspaceScene,
    calls_that_differ,
    dropped,
    given,
    settings,
    settings_that_differ,
    too_large,
    wrong_setting,
)
from tests.ops.wrong_use import SECOND, WrongUse

CASE = Case("wrong uses", tokens=(5, 4), experts=4, top_k=2, choose=evenly, width=8, hidden=16)
MAX_TOKENS = 6


class Layer(WorkspaceScene):
    """A layer of four experts on two ranks, over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        drawn = draw(CASE, seed=1)[self.rank]
        self.inputs = dict(zip(("x", "experts", "gates", "w_in", "w_out"), drawn.arguments(), strict=True))
        self.leaves = drawn.leaves()
        self.hold_results()

    def create(self, group: SymmetricGroup, **settings: Any) -> ExpertWorkspace:
        return make_workspace(group, CASE, **{"max_tokens": MAX_TOKENS, **settings})

    def tables(self) -> Sequence[Tensor]:
        return list(self.inputs.values())

    def results(self, workspace: ExpertWorkspace, **changes: Any) -> list[Tensor]:
        return [expert_layer(workspace, **{**self.inputs, "gradient_scale": SCALE, **changes})]

    def difference(self) -> float:
        fresh = (draw(CASE, seed=1)[self.rank] for _ in range(2))
        ours, plain = run_fused(self.correct, next(fresh)), run_reference(next(fresh))
        return max(float((ours[key] - plain[key]).abs().max()) for key in ours)


def id_of(token: int, choice: int, expert: int) -> Attempt:
    """Give a token another expert."""

    def change(experts: Tensor) -> Tensor:
        experts[token, choice] = expert
        return experts

    return given(experts=change)


def twice_the_same(experts: Tensor) -> Tensor:
    experts[2] = 3
    return experts


def other_hidden(hidden: int) -> Attempt:
    def attempt(scene: Layer, is_wrong: bool) -> None:
        size = hidden if is_wrong else CASE.hidden
        scene.results(scene.workspace, w_in=torch.ones(2, size, CASE.width), w_out=torch.ones(2, CASE.width, size))

    return attempt


def half_a_swiglu(scene: Layer, is_wrong: bool) -> None:
    workspace = scene.make(activation="swiglu")
    w_in = scene.inputs["w_in"].detach()
    scene.results(workspace, w_in=w_in if is_wrong else torch.cat([w_in, w_in], dim=1))


def too_many_tokens(scene: Layer, is_wrong: bool) -> None:
    tokens = MAX_TOKENS + 1 if is_wrong else 1
    ids = torch.zeros(tokens, CASE.top_k, dtype=torch.int64)
    ids[:, 1] = 1
    scene.results(scene.workspace, x=torch.ones(tokens, CASE.width), experts=ids, gates=torch.ones(tokens, CASE.top_k))


def other_scale(scene: Layer, is_wrong: bool) -> None:
    scene.results(scene.workspace, gradient_scale=1.0 if is_wrong else SCALE)


def no_backward(scene: Layer, is_wrong: bool) -> None:
    (out,) = scene.results(scene.workspace)
    if is_wrong:
        scene.results(scene.workspace)
    else:
        torch.autograd.grad(out, scene.leaves, torch.ones_like(out))


USES = [
    wrong_setting(dtype=torch.float64),
    wrong_setting("experts that the ranks do not divide", experts=5),
    WrongUse("no experts", settings(experts=0, top_k=0), "experts=0", SECOND, "experts=0"),
    wrong_setting("`top_k` above `experts`", top_k=5),
    wrong_setting(max_tokens=2.5),
    wrong_setting("rows that are not a multiple of 16 bytes", width=10),
    wrong_setting('`activation="relu"`', activation="relu"),
    wrong_setting("`timeout_seconds=0`", timeout_seconds=0.0),
    *settings_that_differ(name="other", dtype=torch.bfloat16, experts=8, top_k=1, max_tokens=7, width=16, activation="swiglu"),
    WrongUse("more rows than int32 counts", settings(max_tokens=10**9), "max_tokens=1000000000"),
    too_large("more tokens than memory holds", max_tokens=10**8, width=8192),
    CLOSED_GROUP,
    WrongUse("tokens in fp16", given(x=Tensor.half), "x is torch.float16", SECOND),
    WrongUse("one token without its dimension", given(x=lambda x: x[0]), f"x has shape [{CASE.width}]", SECOND),
    WrongUse("tokens of another width", given(x=lambda x: x[:, :4]), "x has shape [4, 4]", SECOND),
    WrongUse("tokens whose columns are contiguous", given(x=lambda x: x.t().contiguous().t()), "strides (1, 4)", SECOND),
    WrongUse("more than `max_tokens`", too_many_tokens, "7 tokens are above max_tokens=6", SECOND),
    WrongUse("ids in int32", given(experts=Tensor.int), "experts is torch.int32", SECOND),
    WrongUse(
        "one expert a token, not `top_k`",
        given(experts=lambda ids: ids[:, :1].contiguous()),
        "experts has shape [4, 1]",
        SECOND,
    ),
    WrongUse("an expert that does not exist", id_of(1, 0, 4), "experts holds 4", SECOND),
    WrongUse("a negative id other than -1", id_of(1, 0, -2), "experts holds -2", SECOND),
    WrongUse("a token with one expert twice", given(experts=twice_the_same), "experts[2] holds 3 twice", SECOND),
    WrongUse("gates in bf16", given(gates=Tensor.bfloat16), "gates is torch.bfloat16", SECOND),
    WrongUse("gates of fewer tokens", given(gates=lambda gates: gates[:3]), "gates has shape [3, 2]", SECOND),
    WrongUse("weights of all ranks' experts", given(w_in=lambda w: w.repeat(2, 1, 1)), "w_in has shape [4, 16, 8]", SECOND),
    WrongUse("`w_in` of SiLU for SwiGLU", half_a_swiglu, "needed: [2, 8, 8]", SECOND),
    WrongUse("one weight for all experts", given(w_in=lambda w: w[0]), "w_in has shape [16, 8]", SECOND),
    WrongUse(
        "`w_out` laid out as `w_in`",
        given(w_out=lambda w: w.transpose(1, 2).contiguous()),
        "w_out has shape [2, 16, 8]",
        SECOND,
    ),
    WrongUse("`w_out` in fp64", given(w_out=Tensor.double), "w_out is torch.float64", SECOND),
    WrongUse("hidden rows that are not a multiple of 16 bytes", other_hidden(10), "hidden width=10", SECOND),
    calls_that_differ("a hidden width that differs between ranks", other_hidden(8)),
    calls_that_differ("`gradient_scale` that differs between ranks", other_scale),
    calls_that_differ("a forward pass where others run the backward pass", no_backward),
    dropped(
        "ExpertWorkspace",
        lambda scene, handle: torch.ops.dlrm_fused.expert_layer(*scene.inputs.values(), SCALE, handle),
    ),
    LATE_CALL,
    CALL_AFTER_AN_ERROR,
]
