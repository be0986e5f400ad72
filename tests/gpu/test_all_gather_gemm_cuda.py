"""AllGather + GEMM and GEMM + ReduceScatter on several GPUs: results, gradients, CUDA graphs, torch.compile, faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.models.transformer import HistoryTransformer
from dlrm_fused.ops.all_gather_gemm import (
    ShardWorkspace,
    all_gather_gemm,
    gemm_reduce_scatter,
    reference,
    scatter_reference,
)
from dlrm_fused.ops.all_gather_gemm.op import NAMES
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import HALF, MARKS, ON_GPU, captured, checked_on_all_ranks, delay
from tests.gpu.products import FP32, TIMEOUT_SECONDS, Products, check_calls_that_differ, check_refused

pytestmark = MARKS
GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
OPERATORS = {GATHER: all_gather_gemm, SCATTER: gemm_reduce_scatter}
REFERENCES = {GATHER: reference, SCATTER: scatter_reference}
# Rows of a shard, columns and depths: of whole tiles, and not. The interpreter is slow.
SHAPES = ((512, 1024, 768), (33, 1032, 544), (700, 72, 2048)) if ON_GPU else ((16, 48, 32), (5, 24, 16), (7, 40, 48))
REPLAYS = 200 if ON_GPU else 3
# Of one rounding, and of sums that are rounded in between.
TOLERANCE = {FP32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


class Layers(Products):
    """Products of random operands over one workspace, and what they must be."""

    def __init__(self, group: SymmetricGroup, dtype: torch.dtype) -> None:
        rows, columns = max(shape[0] for shape in SHAPES), max(max(shape[1:]) for shape in SHAPES)
        sizes = {"max_rows": rows * group.world_size, "max_columns": columns}
        workspace = ShardWorkspace(group, name="layers", **sizes, dtype=dtype, timeout_seconds=TIMEOUT_SECONDS)
        super().__init__(group, dtype, workspace, TOLERANCE)

    def draw(self, pair: Pair, rows: int, columns: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x and weight of this rank; so many rows of a shard."""
        return self.operands(rows if pair.moves_first else rows * self.group.world_size, columns, depth, seed)

    def call(self, pair: Pair, operands: tuple[Tensor, Tensor], schedule: str = "auto") -> Tensor:
        return OPERATORS[pair](self.workspace, *operands, schedule=schedule)

    def check(self, pair: Pair, result: Tensor, operands: tuple[Tensor, Tensor]) -> None:
        """That it is the reference's, in fp64."""
        self.workspace.raise_fault()
        right = REFERENCES[pair](dist.group.WORLD, *(tensor.detach().double() for tensor in operands))
        self.assert_close(result, right)


