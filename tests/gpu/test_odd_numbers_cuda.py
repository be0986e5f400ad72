"""NaN, infinity and the smallest numbers, forward and backward: GPUs may treat them otherwise than the interpreter does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.inference.online.cached_attention import cached_attention, reference
from dlrm_fused.ops.common.dtypes import LARGEST_FP16, within_range
from dlrm_fused.ops.embedding_all_to_all import embedding_all_to_all, update
from dlrm_fused.ops.embedding_all_to_all.reduce import add_up
from dlrm_fused.ops.embedding_all_to_all.tables import RowwiseAdagrad
from dlrm_fused.ops.embedding_all_to_all.update_kernels import square_root
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import MARKS, ON_GPU, checked_on_all_ranks
from tests.ops.embedding_all_to_all.lookups import make_lookup, make_tables
from tests.ops.embedding_all_to_all.world import Features, Traffic, World

pytestmark = MARKS
DEVICE = "cuda" if ON_GPU else "cpu"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# The interpreter converts the smallest numbers to bf16 otherwise than GPUs do.
DTYPES = (FP32, FP16, BF16) if ON_GPU else (FP32, FP16)
# The last two are the smallest of fp16's and of bf16's numbers, or nearly.
ODD = (math.nan, math.inf, -math.inf, 1e30, -1e5, 6e-8, 1e-40)
DIM = 8


def odd_rows() -> Tensor:
    return torch.tensor(ODD).repeat_interleave(DIM).view(len(ODD), DIM)


def on_wire(values: Tensor, wire: torch.dtype) -> Tensor:
    """As TorchRec's codec of fp16 has it; bf16 has the range of fp32."""
    return within_range(values, wire).to(wire).float()


def expect_equal(values: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(values.float().cpu(), expected.float().cpu(), rtol=0, atol=0, equal_nan=True)


def rows_on_a_wire(group: SymmetricGroup, wire: torch.dtype, row_wise: bool) -> None:
    """Every rank looks up each odd row of each rank's table once, and its gradients are the odd numbers in other places."""
    features = Features((len(ODD),), (DIM,), (0,), row_wise=row_wise)
    traffic = Traffic(FP32, wire, wire, optimizer="sgd", largest_batch=len(ODD))
    world = World([[features] for _ in range(group.world_size)], traffic, seed=1)
    workspace = world.workspace(group, f"odd {wire} {row_wise}", timeout_seconds=20.0)
    (tables,) = workspace.tables
    tables.weights.copy_(odd_rows().flatten())
    samples, ranks = len(ODD), group.world_size
    indices = torch.arange(samples, device=group.device).repeat(ranks)
    offsets = torch.arange(ranks * samples + 1, device=group.device)
    if row_wise:  # of a row-wise table a rank has bags with its own rows alone: here the first rank's
        lengths = torch.full((ranks * samples,), int(group.rank == 0), device=group.device)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        indices = indices[: int(offsets[-1])]
    output = embedding_all_to_all(workspace, [indices], [offsets], [indices.new_empty(0, dtype=FP32)], [samples] * ranks)
    copies = workspace.layout.columns // DIM
    expect_equal(output, on_wire(odd_rows(), wire).repeat(1, copies))

    tables.weights.zero_()
    gradient = odd_rows().flip(0).to(group.device)
    output.backward(gradient.repeat(1, copies))
    if row_wise and group.rank != 0:
        assert not tables.weights.any()
        return
    assert tables.optimizer is not None
    rate = tables.optimizer.learning_rate.item()
    updated = tables.weights.view(samples, DIM).cpu()
    # The update takes the mean of the ranks' gradients, which are equal.
    expected = -rate * on_wire(gradient.cpu(), wire)
    torch.testing.assert_close(updated, expected, rtol=1e-5, atol=1e-43, equal_nan=True)


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    f"{'row-wise' if row_wise else 'table-wise'}, {wire}": partial(rows_on_a_wire, wire=wire, row_wise=row_wise)
    for wire in DTYPES
    for row_wise in (False, True)
}
failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)


@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_keep_odd_numbers(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    sources = torch.stack((odd_rows(), torch.zeros(len(ODD), DIM), odd_rows())).to(dtype).to(DEVICE)
    output = torch.empty(len(ODD), DIM, dtype=output_dtype, device=DEVICE)
    add_up(sources, output)
    expect_equal(output, within_range(sources.float().sum(0), output_dtype).to(output_dtype))


def test_no_number_is_made_of_nan_at_the_end_of_fp16s_range() -> None:
    sources = torch.tensor([math.nan, math.inf, -math.inf, 7e4], device=DEVICE).view(1, 1, 4)
    output = torch.empty(1, 4, dtype=FP16, device=DEVICE)
    add_up(sources, output)
    assert output[0, 0].isnan()
    assert output[0, 1:].tolist() == [LARGEST_FP16, -LARGEST_FP16, LARGEST_FP16]


def test_the_smallest_momentum_divides() -> None:
    """Without eps, a step of Adagrad is as long as the learning rate, however small the gradient."""
    generator = torch.Generator().manual_seed(1)
    tables = make_tables([5], [DIM], [0], device=DEVICE, generator=generator)
    optimizer = tables.optimizer
    assert isinstance(optimizer, RowwiseAdagrad)
    tables = replace(tables, optimizer=replace(optimizer, eps=0.0, momentum=torch.zeros_like(optimizer.momentum)))
    lookup = make_lookup(tables, 1, 1, generator=generator)
    indices = torch.tensor([2], device=DEVICE)
    offsets = torch.tensor([0, 1], device=DEVICE)
    before = tables.weights.clone()
    gradients = torch.full_like(lookup.gradients, 1e-20)
    update.apply_gradients(tables, update.sort_lookup(tables, indices, offsets), gradients, indices, offsets)
    step = (before - tables.weights).view(5, DIM)
    torch.testing.assert_close(step[2].cpu(), torch.full((DIM,), 0.1), rtol=1e-2, atol=0)
    assert not step[[0, 1, 3, 4]].any()


@triton.jit
def square_root_kernel(values, roots, BLOCK: tl.constexpr):  # noqa: N803 - as kernels have them
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(roots + at, square_root(tl.load(values + at)))


# On GPUs all numbers of fp32, 2^26 at a time; the interpreter sees every 2^16th of them.
@pytest.mark.parametrize("first", range(-(2**31), 2**31, 2**26) if ON_GPU else [0])
def test_square_roots_are_those_of_torch(first: int) -> None:
    block = 1024
    bits = torch.arange(first, first + 2**26, device=DEVICE) if ON_GPU else torch.arange(-(2**31), 2**31, 2**16)
    values = bits.to(torch.int32).view(FP32)
    roots = torch.empty_like(values)
    square_root_kernel[(values.numel() // block,)](values, roots, BLOCK=block)
    torch.testing.assert_close(roots, values.sqrt(), rtol=2.0**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf], ids=str)
def test_attention_to_odd_keys(dtype: torch.dtype, odd: float) -> None:
    """A whole step of keys has odd scores; those of other heads and steps have not."""
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(3, 2, 3, 16, generator=generator).abs().to(dtype).to(DEVICE)
    cache = torch.randn(1, 2, 2, 200, 16, generator=generator).abs().to(dtype).to(DEVICE)
    cache[0, 0, 1, :64, 0] = odd
    described = torch.tensor([cache.data_ptr(), 200], device=DEVICE)
    result = cached_attention(projected, described, 0, 200)
    expected = reference(projected, cache[0, 0], cache[0, 1])
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
