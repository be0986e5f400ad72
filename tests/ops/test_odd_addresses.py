"""Tensors that begin anywhere in memory, as views of a tensor of all parameters do, give what others give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_all_to_all
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import cpu_group, run_ranks

pytestmark = pytest.mark.interpreted

HALF = torch.bfloat16
RANKS = 2


def drawn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


def sums(group: SymmetricGroup, few: bool) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = GemvWorkspace(group, name=f"sums {few}", max_columns=16, max_rows=128, dtype=HALF)
    rows, schedule = (3, "kernel") if few else (128, "scatter")
    tensors = [drawn(rows, 32), drawn(16, 32), drawn(16), drawn(rows, 16), drawn(16)]
    return lambda *given: torch.add(*gemv_all_reduce(workspace, *given, schedule=schedule)), tensors


def products(group: SymmetricGroup) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = GemmWorkspace(group, name="products", max_rows=128, max_columns=16, dtype=HALF)
    return lambda *given: gemm_all_to_all(workspace, *given, schedule="kernel"), [drawn(128, 32), drawn(16, 32)]


def gathers(group: SymmetricGroup) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = ShardWorkspace(group, name="gathers", max_rows=128, max_columns=32, dtype=HALF)
    return lambda *given: all_gather_gemm(workspace, *given, schedule="kernel"), [drawn(64, 32), drawn(16, 32)]


def scatters(group: SymmetricGroup) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = ShardWorkspace(group, name="scatters", max_rows=128, max_columns=32, dtype=HALF)
    return lambda *given: gemm_reduce_scatter(workspace, *given, schedule="kernel"), [drawn(128, 32), drawn(16, 32)]


def experts(group: SymmetricGroup) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = ExpertWorkspace(group, name="experts", experts=4, top_k=2, max_tokens=8, width=16, dtype=HALF)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    gates = torch.rand(8, 2)

    def run(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        return expert_layer(workspace, x, ids, gates, w_in, w_out)

    return run, [drawn(8, 16), drawn(2, 32, 16), drawn(2, 16, 32)]


def sequences(group: SymmetricGroup) -> tuple[Callable[..., Any], list[Tensor]]:
    workspace = SequenceWorkspace(group, 16, name="sequences", output_dtype=HALF, forward_wire=HALF, backward_wire=HALF)
    counts = [[3, 5]] * RANKS
    count = counts[0][group.rank]
    offsets = torch.tensor([0, count, 2 * count])  # a feature, and a sample of each rank

    def run(*rows: Tensor) -> Tensor:
        return torch.stack([sequence_all_to_all(workspace, own, offsets, [1] * RANKS, counts) for own in rows]).sum(dim=0)

    return run, [drawn(2 * count, 16), drawn(2 * count, 16)]


OPERATORS: dict[str, Callable[[SymmetricGroup], tuple[Callable[..., Any], list[Tensor]]]] = {
    "gemv_all_reduce": lambda group: sums(group, few=True),
    "gemv_all_reduce of many rows": lambda group: sums(group, few=False),
    "gemm_all_to_all": products,
    "all_gather_gemm": gathers,
    "gemm_reduce_scatter": scatters,
    "expert_layer": experts,
    "sequence_all_to_all": sequences,
}


def odd(tensor: Tensor) -> Tensor:
    """Return a copy that begins at the second element of its memory."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def results(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the result and the gradients, each of tensors as an allocator gives them, and of those at odd addresses."""
    with cpu_group() as group:
        torch.manual_seed(group.rank)
        run, tensors = OPERATORS[name](group)
        upstream = None
        both = []
        for given in (tensors, [odd(tensor) for tensor in tensors]):
            leaves = [tensor.detach().requires_grad_() for tensor in given]
            out = run(*leaves)
            upstream = drawn(*out.shape) if upstream is None else odd(upstream)
            both.append([out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)])
        pairs = [pair for pair in zip(*both, strict=True) if pair[0] is not None]
        return [(one.detach().clone(), other.detach().clone()) for one, other in pairs]


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_at_odd_addresses_give_the_same_bits(name: str) -> None:
    for pairs in run_ranks(RANKS, results, name):
        assert len(pairs) > 2
        for expected, seen in pairs:
            assert expected.abs().sum() > 0
            assert torch.equal(seen, expected)


def layouts_of_sums() -> int:
    """On a rank: the layouts that calls with tensors anywhere have."""
    with cpu_group() as group:
        workspace = GemvWorkspace(group, name="sums", max_columns=16, max_rows=4, dtype=HALF)
        for place in (odd, lambda tensor: tensor):
            gemv_all_reduce(workspace, *map(place, (drawn(3, 32), drawn(16, 32), drawn(16), drawn(3, 16), drawn(16))))
        return len(workspace.calls)


def test_addresses_which_may_differ_between_ranks_make_no_new_layout_of_a_sum() -> None:
    """``auto`` makes one call more for a new layout, in which all ranks have to take part."""
    assert run_ranks(RANKS, layouts_of_sums) == [1] * RANKS
