"""GEMV + AllReduce on several GPUs: results, block shapes, CUDA graphs, gradients, torch.compile, opcheck, faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import rms_norm

from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce, reference
from dlrm_fused.ops.gemv_all_reduce import tuning as gemv_tuning
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import HALF, MARKS, ON_GPU, RANKS, captured, checked_on_all_ranks, delay
from tests.gpu.products import FP32, TIMEOUT_SECONDS, check_calls_that_differ, check_refused

pytestmark = MARKS
FP16, BF16 = torch.float16, torch.bfloat16
# The interpreter is slow.
COLUMNS, DEPTH = (1024, 768) if ON_GPU else (48, 32)
REPLAYS, CALLS_IN_A_ROW = (200, 10_000) if ON_GPU else (4, 4)
# Of one rounding; the norm is taken of rounded sums, and rounded again.
TOLERANCE = {FP32: 1e-5, FP16: 2**-10, BF16: 2**-7}
NORM_EPS = 1e-6


class Sums:
    """Products of random operands over one workspace, and what they must be."""

    def __init__(self, group: SymmetricGroup, dtype: torch.dtype, most_rows: int = 64, columns: int = COLUMNS) -> None:
        self.group, self.dtype = group, dtype
        self.workspace = GemvWorkspace(
            group, name="sums", max_columns=columns, max_rows=most_rows, dtype=dtype, timeout_seconds=TIMEOUT_SECONDS
        )

    def draw(self, rows: int, columns: int = COLUMNS, depth: int = DEPTH, seed: int = 0) -> dict[str, Tensor]:
        """Everything that a product takes; x and weight of this rank."""
        own = torch.Generator().manual_seed(100 * seed + self.group.rank + 1)
        common = torch.Generator().manual_seed(100 * seed)
        drawn = {
            "x": torch.randn(rows, depth, generator=own),
            "weight": torch.randn(columns, depth, generator=own) * depth**-0.5,
            "bias": torch.randn(columns, generator=common),
            "residual": torch.randn(rows, columns, generator=common),
            "norm_weight": torch.randn(columns, generator=common),
        }
        return {key: tensor.to(self.group.device, self.dtype) for key, tensor in drawn.items()}

    def expected(self, given: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the sum in fp64, and its norm where it is wanted, each with the size of what was rounded on the way there.

        Summands that cancel each other leave roundings of their own size, not of the sum's.
        """
        out = given["x"].double() @ given["weight"].double().T
        size = out.abs()
        for summed in (out, size):
            dist.all_reduce(summed)
        for key in given.keys() & {"bias", "residual"}:
            out, size = out + given[key].double(), size + given[key].double().abs()
        if "norm_weight" not in given:
            return [(out, size)]
        weight = given["norm_weight"].double()
        root_mean_square = (out.square().mean(1, keepdim=True) + NORM_EPS).sqrt()
        norm = rms_norm(out, out.shape[1:], weight, NORM_EPS)
        return [(out, size), (norm, size * weight.abs() / root_mean_square)]

    def multiply(self, given: dict[str, Tensor], schedule: str = "auto") -> list[Tensor]:
        return [result for result in gemv_all_reduce(self.workspace, **given, schedule=schedule) if result is not None]

    def check(self, results: list[Tensor], given: dict[str, Tensor], roundings: int = 1) -> None:
        """The results are right, up to so many roundings, and the same bits on all ranks."""
        self.workspace.raise_fault()
        for number, (found, (right, size)) in enumerate(zip(results, self.expected(given), strict=True)):
            tolerance = roundings * (1 + 3 * number) * TOLERANCE[self.dtype]
            torch.testing.assert_close(found.double() / (1 + size), right / (1 + size), rtol=0, atol=tolerance)
            of_first_rank = found.clone()
            dist.broadcast(of_first_rank, src=0)
            assert torch.equal(found, of_first_rank), "ranks differ"


