"""Tokens and experts to try the expert layer with, and what must come out, by plain loops over all of them."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer, reference
from dlrm_fused.ops.moe.activations import ACTIVATIONS
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import cpu_group

SCALE = 0.5


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, and where they go.

    Attributes:
        tokens: of each rank.
        experts: of all ranks together.
        choose: ``choose(tokens, case, generator)``: int64 [tokens, top_k].
    """

    name: str
    tokens: tuple[int, ...]
    experts: int
    top_k: int
    choose: Callable[[int, Case, torch.Generator], Tensor]
    width: int = 8
    hidden: int = 16
    activation: str = "silu"

    @property
    def ranks(self) -> int:
        return len(self.tokens)


def evenly(tokens: int, case: Case, generator: torch.Generator) -> Tensor:
    """Any experts, all of them different."""
    return torch.rand(tokens, case.experts, generator=generator).argsort(1)[:, : case.top_k].contiguous()


def with_gaps(tokens: int, case: Case, generator: torch.Generator) -> Tensor:
    """A third of the choices are none, and the first token has none at all."""
    chosen = evenly(tokens, case, generator)
    chosen[torch.rand(chosen.shape, generator=generator) < 1 / 3] = -1
    chosen[:1] = -1
    return chosen


def skewed(tokens: int, case: Case, generator: torch.Generator) -> Tensor:
    """Half of all tokens go to the last expert, the others never to the first or last one."""
    chosen = 1 + torch.rand(tokens, case.experts - 2, generator=generator).argsort(1)[:, : case.top_k].contiguous()
    chosen[: (tokens + 1) // 2, 0] = case.experts - 1
    return chosen


def all_to_one(tokens: int, case: Case, generator: torch.Generator) -> Tensor:
    """Every token goes to the experts 0 to top_k - 1."""
    return torch.arange(case.top_k).expand(tokens, case.top_k).contiguous()


@dataclass
class Inputs:
    """Of one rank, with gradients."""

    x: Tensor
    experts: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor
    out_gradient: Tensor = field(repr=False)

    def arguments(self) -> list[Tensor]:
        return [self.x, self.experts, self.gates, self.w_in, self.w_out]

    def leaves(self) -> list[Tensor]:
        return [self.x, self.gates, self.w_in, self.w_out]


def draw(case: Case, seed: int, dtype: torch.dtype = torch.float32) -> list[Inputs]:
    """Inputs of all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    local, by_rank = case.experts // case.ranks, []
    for tokens in case.tokens:
        inputs = Inputs(
            x=normal(tokens, case.width).to(dtype),
            experts=case.choose(tokens, case, generator),
            gates=normal(tokens, case.top_k),
            w_in=(normal(local, ACTIVATIONS[case.activation].parts * case.hidden, case.width) / case.width**0.5).to(dtype),
            w_out=(normal(local, case.width, case.hidden) / case.hidden**0.5).to(dtype),
            out_gradient=normal(tokens, case.width).to(dtype),
        )
        for leaf in inputs.leaves():
            leaf.requires_grad_()
        by_rank.append(inputs)
    return by_rank


Results = dict[str, Tensor]


def results(out: Tensor, inputs: Inputs) -> Results:
    """The result, and after its backward pass the gradients."""
    out.backward(inputs.out_gradient)
    gradients = dict(zip(("dx", "dgates", "dw_in", "dw_out"), (leaf.grad for leaf in inputs.leaves()), strict=True))
    return {"out": out.detach(), **gradients}  # type: ignore[dict-item]


def activate(h: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(h)
    gate, up = h.view(2, -1)
    return torch.nn.functional.silu(gate) * up


def expected(case: Case, seed: int, without_gradient: Sequence[int] = ()) -> list[Results]:
    """Of all ranks, by a loop over tokens and choices, without any workspace; outputs of some ranks may get no gradient."""
    by_rank = draw(case, seed)
    for rank in without_gradient:
        by_rank[rank].out_gradient.zero_()
    local = case.experts // case.ranks
    outs = []
    for inputs in by_rank:
        rows = []
        for token in range(len(inputs.x)):
            row = torch.zeros(case.width)
            for choice, expert in enumerate(inputs.experts[token].tolist()):
                if expert >= 0:
                    workspace = by_rank[expert // local]
                    hidden = activate(workspace.w_in[expert % local] @ inputs.x[token], case.activation)
                    row = row + inputs.gates[token, choice] * (workspace.w_out[expert % local] @ hidden)
            rows.append(row)
        outs.append(torch.stack(rows) if rows else torch.zeros(0, case.width))
    used = [(out, inputs.out_gradient) for out, inputs in zip(outs, by_rank, strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in used], [gradient for _, gradient in used])
    for inputs in by_rank:
        for leaf in inputs.leaves():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for weight in (inputs.w_in, inputs.w_out):
            assert weight.grad is not None
            weight.grad *= SCALE
    return [
        {
            "out": out.detach(),
            "dx": inputs.x.grad,
            "dgates": inputs.gates.grad,
            "dw_in": inputs.w_in.grad,
            "dw_out": inputs.w_out.grad,
        }  # type: ignore[dict-item]
        for out, inputs in zip(outs, by_rank, strict=True)
    ]


def make_workspace(group: SymmetricGroup, case: Case, **settings: Any) -> ExpertWorkspace:
    """A workspace for the case; settings may differ from its own."""
    defaults = {
        "name": "experts",
        "experts": case.experts,
        "top_k": case.top_k,
        "max_tokens": max(case.tokens) + 1,
        "width": case.width,
        "dtype": torch.float32,
        "activation": case.activation,
        "timeout_seconds": 60.0,
    }
    return ExpertWorkspace(group, **{**defaults, **settings})  # type: ignore[arg-type]


def run_fused(workspace: ExpertWorkspace, inputs: Inputs) -> Results:
    return results(expert_layer(workspace, inputs.x, inputs.experts, inputs.gates, inputs.w_in, inputs.w_out, SCALE), inputs)


def run_reference(inputs: Inputs, activation: str = "silu") -> Results:
    process_group = dist.group.WORLD if dist.is_initialized() else None
    return results(reference(process_group, *inputs.arguments(), SCALE, activation), inputs)


def run_cases(cases: list[Case], dtype: torch.dtype = torch.float32) -> list[tuple[Results, Results]]:
    """In a process of each rank: the results of all cases, fused and of the reference."""
    with cpu_group() as group:
        seen = []
        for number, case in enumerate(cases):
            workspace = make_workspace(group, case, name=f"experts of case {number}", dtype=dtype)
            fused = run_fused(workspace, draw(case, number, dtype)[group.rank])
            workspace.raise_fault()
            seen.append((fused, run_reference(draw(case, number, dtype)[group.rank], case.activation)))
        return seen


def run_float32_weights(case: Case, dtype: torch.dtype) -> tuple[Results, Results]:
    """In a process of each rank: results with weights in ``dtype``, and with these in float32 that are rounded to it."""
    with cpu_group() as group:
        workspace = make_workspace(group, case, dtype=dtype)
        rounded, exact = (draw(case, 0, dtype)[group.rank] for _ in range(2))
        exact.w_in, exact.w_out = (w.detach().float().requires_grad_() for w in (rounded.w_in, rounded.w_out))
        with torch.no_grad():
            exact.w_in += exact.w_in * 1e-6  # rounded again by the layer
        return run_fused(workspace, rounded), run_fused(workspace, exact)


SEEDS = 3


def run_steps(case: Case, steps: int) -> list[Results]:
    """In a process of each rank: steps of delays and of passes in flight; fails unless the same inputs give the same bits.

    Up to three forward passes are followed by their backward passes, oldest first.

    Returns:
        Results of each seed, 0 to SEEDS - 1.
    """
    with cpu_group() as group:
        workspace = make_workspace(group, case)
        delays = random.Random(group.rank)
        first: dict[int, Results] = {}
        in_flight: deque[tuple[int, Tensor, Inputs]] = deque()
        for step in range(steps):
            inputs = draw(case, step % SEEDS)[group.rank]
            if group.rank == 1 or delays.random() < 0.2:
                time.sleep(delays.uniform(0, 0.005))
            in_flight.append((step % SEEDS, expert_layer(workspace, *inputs.arguments(), SCALE), inputs))
            while len(in_flight) > (step // 4) % 3:
                seed, out, its_inputs = in_flight.popleft()
                own = results(out, its_inputs)
                wanted = first.setdefault(seed, own)
                for key, value in own.items():
                    assert torch.equal(value, wanted[key]), f"step {step}: {key} differs from that of the same inputs before"
        in_flight.clear()
        workspace.raise_fault()
        return [first[seed] for seed in range(SEEDS)]


EVEN = "any experts"
CASES = {
    1: [
        Case(EVEN, (6,), 4, 2, evenly),
        Case("gaps", (7,), 4, 3, with_gaps),
        Case("no tokens at all", (0,), 2, 1, evenly),
        Case("SwiGLU", (7,), 4, 3, with_gaps, activation="swiglu"),
    ],
    2: [
        Case(EVEN, (6, 5), 4, 2, evenly),
        Case("gaps, as many choices as experts", (5, 7), 4, 4, with_gaps),
        Case("one rank has no tokens", (9, 0), 4, 1, skewed),
        Case("SwiGLU", (6, 5), 4, 2, with_gaps, activation="swiglu"),
    ],
    3: [Case("skewed, one rank has no tokens", (12, 0, 7), 6, 2, skewed), Case("gaps", (3, 4, 5), 9, 3, with_gaps)],
    4: [
        Case("skewed, one rank has no tokens", (0, 10, 6, 8), 8, 2, skewed),
        Case("all to one rank", (4, 3, 2, 1), 8, 2, all_to_one),
        Case("one expert a rank", (4, 4, 4, 4), 4, 3, evenly),
    ],
}
