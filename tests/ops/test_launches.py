"""Launches that come again start the code that Triton would find for them. Nothing is compiled here, and nothing runs."""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.ops.moe.crossing_steps import KernelCrossing
from dlrm_fused.symmetric import channel, launches
from dlrm_fused.symmetric.launches import Launches, Remembered, layout_of
from tests.distributed.launch import cpu_group, run_ranks

HALF = torch.bfloat16


class Gpu:
    """A driver that answers what Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for compiled code; notes what it is started with."""

    function = packed_metadata = None

    def __init__(self, kernel: JITFunction[Any], started: list[tuple[Any, ...]]) -> None:
        self._kernel, self._started = kernel, started

    def launch_metadata(self, *_: Any) -> None:
        pass

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        self[(x, y, z)](*arguments[6:])

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self._started.append((self._kernel.__name__, grid, arguments))


@contextmanager
def without_compiler() -> Iterator[list[tuple[Any, ...]]]:
    """Within, launches go as on a GPU, but start nothing; gives the list of what was started."""
    started: list[tuple[Any, ...]] = []

    def compiles(kernel: JITFunction[Any], key: str, *_: Any) -> Compiled:
        cache, *_ = kernel.device_caches[0]
        cache[key] = Compiled(kernel, started)
        return cache[key]

    with mock.patch.object(driver, "_active", Gpu()), mock.patch.object(JITFunction, "_do_compile", compiles):
        yield started


@triton.jit(do_not_specialize=["first"])
def copy_kernel(x, out, first, count, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count), mask=at < count)


@pytest.fixture
def started() -> Iterator[list[tuple[Any, ...]]]:
    with without_compiler() as started:
        copy_kernel.device_caches.clear()
        yield started


def test_a_launch_that_comes_again_is_as_the_first_one(started: list[tuple[Any, ...]]) -> None:
    x, again = torch.ones(64), Launches()
    for first in (0, 16, 7):
        again(layout_of(x), copy_kernel, (3, 2), x, x, first, 64, TWICE=True, BLOCK=16, num_warps=2)
    expected = [("copy_kernel", (3, 2, 1), (x, x, first, 64, 16, True)) for first in (0, 16, 7)]
    assert all(a[:2] == b[:2] for a, b in zip(started, expected, strict=True))
    assert all(a is b for one, other in zip(started, expected, strict=True) for a, b in zip(one[2], other[2], strict=True))


def test_triton_is_asked_once_for_a_layout_and_again_for_a_number_of_64_bits(started: list[tuple[Any, ...]]) -> None:
    x, again = torch.ones(64), Launches()
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
        for first in (0, 1, 2**31 - 1, 2**31, 2**31 + 1, 5):
            again(layout_of(x), copy_kernel, (1,), x, x, first, 64, TWICE=False, BLOCK=16)
        assert run.call_count == 2
        again(layout_of(x[1:]), copy_kernel, (1,), x[1:], x, 0, 64, TWICE=False, BLOCK=16)
        assert run.call_count == 3
    assert len(started) == 7


def test_a_memory_is_bounded() -> None:
    memory: Remembered[int] = Remembered()
    for key in range(3 * launches._MOST_REMEMBERED):
        memory[key] = key
        assert len(memory) <= launches._MOST_REMEMBERED
        assert memory[key] == key


# Operators, with layouts of their own


def kinds_of(kernel: JITFunction[Any], *arguments: Any, **constants: Any) -> str:
    """Return all by which Triton tells compiled code from other code."""
    *_, binder = kernel.device_caches[0]
    _, kinds, options = binder(*arguments, **constants, debug=False, instrumentation_mode="")
    return f"{kinds} {options}"


