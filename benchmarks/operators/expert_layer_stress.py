"""Works of the stress test of the expert layer, forward and backward: balanced, skewed, and with a rank that has no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from torch import Tensor

from benchmarks.common.harness import World
from benchmarks.operators.expert_layer import Layer, LayerData, compared_with_baseline, new_workspace
from benchmarks.operators.stress import Work
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.ops.moe import ExpertWorkspace

# Experts are those of a rank; the last layer has a rank without tokens.
FULL = (
    Layer(2, 2, 1024, 2048, 1000, "balanced"),
    Layer(8, 8, 512, 256, 700, "zipf"),
    Layer(2, 1, 256, 512, 64, "zipf"),
)
TINY = (Layer(2, 2, 8, 16, 10, "zipf"), Layer(1, 1, 16, 8, 5, "balanced"))
_OPERANDS = 3


def works(world: World, *, tiny: bool) -> Sequence[Work]:
    """Layers have a workspace each, and several inputs, so that a result that is left from another call differs. Collective."""
    cells = [replace(cell, experts=cell.experts * world.size) for cell in (TINY if tiny else FULL)]
    found: list[Work] = []
    for cell in cells:
        workspace = new_workspace(world, cell, f"stress {cell.name}")
        is_idle = cell is cells[-1] and world.rank == 1
        found += [layer(world, workspace, cell, number, 0 if is_idle else cell.tokens) for number in range(_OPERANDS)]
    return found


def layer(world: World, workspace: ExpertWorkspace, cell: Layer, number: int, tokens: int) -> Work:
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

    # A graph would keep what the layer holds for its backward pass.
    description = {"layer": asdict(cell), "tokens": world.gather(tokens)}
    return Work(cell.name, workspace, compute, check, description, in_graph=False)
