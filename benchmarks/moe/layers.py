"""One expert layer of the GEMM + All-to-All benchmark: contestants, times, checks. See gemm_all_to_all.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.harness import Ceilings, World, relative_error, time_interleaved
from benchmarks.gemm_all_to_all.cells import DTYPE, LAYER_TOLERANCE, Layer
from dlrm_fused.config import Gate
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.moe import Router
from dlrm_fused.ops.moe import ExpertWorkspace

TIMEOUT_SECONDS = 60.0
# Where much cancels out, the errors of the baseline are a yardstick: it rounds in the same places.
_ERROR_OVER_BASELINE = 2.0


class LayerData:
    """A router, and this rank's tokens and experts."""

    def __init__(self, world: World, cell: Layer, seed: int = 0) -> None:
        place = (world.rank, world.size, world.device)
        self.router = Router(cell.width, cell.experts, cell.top_k, Gate.softmax).to(world.device)
        with torch.no_grad():
            self.router.linear.weight.copy_(cell.draw_router(world.device, seed))
        self.tokens = cell.draw_tokens(*place, seed)
        self.w_in, self.w_out = cell.draw_weights(*place, seed)
        self.gradient = cell.draw_tokens(*place, seed + 1)

    def compute(self, computation: ExpertComputation, *, training: bool, dtype: torch.dtype = DTYPE) -> dict[str, Tensor]:
        """The output of the layer with its router, and in training the gradients of everything. Collective."""
        with torch.set_grad_enabled(training):
            tokens, w_in, w_out = (
                tensor.detach().to(dtype).requires_grad_(training) for tensor in (self.tokens, self.w_in, self.w_out)
            )
            routing = self.router(tokens)
            output = computation(tokens, routing.experts, routing.gates, w_in, w_out)
        if not training:
            return {"output": output}
        leaves = {"tokens": tokens, "router": self.router.linear.weight, "w_in": w_in, "w_out": w_out}
        gradients = torch.autograd.grad(output, list(leaves.values()), self.gradient.to(dtype))
        return {"output": output.detach(), **dict(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))}


def largest_errors(world: World, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest relative errors on any rank, by what is compared; those of experts' weights are relative to each expert's.

    Collective.
    """

    def error(what: str) -> float:
        if expected[what].dim() < 3:
            return relative_error(found[what], expected[what])
        return max(relative_error(*of_expert) for of_expert in zip(found[what], expected[what], strict=True))

    every_rank = world.gather({what: error(what) for what in expected})
    return {what: max(own[what] for own in every_rank) for what in expected}


def compared_with_baseline(world: World, data: LayerData, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Whether a layer's results are right, and their errors and the baseline's against the baseline in fp32. Collective.

    Args:
        found: as :meth:`LayerData.compute` returns it.
    """
    baseline, training = ExpertComputation(world.group), len(found) > 1
    expected = data.compute(baseline, training=training, dtype=torch.float32)
    errors = largest_errors(world, found, expected)
    of_baseline = largest_errors(world, data.compute(baseline, training=training), expected)
    limits = {what: max(LAYER_TOLERANCE, _ERROR_OVER_BASELINE * error) for what, error in of_baseline.items()}
    passed = all(error <= limits[what] for what, error in errors.items())
    return {"passed": passed, "errors": errors, "errors_of_baseline": of_baseline}


def new_workspace(world: World, cell: Layer, name: str) -> ExpertWorkspace:
    """Collective."""
    return ExpertWorkspace(
        world.symmetric,
        name=name,
        experts=cell.experts,
        top_k=cell.top_k,
        max_tokens=cell.tokens,
        width=cell.width,
        dtype=DTYPE,
        timeout_seconds=TIMEOUT_SECONDS,
    )


class LayerRun:
    """One cell on this rank. Everything is collective."""

    def __init__(self, world: World, cell: Layer, seconds: float) -> None:
        """Args:
        seconds: of timing, for each stage.
        """
        self.world, self.cell, self.seconds = world, cell, seconds
        self.data = LayerData(world, cell)
        self.workspace = new_workspace(world, cell, cell.name)
        self.fused, self.baseline = ExpertComputation(world.group, self.workspace), ExpertComputation(world.group)

    def compute(self, by: ExpertComputation, training: bool) -> None:
        self.data.compute(by, training=training)

    def step(self) -> None:
        """What has to be compiled: forward and backward, fused."""
        self.compute(self.fused, training=True)

    def result(self, ceilings: Ceilings, teraflops: float, *, training: bool) -> dict[str, Any]:
        """What the report says of the cell."""
        contestants = {"fused": self.fused, "baseline": self.baseline}
        calls = {name: partial(self.compute, by, training) for name, by in contestants.items()}
        timings = time_interleaved(self.world, calls, self.seconds)
        self.workspace.raise_fault()
        us = {name: timing.microseconds for name, timing in timings.items()}
        least = self.least_work(ceilings, teraflops, training)
        return {
            **compared_with_baseline(self.world, self.data, self.data.compute(self.fused, training=training)),
            "us": us,
            "ratio": us["fused"] / us["baseline"],
            **least,
            "over_floor": us["fused"] / least["floor_us"],
            "timed": "bursts",
            "spread": {name: timing.spread for name, timing in timings.items()},
            "by_rank_us": {name: list(timing.by_rank) for name, timing in timings.items()},
        }

    def least_work(self, ceilings: Ceilings, teraflops: float, training: bool) -> dict[str, float]:
        """The floor of the slowest rank, and what it is made of: most rows, flops and bytes of any rank."""
        rank, ranks = self.world.rank, self.world.size
        with torch.no_grad():
            owners = self.data.router(self.data.tokens).experts.flatten() // (self.cell.experts // ranks)
        rows = self.world.gather(torch.bincount(owners, minlength=ranks).tolist())  # [source][workspace]
        received = sum(own[rank] for own in rows)
        sent, away = sum(rows[rank]) - rows[rank][rank], received - rows[rank][rank]
        phases = [self.cell.forward_work(received, sent, away, ranks)]
        if training:
            phases.append(self.cell.backward_work(received, sent, away, ranks))
        every_rank = self.world.gather(
            {
                "rows_received": received,
                "flops": sum(work.flops for work in phases),
                "memory_bytes": sum(work.memory_bytes for work in phases),
                "link_bytes": sum(work.link_bytes for work in phases),
                "floor_us": sum(work.least_microseconds(ceilings, teraflops) for work in phases),
            }
        )
        return {key: max(work[key] for work in every_rank) for key in every_rank[0]}
