"""Operators compute alike inside and outside of autocast: it chooses the dtype of a caller's products, not that of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import cpu_group, run_ranks

ROWS, COLUMNS, DEPTH, EXPERTS = 8, 16, 16, 4
SIZES = {"max_rows": 2 * ROWS, "max_columns": COLUMNS}
Call = Callable[[Tensor, Tensor], Tensor]


def sums(group: SymmetricGroup, dtype: torch.dtype) -> Call:
    workspace = GemvWorkspace(group, name="sums", **SIZES, dtype=dtype)
    return lambda x, weight: gemv_all_reduce(workspace, x, weight)[0]


def blocks(group: SymmetricGroup, dtype: torch.dtype) -> Call:
    workspace = GemmWorkspace(group, name="blocks", **SIZES, dtype=dtype)
    return lambda x, weight: gemm_all_to_all(workspace, x, weight)


def gathered(group: SymmetricGroup, dtype: torch.dtype) -> Call:
    workspace = ShardWorkspace(group, name="gathered", **SIZES, dtype=dtype)
    return lambda x, weight: all_gather_gemm(workspace, x, weight)


def scattered(group: SymmetricGroup, dtype: torch.dtype) -> Call:
    workspace = ShardWorkspace(group, name="scattered", **SIZES, dtype=dtype)
    return lambda x, weight: gemm_reduce_scatter(workspace, x, weight)


def experts(group: SymmetricGroup, dtype: torch.dtype) -> Call:
    workspace = ExpertWorkspace(
        group, name="experts", experts=EXPERTS, top_k=2, max_tokens=ROWS, width=DEPTH, activation="silu", dtype=dtype
    )
    ids = torch.arange(2 * ROWS).view(ROWS, 2) % EXPERTS
    gates = torch.full((ROWS, 2), 0.3)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        of_experts = weight.expand(EXPERTS // group.world_size, -1, -1).contiguous()
        return expert_layer(workspace, x, ids, gates, of_experts, of_experts.mT.contiguous())

    return call


def outside_and_inside(dtype: torch.dtype) -> dict[str, list[list[Tensor]]]:
    """By operator, result and gradients outside of autocast; those of a call inside; and those of a compiled call inside, whose
    gradients torch takes inside, too."""
    found = {}
    with cpu_group() as group:
        generator = torch.Generator().manual_seed(group.rank)
        x, weight = (
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((ROWS, DEPTH), (COLUMNS, DEPTH))
        )
        for make in (sums, blocks, gathered, scattered, experts):
            call, seen = make(group, dtype), []
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            for made, is_inside in ((call, False), (call, True), (compiled, True)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
                    out = made(x, weight)
                # bf16 would round these.
                given = torch.linspace(1.0, 1.9, out.numel()).view(out.shape).to(dtype)
                gradients = torch.autograd.grad(out, (x, weight), given)
                seen.append([out.detach(), *gradients])
            found[make.__name__] = seen
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    for found in run_ranks(2, outside_and_inside, dtype):
        for name, (outside, *others) in found.items():
            for inside in others:
                for number, (wanted, own) in enumerate(zip(outside, inside, strict=True)):
                    assert own.dtype == dtype
                    assert torch.equal(own, wanted), (name, number)
