"""GEMM + All-to-All on several GPUs: results, gradients, tiles, CUDA graphs, no waits of the host, torch.compile, faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, gemm_all_to_all, reference
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.rule import SPACE
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu import products as common
from tests.gpu.all_ranks import HALF, MARKS, ON_GPU, captured, checked_on_all_ranks, delay
from tests.gpu.products import FP32, TIMEOUT_SECONDS, check_calls_that_differ, check_refused

pytestmark = MARKS
FP16, BF16 = torch.float16, torch.bfloat16
# The interpreter is slow.
# Rows of a rank's block, columns and depths: of whole tiles, and not.
SHAPES = ((256, 1024, 768), (33, 1032, 520), (500, 72, 2048)) if ON_GPU else ((16, 48, 32), (5, 24, 16), (7, 40, 24))
SCHEDULES = ("kernel", "chunks")
REPLAYS = 200 if ON_GPU else 4
# Of one rounding.
TOLERANCE = {FP32: 1e-5, FP16: 2**-10, BF16: 2**-7}


class Products(common.Products):
    """Products of random operands over one workspace, and what they must be."""

    def __init__(self, group: SymmetricGroup, dtype: torch.dtype) -> None:
        sizes = {"max_rows": 1024 * group.world_size, "max_columns": max(columns for _, columns, _ in SHAPES)}
        workspace = GemmWorkspace(group, name="products", **sizes, dtype=dtype, timeout_seconds=TIMEOUT_SECONDS)
        super().__init__(group, dtype, workspace, TOLERANCE)

    def draw(self, rows: int, columns: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x with so many rows for each rank, and weight."""
        return self.operands(rows * self.group.world_size, columns, depth, seed)

    def check(self, result: Tensor, x: Tensor, weight: Tensor) -> None:
        """Compare with an fp64 product followed by an All-to-All."""
        self.workspace.raise_fault()
        product = x.double() @ weight.double().T
        right = torch.empty_like(product)
        dist.all_to_all_single(right, product)
        self.assert_close(result, right)


def equal_blocks(group: SymmetricGroup, dtype: torch.dtype) -> None:
    """By every schedule, of several shapes; ranks are late at random, and no result is overwritten by a later call."""
    products, late = Products(group, dtype), random.Random(group.rank)
    held = []
    for seed, shape in enumerate(SHAPES):
        for schedule in SCHEDULES:
            given = products.draw(*shape, seed)
            delay(late)
            held.append((gemm_all_to_all(products.workspace, *given, schedule=schedule), given))
    for result, given in held:
        products.check(result, *given)


def fp8_weights(group: SymmetricGroup) -> None:
    products = Products(group, HALF)
    x, weight = products.draw(*SHAPES[0])
    scale = torch.rand(len(weight), device=group.device) + 0.5
    weight = weight.to(FP8)
    products.check(gemm_all_to_all(products.workspace, x, weight, scale), x, weight.double() * scale.double()[:, None])


def every_tile_shape(group: SymmetricGroup) -> None:
    """Whatever is tried when they are tuned, the product is right."""
    from benchmarks.operators.blocks import TUNABLE
    from benchmarks.operators.gemm_all_to_all import Product
    from benchmarks.operators.tune import choices_of

    products = Products(group, HALF)
    given = products.draw(*SHAPES[0])
    try:
        for tiles in choices_of(TUNABLE["gemm_all_to_all"], Product(*SHAPES[0]), group.world_size, most=14)[1:]:
            gemm_tuning.override(tiles)
            products.check(gemm_all_to_all(products.workspace, *given, schedule="kernel"), *given)
    finally:
        gemm_tuning.override(None)


def replays_of_graphs(group: SymmetricGroup) -> None:
    """Graphs of every schedule in turn, with new operands each time, and calls without a graph between them."""
    products, late = Products(group, HALF), random.Random(group.rank)
    given = [products.draw(*shape) for shape in SHAPES]
    replays = [
        captured(partial(gemm_all_to_all, products.workspace, *operands, schedule=schedule))
        for operands, schedule in zip(given, cycle(SCHEDULES), strict=False)
    ]
    eager = products.draw(*SHAPES[1], seed=1)
    for number in range(REPLAYS):
        turn = number % len(SHAPES)
        x, weight = given[turn]
        x.copy_(products.draw(*SHAPES[turn], seed=number)[0])
        delay(late)
        products.check(replays[turn](), x, weight)
        if number % 10 == 0:
            products.check(gemm_all_to_all(products.workspace, *eager), *eager)


def gradients(group: SymmetricGroup) -> None:
    """Those of the reference."""
    products = Products(group, FP32)
    seen = []
    for fused in (True, False):
        x, weight = (tensor.requires_grad_() for tensor in products.draw(*SHAPES[1]))
        out = gemm_all_to_all(products.workspace, x, weight) if fused else reference(group.process_group, x, weight)
        out.sin().sum().backward()
        seen.append([out.detach(), x.grad, weight.grad])
    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-3)


