"""A router and experts that all ranks share, fused, against counts through the host, NCCL and torch's grouped GEMM."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.harness import Work, World, compile_ahead, relative_error
from benchmarks.operators import stress
from benchmarks.operators.case import DTYPE, TIMEOUT_SECONDS, Case, Operator, Pass
from dlrm_fused.config import Gate
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.models.moe import Router
from dlrm_fused.ops.moe import ExpertWorkspace

# Largest relative error against fp32: layers round several times, and their gradients are sums of rounded rows.
LAYER_TOLERANCE = 16 * 2**-8
# The baseline's errors are the yardstick where much cancels out: it rounds in the same places.
_ERROR_OVER_BASELINE = 2.0
# (experts, top_k, width, hidden, tokens of a rank).
LAYERS = (
    *((8, 2, 1024, 4096, 4096), (8, 2, 4096, 4096, 8192), (8, 2, 2048, 4096, 16384), (8, 8, 1024, 2048, 4096)),
    *((32, 2, 2048, 2048, 2048), (32, 2, 4096, 2048, 16384), (32, 8, 1024, 1024, 8192), (32, 8, 2048, 2048, 4096)),
    *((128, 2, 2048, 1024, 8192), (128, 8, 1024, 1024, 2048), (128, 8, 2048, 1024, 16384), (128, 8, 4096, 2048, 4096)),
)
# The popularity of experts follows Zipf's law.
_ZIPF_EXPONENT = 1.0


@dataclass(frozen=True)
class Layer:
    """An expert layer on all ranks, each of which has an equal part of the experts.

    Attributes:
        experts: of all ranks together.
        top_k: experts of a token.
        width: elements of a token.
        hidden: of an expert, between its two matrices.
        tokens: of each rank.
        routing: ``balanced``, or ``zipf``: logits have the logarithms of Zipf's law added, by the popularity of experts.
    """

    experts: int
    top_k: int
    width: int
    hidden: int
    tokens: int
    routing: str

    @property
    def name(self) -> str:
        return f"{self.experts}e top{self.top_k} {self.width}x{self.hidden} t{self.tokens} {self.routing}"

    def phases(self, received: int, sent: int, away: int, ranks: int) -> tuple[Work, Work]:
        """Return the least work of a rank in the forward pass, and in the backward pass.

        In the latter every product has two of its size, and gradients of the weights are written.

        Args:
            received: rows that its experts compute.
            sent: rows of its own tokens that go to other ranks: one for each expert within its host, one to each other host.
            away: rows that it is sent likewise, whose results it sends back. Guests' ways within the host are left out.
        """
        flops, links = 4 * received * self.width * self.hidden, DTYPE.itemsize * (sent + away) * self.width
        weights = 2 * self.experts // ranks * self.width * self.hidden
        memory = DTYPE.itemsize * (weights + 2 * self.tokens * self.width)
        return Work(flops, memory, links), Work(2 * flops, memory + DTYPE.itemsize * weights, links)

    def draw_router(self, device: torch.device, seed: int = 0) -> Tensor:
        """DTYPE [experts, width]: the router's weight, equal on all ranks, for logits of the experts' popularity and noise.

        The first column holds the logarithms of the popularity, and the first element of a token is 1.
        """
        generator = torch.Generator().manual_seed(seed)
        router = torch.empty(self.experts, self.width).normal_(0, self.width**-0.5, generator=generator)
        router[:, 0] = 0.0
        if self.routing == "zipf":
            # Popular experts lie anywhere.
            places = torch.randperm(self.experts, generator=generator)
            router[places, 0] = -_ZIPF_EXPONENT * torch.arange(1.0, self.experts + 1).log()
        return router.to(device, DTYPE)

    def draw_tokens(self, rank: int, ranks: int, device: torch.device, seed: int = 0) -> Tensor:
        """DTYPE [tokens, width] of this rank."""
        generator = torch.Generator(device).manual_seed(-1 - seed * ranks - rank)
        tokens = torch.empty(self.tokens, self.width, dtype=DTYPE, device=device).normal_(generator=generator)
        tokens[:, 0] = 1.0
        return tokens


class LayerData:
    """A router, and this rank's tokens and experts."""

    def __init__(self, world: World, cell: Layer, seed: int = 0) -> None:
        place = (world.rank, world.size, world.device)
        self.router = Router(cell.width, cell.experts, cell.top_k, Gate.softmax).to(world.device)
        with torch.no_grad():
            self.router.linear.weight.copy_(cell.draw_router(world.device, seed))
        self.tokens, self.gradient = cell.draw_tokens(*place, seed), cell.draw_tokens(*place, seed + 1)
        generator = torch.Generator(world.device).manual_seed(seed * world.size + world.rank)
        own = cell.experts // world.size
        # DTYPE [experts / ranks, hidden, width] and [experts / ranks, width, hidden], for results of about 1.
        self.w_in, self.w_out = (
            torch.empty(own, rows, depth, dtype=DTYPE, device=world.device).normal_(0, depth**-0.5, generator=generator)
            for rows, depth in ((cell.hidden, cell.width), (cell.width, cell.hidden))
        )

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