def every_schedule(group: SymmetricGroup, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> None:
    """Of several shapes; ranks are late at random, and no result is overwritten by a later call."""
    layers, late = Layers(group, dtype), random.Random(group.rank)
    held = []
    for seed, shape in enumerate(shapes):
        for pair in OPERATORS:
            for schedule in NAMES[pair]:
                given = layers.draw(pair, *shape, seed)
                delay(late)
                held.append((pair, layers.call(pair, given, schedule), given))
    for pair, result, given in held:
        layers.check(pair, result, given)


def replays_of_graphs(group: SymmetricGroup) -> None:
    """Graphs of every schedule in turn, with new operands each time; the results of late ranks are the same."""
    layers, late = Layers(group, HALF), random.Random(group.rank)
    graphs = []
    for pair in OPERATORS:
        for schedule in NAMES[pair]:
            given = layers.draw(pair, *SHAPES[0])
            graphs.append((pair, given, captured(partial(layers.call, pair, given, schedule))))
    for number in range(REPLAYS):
        pair, given, replay = graphs[number % len(graphs)]
        for old, new in zip(given, layers.draw(pair, *SHAPES[0], number), strict=True):
            old.copy_(new)
        delay(late)
        result = replay()
        if number >= REPLAYS - len(graphs) or number % 17 == 0:
            layers.check(pair, result, given)


def same_bits(group: SymmetricGroup) -> None:
    """Every schedule, again and again, whoever is late."""
    layers, late = Layers(group, HALF), random.Random(group.rank)
    for pair in OPERATORS:
        given = layers.draw(pair, *SHAPES[0])
        for schedule in NAMES[pair]:
            first = layers.call(pair, given, schedule).clone()
            for _ in range(10 if ON_GPU else 1):
                delay(late)
                assert torch.equal(layers.call(pair, given, schedule), first), (pair, schedule)


def gradients(group: SymmetricGroup, schedule: str) -> None:
    """Those of the reference."""
    layers = Layers(group, FP32)
    for pair in OPERATORS:
        seen = []
        for is_fused in (True, False):
            x, weight = (tensor.requires_grad_() for tensor in layers.draw(pair, *SHAPES[1]))
            if is_fused:
                result = layers.call(pair, (x, weight), schedule)
            else:
                result = REFERENCES[pair](dist.group.WORLD, x, weight)
            result.sin().sum().backward()
            seen.append((x.grad, weight.grad))
        layers.workspace.raise_fault()
        for found, right in zip(*seen, strict=True):
            assert found is not None
            assert right is not None
            layers.assert_close(found, right)


def transformer(group: SymmetricGroup) -> None:
    """The same encodings and gradients with rows sharded between layers as with all rows on all ranks."""
    layers, seen = Layers(group, FP32), []
    generator = torch.Generator().manual_seed(group.rank)
    heads, samples, history = 4 * group.world_size, 3, 4
    tokens = torch.randn(samples * (history + 1), 8, generator=generator).to(group.device)
    lengths = torch.randint(0, history + 1, (samples,), generator=generator).to(group.device)
    for shards in (layers.workspace, None):
        torch.manual_seed(1)
        model = HistoryTransformer(
            token_width=8, d_model=4 * heads, heads=heads, layers=2, d_ff=4 * heads, history_length=history,
            product=LayerProducts(dist.group.WORLD, shards=shards),
        ).to(group.device)  # fmt: skip
        encoded = model(tokens, lengths)
        encoded.sin().sum().backward()
        # What all ranks have is averaged by data parallelism, a shard is not.
        gradients = [parameter.grad for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if getattr(parameter, "shard_dim", None) is None:
                dist.all_reduce(gradient)
        seen.append([encoded.detach(), *gradients])
    layers.workspace.raise_fault()
    for found, right in zip(*seen, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def no_wait_of_the_host(group: SymmetricGroup) -> None:
    """Forward and backward, by every schedule: PyTorch raises where the host would wait for the device."""
    layers = Layers(group, HALF)
    for pair in OPERATORS:
        x, weight = (tensor.requires_grad_() for tensor in layers.draw(pair, *SHAPES[0]))
        for schedule in NAMES[pair]:
            layers.call(pair, (x, weight), schedule).sum().backward()  # compiles
            torch.cuda.set_sync_debug_mode("error")
            try:
                layers.call(pair, (x, weight), schedule).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def compiled(group: SymmetricGroup) -> None:
    layers = Layers(group, FP32)
    for pair in OPERATORS:
        given = layers.draw(pair, *SHAPES[1])

        @torch.compile(fullgraph=True)
        def step(x: Tensor, weight: Tensor, pair: Pair = pair) -> Tensor:
            return layers.call(pair, (x * 2, weight), "chunks") + 1

        layers.check(pair, step(*given) - 1, (given[0] * 2, given[1]))


def refused(group: SymmetricGroup, change: Callable[[Tensor], Tensor], culprit: str) -> None:
    layers = Layers(group, FP32)
    x, weight = layers.draw(GATHER, *SHAPES[0])
    check_refused(
        group, layers.workspace, lambda wrong: layers.call(GATHER, (change(x) if wrong else x, weight), "chunks"), culprit
    )


def ranks_that_differ(group: SymmetricGroup, pair: Pair, schedule: str) -> None:
    layers = Layers(group, FP32)
    rows, columns, depth = SHAPES[0]
    given = layers.draw(pair, rows, columns - 8 * (group.rank % 2), depth)
    check_calls_that_differ(layers.workspace, lambda: layers.call(pair, given, schedule))


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    "every schedule in 16 bits": partial(every_schedule, dtype=HALF),
    "every schedule in fp32": partial(every_schedule, dtype=FP32, shapes=SHAPES[1:2]),
    "replays of graphs": replays_of_graphs,
    "the same bits": same_bits,
    "gradients of chunks": partial(gradients, schedule="chunks"),
    "gradients of kernels": partial(gradients, schedule="kernel"),
    "torch.compile": compiled,
    "layers of the Transformer": transformer,
    "another dtype is refused": partial(refused, change=Tensor.half, culprit="x is torch.float16"),
    "another depth is refused": partial(refused, change=lambda x: x[:, 8:].contiguous(), culprit="their K must be equal"),
    "ranks that differ, gathering": partial(ranks_that_differ, pair=GATHER, schedule="arriving"),
    "ranks that differ, scattering": partial(ranks_that_differ, pair=SCATTER, schedule="chunks_2"),
}
if ON_GPU:
    CHECKS["no wait of the host"] = no_wait_of_the_host


failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