def no_wait_of_the_host(group: SymmetricGroup) -> None:
    """Forward and backward, by every schedule: PyTorch raises where the host would wait for the device."""
    products = Products(group, HALF)
    x, weight = (tensor.requires_grad_() for tensor in products.draw(*SHAPES[0]))
    for watched in (False, True):  # the first time compiles
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            for schedule in SCHEDULES:
                out = gemm_all_to_all(products.workspace, x, weight, schedule=schedule)
                torch.autograd.grad(out, (x, weight), out.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def measured_once(group: SymmetricGroup) -> None:
    """The first call with a shape measures all schedules; later calls take the fastest, as do graphs."""
    products = Products(group, HALF)
    given, (rows, columns, depth) = products.draw(*SHAPES[1]), SHAPES[1]
    products.check(gemm_all_to_all(products.workspace, *given), *given)
    chosen = products.workspace.schedules.measured_here
    assert chosen.keys() == {(rows * group.world_size, columns, depth)}
    assert {name for choice in chosen.values() for name in choice} <= set(SPACE[Pair.gemm_all_to_all])
    assert len(set(group.gather(lambda: str(chosen)))) == 1, "all ranks take the same"
    replay = captured(partial(gemm_all_to_all, products.workspace, *given))
    products.check(replay(), *given)


def split_products(group: SymmetricGroup) -> None:
    """K in pieces, for other ranks; the same bits every time."""
    products = Products(group, HALF)
    given = products.draw(*SHAPES[0])
    gemm_tuning.override(replace(gemm_tuning.tiles_of_product(*SHAPES[0], 2, products.workspace.gpu), splits=4))
    try:
        first = gemm_all_to_all(products.workspace, *given, schedule="kernel").clone()
        products.check(first, *given)
        for _ in range(REPLAYS):
            assert torch.equal(gemm_all_to_all(products.workspace, *given, schedule="kernel"), first)
    finally:
        gemm_tuning.override(None)


def compiled(group: SymmetricGroup) -> None:
    products = Products(group, FP32)
    given = products.draw(*SHAPES[1])

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(gemm_all_to_all(products.workspace, x, weight)) + 1

    run = torch.compile(step, backend="inductor" if ON_GPU else "aot_eager", fullgraph=True)
    torch.testing.assert_close(run(*given), step(*given), rtol=1e-5, atol=1e-5)


def opcheck(group: SymmetricGroup) -> None:
    products = Products(group, FP32)
    given = [tensor.requires_grad_() for tensor in products.draw(*SHAPES[1])]
    arguments = (*given, None, "auto", products.workspace.handle)
    torch.library.opcheck(torch.ops.dlrm_fused.gemm_all_to_all.default, arguments)


def refused(group: SymmetricGroup, change: Callable[[Tensor], Tensor], culprit: str) -> None:
    """An earlier result stays as it is."""
    products = Products(group, FP32)
    x, weight = products.draw(*SHAPES[0])
    held = gemm_all_to_all(products.workspace, x, weight)
    before = held.clone()
    check_refused(
        group,
        products.workspace,
        lambda wrong: gemm_all_to_all(products.workspace, change(x) if wrong else x, weight),
        culprit,
    )
    assert torch.equal(held, before)


def ranks_that_differ(group: SymmetricGroup) -> None:
    products = Products(group, FP32)
    rows, columns, depth = SHAPES[0]
    given = products.draw(rows + group.rank % 2, columns, depth)
    check_calls_that_differ(products.workspace, lambda: gemm_all_to_all(products.workspace, *given))


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    "equal blocks in bf16" if ON_GPU else "equal blocks in fp16": partial(equal_blocks, dtype=HALF),
    "equal blocks in fp32": partial(equal_blocks, dtype=FP32),
    "fp8 weights": fp8_weights,
    "products in pieces": split_products,
    "replays of graphs": replays_of_graphs,
    "gradients": gradients,
    "torch.compile": compiled,
    "opcheck": opcheck,
    "another dtype is refused": partial(refused, change=Tensor.half, culprit="x is torch.float16"),
    "another depth is refused": partial(refused, change=lambda x: x[:, 8:].contiguous(), culprit="their K must be equal"),
    "ranks that differ": ranks_that_differ,
}
if ON_GPU:
    CHECKS |= {
        "equal blocks in fp16": partial(equal_blocks, dtype=FP16),
        "every tile shape": every_tile_shape,
        "auto measures": measured_once,
        "no wait of the host": no_wait_of_the_host,
        "another device is refused": partial(refused, change=Tensor.cpu, culprit="on cpu"),
    }


failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