def sums(group: SymmetricGroup, dtype: torch.dtype) -> None:
    """Sums of few rows, with all that may follow, of even and odd sizes; ranks are late at random."""
    products, late = Sums(group, dtype), random.Random(group.rank)
    for seed, (rows, columns, depth) in enumerate(
        [(1, COLUMNS, DEPTH), (7, COLUMNS - 3, DEPTH - 5), (33, COLUMNS // 2, DEPTH)]
    ):
        given = products.draw(rows, columns, depth, seed)
        for wanted in (("x", "weight"), ("x", "weight", "bias", "residual"), tuple(given)):
            # The interpreter runs one program after the other; those of a norm wait for each other.
            if ON_GPU or "norm_weight" not in wanted:
                chosen = {key: given[key] for key in wanted}
                delay(late)
                products.check(products.multiply(chosen), chosen)


def many_rows(group: SymmetricGroup, schedule: str = "auto") -> None:
    sizes = (65 if schedule == "auto" else 68, 300, 2100) if ON_GPU else (66,)
    products, late = Sums(group, HALF, most_rows=max(sizes)), random.Random(group.rank)
    held = []
    for seed, rows in enumerate([*sizes, 3, *sizes]):
        way = schedule if rows > 3 else "auto"
        given = products.draw(rows, seed=seed)
        if not ON_GPU:
            del given["norm_weight"]
        delay(late)
        held.append((products.multiply(given, way), given))
    for results, given in held:  # no result is overwritten by a later call
        products.check(results, given, roundings=1 + RANKS)  # the partial sums are rounded, too


def every_block_shape(group: SymmetricGroup) -> None:
    """Whatever is tried when they are tuned, the sum is right."""
    from benchmarks.operators.blocks import all_gemv_blocks

    rows, columns, depth = 5, 2 * COLUMNS, 4 * DEPTH
    products = Sums(group, HALF, columns=columns)
    given = {key: tensor for key, tensor in products.draw(rows, columns, depth).items() if key in ("x", "weight")}
    shapes = list(dict.fromkeys(all_gemv_blocks(rows, columns, depth)))
    random.Random(1).shuffle(shapes)
    assert shapes or not ON_GPU  # the product is too small on the CPU
    try:
        for blocks in shapes[:12]:
            gemv_tuning.override(blocks)
            products.check(products.multiply(given), given)
    finally:
        gemv_tuning.override(None)


def replays_of_graphs(group: SymmetricGroup) -> None:
    """Graphs of two shapes and other calls in turn; x is changed in place, and every replay is of its time."""
    products, late = Sums(group, HALF), random.Random(group.rank)
    given = [{key: drawn[key] for key in ("x", "weight", "residual")} for drawn in (products.draw(1), products.draw(16))]
    replays = [captured(partial(products.multiply, own)) for own in given]
    eager = products.draw(4)
    del eager["norm_weight"]
    for number in range(REPLAYS):
        which = number % 2
        given[which]["x"].copy_(products.draw(len(given[which]["x"]), seed=number)["x"])
        delay(late)
        products.check(replays[which](), given[which])
        if number % 10 == 0:
            products.check(products.multiply(eager), eager)


def calls_in_a_row(group: SymmetricGroup) -> None:
    """Each begins while the one before waits for ranks whose hosts are late; nothing lies between two of them."""
    columns, depth = (2 * COLUMNS, 4096) if ON_GPU else (COLUMNS, DEPTH)  # a program on nearly every multiprocessor
    products, late = Sums(group, HALF, columns=columns), random.Random(group.rank)
    for rows in (2, 16, 64):  # parts of splits are words with tags; they have flags; tiles have them, too
        given = products.draw(rows, columns, depth)
        del given["norm_weight"]
        first = products.multiply(given)
        for _ in range(CALLS_IN_A_ROW):
            if late.random() < 0.02:
                time.sleep(late.uniform(0, 3e-4))
            last = products.multiply(given)
        products.workspace.raise_fault()
        assert all(map(torch.equal, first, last))
        products.check(last, given)


def gradients(group: SymmetricGroup) -> None:
    """Those of the reference."""
    products = Sums(group, FP32)
    seen = []
    for function in (gemv_all_reduce, reference):
        summed_by: Any = products.workspace if function is gemv_all_reduce else group.process_group
        leaves = {key: tensor.requires_grad_() for key, tensor in products.draw(3).items() if key != "norm_weight"}
        out, _ = function(summed_by, **leaves)
        out.sin().sum().backward()
        seen.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-3)


def compiled(group: SymmetricGroup) -> None:
    products = Sums(group, FP32)
    given = {key: tensor for key, tensor in products.draw(2).items() if key != "norm_weight"}

    def step(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return torch.sin(gemv_all_reduce(products.workspace, x, weight, bias, residual)[0]) + 1

    run = torch.compile(step, backend="inductor" if ON_GPU else "aot_eager", fullgraph=True)
    torch.testing.assert_close(run(**given), step(**given), rtol=1e-5, atol=1e-5)


def opcheck(group: SymmetricGroup) -> None:
    products = Sums(group, FP32)
    given = [tensor.requires_grad_() for key, tensor in products.draw(2).items() if key != "norm_weight"]
    arguments = (*given, None, NORM_EPS, products.workspace.handle)
    torch.library.opcheck(torch.ops.dlrm_fused.gemv_all_reduce.default, arguments)


def refused(group: SymmetricGroup, change: Callable[[Tensor], Tensor], culprit: str) -> None:
    """Rank 1 gives a wrong x: it is told so, the others that it was rank 1."""
    products = Sums(group, FP32)
    given = {key: tensor for key, tensor in products.draw(2).items() if key in ("x", "weight")}
    (held,) = products.multiply(given)
    before = held.clone()
    check_refused(
        group,
        products.workspace,
        lambda wrong: products.multiply({**given, "x": change(given["x"])} if wrong else given),
        culprit,
    )
    assert torch.equal(held, before)


def products_of_the_library(group: SymmetricGroup) -> None:
    """They are rounded as often as those of the kernel, whatever auto takes."""
    products = Sums(group, HALF)
    for rows in (17, 32, 64):
        given = products.draw(rows, seed=rows)
        if not ON_GPU:
            del given["norm_weight"]
        for schedule in ("kernel", "product", "auto"):
            products.check(products.multiply(given, schedule), given)


def ranks_that_differ(group: SymmetricGroup) -> None:
    products = Sums(group, FP32)
    given = {key: tensor for key, tensor in products.draw(2 + group.rank % 2).items() if key in ("x", "weight")}
    check_calls_that_differ(products.workspace, lambda: products.multiply(given))


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    "sums in bf16" if ON_GPU else "sums in fp16": partial(sums, dtype=HALF),
    "sums in fp32": partial(sums, dtype=FP32),
    "products of the library": products_of_the_library,
    "many rows": many_rows,
    "many rows by chunks": partial(many_rows, schedule="chunks"),
    "many rows by scatter": partial(many_rows, schedule="scatter"),
    "many rows by copies": partial(many_rows, schedule="copies"),
    "every block shape": every_block_shape,
    "replays of graphs": replays_of_graphs,
    "calls in a row": calls_in_a_row,
    "gradients": gradients,
    "torch.compile": compiled,
    "opcheck": opcheck,
    "another dtype is refused": partial(refused, change=Tensor.half, culprit="x is torch.float16"),
    "another depth is refused": partial(refused, change=lambda x: x[:, 1:], culprit="their K must be equal"),
    "ranks that differ": ranks_that_differ,
}
if ON_GPU:
    CHECKS["sums in fp16"] = partial(sums, dtype=FP16)
    CHECKS["another device is refused"] = partial(refused, change=Tensor.cpu, culprit="on cpu")


failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
