"""Gradients as callers ask torch for them, on one host and on two: with ``create_graph=True`` and activation checkpointing.

They are the same as without; and they have no gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlrm_fused import (
    EmbeddingWorkspace,
    ExchangeLayout,
    ExpertWorkspace,
    GemmWorkspace,
    GemvWorkspace,
    LookupLayout,
    ShardWorkspace,
    all_gather_gemm,
    expert_layer,
    gemm_all_to_all,
    gemm_reduce_scatter,
    gemv_all_reduce,
    pooled_all_to_all,
)
from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import cpu_group, on_hosts, run_ranks

RANKS, ROWS, WIDTH = 2, 8, 16
Call = tuple[Callable[[], Tensor], list[Tensor]]


def calls(group: SymmetricGroup) -> dict[str, Call]:
    """Each operator's call, and the tensors that have gradients."""
    torch.manual_seed(group.rank)
    shards = ShardWorkspace(group, name="shards", max_rows=RANKS * ROWS, max_columns=2 * WIDTH, dtype=torch.float32)
    products = GemmWorkspace(group, name="products", max_rows=ROWS, max_columns=2 * WIDTH, dtype=torch.float32)
    sums = GemvWorkspace(group, name="sums", max_rows=ROWS, max_columns=2 * WIDTH, dtype=torch.float32)
    experts = ExpertWorkspace(group, name="e", experts=4, top_k=2, max_tokens=ROWS, width=WIDTH, dtype=torch.float32)
    lookups = tuple((LookupLayout(columns=(WIDTH * rank,), dims=(WIDTH,)),) for rank in range(RANKS))
    pooling = EmbeddingWorkspace(group, ExchangeLayout(lookups, columns=RANKS * WIDTH), name="pooled")

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    x, weight, pooled = leaf(ROWS, WIDTH), leaf(2 * WIDTH, WIDTH), leaf(RANKS * ROWS, WIDTH)
    chosen, layer = torch.tensor([[0, 3], [1, 2]] * (ROWS // 2)), [leaf(ROWS, 2), leaf(2, WIDTH, WIDTH), leaf(2, WIDTH, WIDTH)]
    return {
        "all_gather_gemm": (lambda: all_gather_gemm(shards, x, weight), [x, weight]),
        "gemm_reduce_scatter": (lambda: gemm_reduce_scatter(shards, x, weight), [x, weight]),
        "gemm_all_to_all": (lambda: gemm_all_to_all(products, x, weight), [x, weight]),
        "gemv_all_reduce": (lambda: gemv_all_reduce(sums, x, weight)[0], [x, weight]),
        "expert_layer": (lambda: expert_layer(experts, x, chosen, *layer), [x, *layer]),
        "pooled_all_to_all": (lambda: pooled_all_to_all(pooling, [pooled], [ROWS] * RANKS), [pooled]),
    }


def differentiated_twice() -> dict[str, tuple[bool, str]]:
    """On a rank: by operator, whether ``create_graph`` changes no gradient, and what a second derivative raises."""
    found = {}
    with cpu_group() as group:
        for name, (call, leaves) in calls(group).items():
            wanted = torch.autograd.grad(call().square().sum(), leaves)
            first = torch.autograd.grad(call().square().sum(), leaves, create_graph=True)
            with pytest.raises(UsageError) as raised:
                torch.autograd.grad(sum_of_squares(first), leaves, allow_unused=True)
            found[name] = all(map(torch.equal, first, wanted)), str(raised.value)
    return found


def checkpointed() -> dict[str, tuple[bool, bool]]:
    """On a rank: by operator, whether the gradients with activation checkpointing of either kind are those without."""
    found = {}
    with cpu_group() as group:
        for name, (call, leaves) in calls(group).items():
            wanted = torch.autograd.grad(call().square().sum(), leaves)
            gradients = []
            for use_reentrant in (False, True):
                out = checkpoint(lambda _, call=call: call(), leaves[0], use_reentrant=use_reentrant)
                out.square().sum().backward()
                gradients.append([one.grad for one in leaves])
                for one in leaves:
                    one.grad = None
            found[name] = tuple(all(map(torch.equal, own, wanted)) for own in gradients)
    return found


def by_compiled_autograd() -> dict[str, bool]:
    """On a rank: by operator, whether a compiled backward pass of a call in eager mode has the gradients of an eager one."""
    found = {}
    with cpu_group() as group:
        for name, (call, leaves) in calls(group).items():
            wanted = torch.autograd.grad(call().square().sum(), leaves)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                call().square().sum().backward()
            found[name] = all(torch.equal(leaf.grad, one) for leaf, one in zip(leaves, wanted, strict=True))
            for leaf in leaves:
                leaf.grad = None
    return found


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.square().sum() for one in tensors]).sum()


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_there_are_first_derivatives_alone(hosts: tuple[int, ...]) -> None:
    for by_operator in run_ranks(RANKS, on_hosts, hosts, differentiated_twice):
        assert len(by_operator) == 6
        for name, (is_same, told) in by_operator.items():
            assert is_same, name
            assert "no second derivative" in told


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_activation_checkpointing_changes_no_gradient(hosts: tuple[int, ...]) -> None:
    for by_operator in run_ranks(RANKS, on_hosts, hosts, checkpointed):
        assert by_operator == dict.fromkeys(by_operator, (True, True))
        assert len(by_operator) == 6


def test_a_backward_pass_that_torch_compiles_by_itself_changes_no_gradient() -> None:
    for by_operator in run_ranks(RANKS, by_compiled_autograd):
        assert by_operator == dict.fromkeys(by_operator, True)
        assert len(by_operator) == 6