def tensor(*shape: int, dtype: torch.dtype = HALF, at: int = 0) -> Tensor:
    """Return a tensor whose address is ``at`` elements behind a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + 16, dtype=dtype)[at : at + count].view(shape)


def make_calls(group: Any) -> None:
    """Make calls of many layouts, and each of them twice."""
    sums = GemvWorkspace(group, name="sums", max_columns=64, max_rows=256, dtype=HALF)
    for rows, columns, depth, at, schedule in itertools.product(
        (1, 3, 64, 128), (64, 16), (64, 16), (0, 1), ("auto", "scatter", "copies")
    ):
        if schedule != "auto" and rows <= 64:
            continue
        operands = tensor(rows, depth, at=at), tensor(columns, depth), tensor(columns, at=at), tensor(rows, columns)
        for norm_weight in (None, tensor(columns, at=at)):
            gemv_all_reduce(sums, *operands, norm_weight, schedule=schedule)
    in_fp32 = GemvWorkspace(group, name="sums in fp32", max_columns=64, max_rows=256, dtype=torch.float32)
    for precision in ("highest", "high"):  # "high" lets kernels multiply in TF32
        torch.set_float32_matmul_precision(precision)
        for schedule in ("scatter", "copies"):
            x, weight = tensor(128, 64, dtype=torch.float32), tensor(64, 64, dtype=torch.float32)
            gemv_all_reduce(in_fp32, x, weight, schedule=schedule)
    products = GemmWorkspace(group, name="products", max_rows=512, max_columns=64, dtype=HALF)
    for rows, columns, depth, at in itertools.product((2, 256), (64, 16), (64, 8), (0, 1)):
        gemm_all_to_all(products, tensor(rows, depth, at=at), tensor(columns, depth, at=at), schedule="kernel")
        gemm_all_to_all(
            products, tensor(rows, 2 * depth), tensor(columns, 2 * depth, dtype=torch.float8_e4m3fn),
            tensor(columns, dtype=torch.float32), schedule="kernel",
        )  # fmt: skip
    ranks, shards = group.world_size, ShardWorkspace(group, name="shards", max_rows=512, max_columns=64, dtype=HALF)
    for rows, columns, depth, at in itertools.product((8, 128), (64, 16), (64, 8), (0, 1)):
        for schedule in ("kernel", "arriving"):
            shard, weight = tensor(rows, depth, at=at).requires_grad_(), tensor(columns, depth, at=at).requires_grad_()
            all_gather_gemm(shards, shard, weight, schedule=schedule).sum().backward()
        for schedule in ("kernel", "chunks_4"):
            x, weight = tensor(ranks * rows, depth, at=at).requires_grad_(), tensor(columns, depth, at=at).requires_grad_()
            gemm_reduce_scatter(shards, x, weight, schedule=schedule).sum().backward()
    for top_k, activation in ((1, "silu"), (2, "swiglu")):
        experts = ExpertWorkspace(
            group, name=f"experts {top_k}", experts=8, top_k=top_k, max_tokens=64, width=64, activation=activation, dtype=HALF
        )
        parts = experts.activation.parts
        for tokens, hidden in itertools.product((0, 1, 33, 64), (16, 128)):
            x, ids = tensor(tokens, 64).requires_grad_(), torch.zeros(tokens, top_k, dtype=torch.int64)
            w_in, w_out = tensor(8 // group.world_size, parts * hidden, 64), tensor(8 // group.world_size, 64, hidden)
            gates = tensor(tokens, top_k, dtype=torch.float32).requires_grad_()
            expert_layer(experts, x, ids, gates, w_in.requires_grad_(), w_out.requires_grad_()).sum().backward()
    for experts_of_all, own_host, others, tokens, width, top_k in itertools.product(
        (15, 16), (1, 16), ([0], [0, 2]), (0, 1, 33), (64, 24), (1, 2)
    ):
        host_of_expert, is_named = torch.zeros(experts_of_all, dtype=torch.int64), tokens == 1
        crossing = KernelCrossing(host_of_expert, own_host, others, 1, names_elsewhere=is_named)
        x, ids = tensor(tokens, width), torch.zeros(tokens, top_k, dtype=torch.int64)
        for guests, at in itertools.product((0, 1, 16), (0, 1)):
            gates, rows = tensor(tokens, top_k, dtype=torch.float32, at=at), tensor(tokens + guests, width)
            places, _ = crossing.find_places(ids)
            crossing.unpack(crossing.pack(guests, places, x, ids, gates), x, ids, gates, 32)
            crossing.add(crossing.pack(guests, places, x), places, rows)
            every_gate = tensor(len(rows), top_k, dtype=torch.float32, at=at)
            crossing.add(crossing.pack(guests, None, rows[tokens:], gates=every_gate[tokens:]), places, rows, every_gate)


def layouts_and_launches() -> tuple[int, int, list[str]]:
    """Return how many layouts there were, how many launches, and the kernels of which a layout has said too little."""
    seen: dict[Any, str] = {}
    wrong, count = [], 0
    launch = Launches.__call__

    def check(self: Launches, layout: Any, kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        nonlocal count
        count += 1
        launch(self, layout, kernel, programs, *arguments, **constants)
        wide = [number >= 2**31 for number in arguments if type(number) is int]
        kinds = kinds_of(kernel, *arguments, **constants)
        if seen.setdefault((self, kernel.__name__, layout, *wide), kinds) != kinds:
            wrong.append(kernel.__name__)

    # Kernels are not the interpreter's here, and are launched all the same.
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.object(channel, "polls_per_second", return_value=1e6),
        mock.patch("dlrm_fused.ops.gemv_all_reduce.workspace.polls_per_second", return_value=1e6),
        mock.patch.object(Launches, "__call__", check),
        without_compiler(),
        cpu_group() as group,
    ):
        for _ in range(2):
            make_calls(group)
    return len(seen), count, wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_say_all_that_code_is_compiled_for(ranks: int) -> None:
    for layouts, count, wrong in run_ranks(ranks, layouts_and_launches):
        assert wrong == []
        assert 100 < layouts < count