def new_workspace(world: World, cell: Layer, name: str = "benchmark") -> ExpertWorkspace:
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


class LayerCase(Case):
    """A cell on this rank."""

    cell: Layer
    baseline, alone, rivals = "baseline", "", ("baseline",)
    can_be_captured = False  # a graph would keep what the layer holds for its backward pass

    def __init__(self, world: World, cell: Layer) -> None:
        super().__init__(world, cell)
        self.data = LayerData(world, cell)
        self.workspace = new_workspace(world, cell)
        self.computation = ExpertComputation(world.group, self.workspace)
        compile_ahead(world, [self.own_pass(training=True)])

    def own_pass(self, *, training: bool) -> Pass:
        return partial(self.data.compute, self.computation, training=training)

    def passes(self, stage: str) -> dict[str, Pass]:
        training = stage == "layer_training"
        baseline = partial(self.data.compute, ExpertComputation(self.world.group), training=training)
        return {"fused": self.own_pass(training=training), "baseline": baseline}

    def check(self, stage: str) -> dict[str, Any]:
        self.workspace.raise_fault()
        found = self.data.compute(self.computation, training=stage == "layer_training")
        return compared_with_baseline(self.world, self.data, found)

    def phases(self, stage: str) -> Sequence[Work]:
        rank, ranks = self.world.rank, self.world.size
        hosts = self.world.symmetric.hosts
        with torch.no_grad():
            owners = self.data.router(self.data.tokens).experts // (self.cell.experts // ranks)
        host_of = torch.tensor([hosts.of_rank[owner] for owner in range(ranks)], device=owners.device)[owners]
        visits = [int((host_of == host).any(1).sum()) for host in range(len(hosts.ranks))]
        slots = torch.bincount(owners.flatten(), minlength=ranks).tolist()
        by_rank = self.world.gather((slots, visits))  # of each rank: rows for each rank's experts, tokens for each host
        local = set(hosts.local) - {rank}
        received = sum(to_ranks[rank] for to_ranks, _ in by_rank)
        sent = sum(slots[other] for other in local) + sum(visits[host] for host in hosts.others)
        away = sum(by_rank[other][0][rank] for other in local) + sum(by_rank[other][1][hosts.own] for other in hosts.served)
        phases = self.cell.phases(received, sent, away, ranks)
        return phases if stage == "layer_training" else phases[:1]


def all_layers() -> list[Layer]:
    layers = [Layer(*shape, routing) for shape, routing in itertools.product(LAYERS, ("balanced", "zipf"))]
    return [layer for layer in layers if layer.routing == "balanced" or layer.top_k < layer.experts]  # all experts: no skew


# Layers of the stress test. Experts are those of a rank; the last layer has a rank without tokens.
STRESSED = (
    Layer(2, 2, 1024, 2048, 1000, "balanced"),
    Layer(8, 8, 512, 256, 700, "zipf"),
    Layer(2, 1, 256, 512, 64, "zipf"),
)
STRESSED_TINY = (Layer(2, 2, 8, 16, 10, "zipf"), Layer(1, 1, 16, 8, 5, "balanced"))
_REPEATS = 3
# Between hosts the sum of each host's experts is rounded, and rows of an expert have another order.
_TOLERANCE_TO_ONE_HOST = 8 * 2**-8


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Layers have a workspace each, and several inputs, so that a result that is left from another call differs. Collective."""
    cells = [replace(cell, experts=cell.experts * world.size) for cell in (STRESSED_TINY if tiny else STRESSED)]
    found: list[stress.Work] = []
    for cell in cells:
        workspace = new_workspace(world, cell, f"stress {cell.name}")
        is_idle = cell is cells[-1] and world.rank == 1
        found += [stressed(world, workspace, cell, number, 0 if is_idle else cell.tokens) for number in range(_REPEATS)]
    return found


def stressed(world: World, workspace: ExpertWorkspace, cell: Layer, number: int, tokens: int) -> stress.Work:
    """A layer with its router.

    Args:
        tokens: of this rank.
    """
    computation = ExpertComputation(world.group, workspace)
    data = LayerData(world, replace(cell, tokens=tokens), seed=number)
    names: list[str] = []

    def compute(_: Callable[[], None]) -> list[Tensor]:
        results = data.compute(computation, training=True)
        names[:] = results
        return list(results.values())

    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        compared = compared_with_baseline(world, data, dict(zip(names, first, strict=True)))
        return max(compared["errors"].values()), compared["passed"]

    description = {"layer": asdict(cell), "tokens": world.gather(tokens), "in_graph": number > 0}
    # The first graph keeps for ever what the layer holds for its backward pass; other calls get copies of that.
    return stress.Work(
        cell.name, workspace, compute, check, description, in_graph=number > 0, tolerance_to_one_host=_TOLERANCE_TO_ONE_HOST
    )


OPERATOR = Operator(
    open=LayerCase,
    sets={
        # For a test on the CPU.
        "tiny": lambda: [Layer(4, 2, 8, 16, 12, "balanced"), Layer(8, 3, 16, 8, 20, "zipf")],
        "small": lambda: all_layers()[::4],
        "all": all_layers,
    },
    stages=lambda cell: ["layer_forward", "layer_training"],
    works=works,
)
