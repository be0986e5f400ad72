"""Does GEMV + AllReduce give the same bits on all ranks whatever their delays, and an error when a rank is killed?

    torchrun --standalone --nproc-per-node=4 benchmarks/stress_gemv.py --replays 100000 --output stress.json [--tiny]
    python benchmarks/stress_gemv.py --ranks 4 --kill-rank 2 --kill-after 3 --output killed.json

Products of several shapes, of few and of many rows, with and without bias, residual and norm, share one exchange. Each is a
CUDA graph that multiplies and compares with the first result, bit for bit; the first has been compared with a product in fp64,
and between the ranks. The graphs are replayed in random order, the same on all ranks, with random delays on the device before
each, other ones on each rank. The host reads the number of elements that differ at the end. Without GPUs, calls take the place
of graphs.

With ``--kill-rank`` that rank kills itself meanwhile; see killed_rank.py. Exit status 1 says that something was not as it must
be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import killed_rank
import torch
import torch.distributed as dist
from gemv_cells import DTYPE, TOLERANCE, Cell, draw_inputs, draw_weights
from harness import World, captured, compile_ahead, describe_run, relative_error, synchronize
from torch import Tensor
from torch.nn.functional import rms_norm

from dlrm_fused.ops.gemv_all_reduce import GemvExchange, gemv_all_reduce

NORM_EPS = 1e-6
CYCLES_PER_MICROSECOND = 1_900
# The longest delays are rare.
LONG_DELAY_EVERY, LONG_DELAY = 200, 50
# Between two looks at what the kernels have reported.
REPLAYS_OF_A_LOOK = 1_000


@dataclass(frozen=True)
class Size:
    """Of the products.

    Attributes:
        shapes: (m, N, K); K of all ranks together is K times their number.
        operands: different ones of each shape, so that a result that is left from another call differs.
        delay: the longest usual one, in microseconds.
    """

    shapes: tuple[tuple[int, int, int], ...]
    operands: int
    delay: float


FULL = Size(
    shapes=(
        (1, 1024, 1024),
        (2, 8192, 2048),
        (5, 2048, 2048),
        (16, 4096, 4096),
        (33, 5120, 3456),
        (64, 8192, 2048),
        (300, 1024, 512),
    ),
    operands=3,
    delay=20.0,
)
TINY = Size(shapes=((1, 16, 16), (3, 32, 24), (70, 16, 16)), operands=2, delay=200.0)


class Product:
    """One product with what follows it, and what it gave the first time. Collective."""

    def __init__(self, world: World, exchange: GemvExchange, cell: Cell, number: int) -> None:
        """Args:
        number: of the product; says which operands it has, and what follows it.
        """
        self.world, self.exchange, self.cell = world, exchange, cell
        place = (world.rank, world.size, world.device)
        self.x = draw_inputs(1, cell, *place, seed=number)[0]
        self.weight = draw_weights(1, cell.n, cell.k, *place, seed=number)[0]
        generator = torch.Generator().manual_seed(number)
        followed, (m, n) = number % 3, (cell.m, cell.n)
        bias, residual, gain = (
            torch.randn(shape, generator=generator).to(world.device, DTYPE) for shape in ((n,), (m, n), (n,))
        )
        self.bias = bias if followed >= 1 else None
        self.residual = residual if followed >= 1 else None
        self.norm_weight = gain if followed == 2 else None
        self.differing = torch.zeros((), dtype=torch.int64, device=world.device)
        self.first: list[Tensor] = []

    def multiply(self) -> list[Tensor]:
        results = gemv_all_reduce(
            self.exchange, self.x, self.weight, self.bias, self.residual, self.norm_weight, norm_eps=NORM_EPS
        )
        return [result for result in results if result is not None]

    def begin(self) -> float:
        """The first time; the largest relative error on any rank.

        Raises:
            SystemExit: it is wrong, or the ranks differ.
        """
        self.first = [result.clone() for result in self.multiply()]
        synchronize(self.world.device)
        self.exchange.raise_fault()
        errors = [relative_error(*pair) for pair in zip(self.first, self.expected(), strict=True)]
        of_first_rank = [result.clone() for result in self.first]
        for result in of_first_rank:
            dist.broadcast(result, src=0)
        same = not any(int(_differing(*pair)) for pair in zip(self.first, of_first_rank, strict=True))
        every_rank = self.world.gather((max(errors), same))
        error = max(own for own, _ in every_rank)
        # The norm is rounded once more than the sum.
        if error > len(self.first) * TOLERANCE[self.cell.size] or not all(same for _, same in every_rank):
            raise SystemExit(f"{self.cell.name}: (relative error, same bits as rank 0) by rank: {every_rank}")
        return error

    def expected(self) -> list[Tensor]:
        """In fp64."""
        out = self.x.double() @ self.weight.double().t()
        dist.all_reduce(out)
        if self.bias is not None and self.residual is not None:
            out = out + self.bias.double() + self.residual.double()
        if self.norm_weight is None:
            return [out]
        return [out, rms_norm(out, (self.cell.n,), self.norm_weight.double(), NORM_EPS)]

    def again(self) -> None:
        """Once more, compared with the first time; the host does not wait for the device."""
        for pair in zip(self.multiply(), self.first, strict=True):
            self.differing += _differing(*pair)


def _differing(found: Tensor, expected: Tensor) -> Tensor:
    """Number of elements whose bits differ."""
    return (found.view(torch.int16) != expected.view(torch.int16)).sum()


class Stress:
    """All products, ready to be repeated. Collective."""

    def __init__(self, world: World, size: Size, seed: int) -> None:
        self.world, self.size = world, size
        cells = [Cell(m, n, k * world.size) for m, n, k in size.shapes]
        self.exchange = GemvExchange(
            world.symmetric,
            name="stress",
            max_columns=max(cell.n for cell in cells),
            max_rows=max(cell.m for cell in cells),
            dtype=DTYPE,
            timeout_seconds=60.0,
        )
        self.products = [
            Product(world, self.exchange, cell, i + j) for i, cell in enumerate(cells) for j in range(size.operands)
        ]
        with torch.no_grad():
            compile_ahead(world, [product.multiply for product in self.products])
            self.errors = [product.begin() for product in self.products]
            self.repeats = [self._repeated(product) for product in self.products]
        self.order, self.delays = random.Random(seed), random.Random(seed + 1 + world.rank)

    def _repeated(self, product: Product) -> Callable[[], None]:
        if self.world.device.type != "cuda":
            return torch.no_grad()(product.again)
        replay, problem = captured(self.world, product.again)
        if replay is None:
            raise SystemExit(f"{product.cell.name} cannot be captured in a CUDA graph: {problem}")
        return replay

    def repeat(self) -> None:
        """A delay, then one of the products. The host does not wait for the device."""
        microseconds = self.delays.uniform(0, self.size.delay)
        if self.delays.randrange(LONG_DELAY_EVERY) == 0:
            microseconds *= LONG_DELAY
        if self.world.device.type == "cuda":
            torch.cuda._sleep(int(microseconds * CYCLES_PER_MICROSECOND))
        else:
            time.sleep(microseconds / 1e6)
        self.repeats[self.order.randrange(len(self.repeats))]()


def run_replays(world: World, options: argparse.Namespace) -> bool:
    """All replays, and the report; whether there was no mismatch."""
    size = TINY if options.tiny else FULL
    stress = Stress(world, size, options.seed)
    world.log(f"{len(stress.products)} products agree with fp64; largest relative error {max(stress.errors):.1e}")
    dist.barrier()
    began = time.perf_counter()
    for number in range(options.replays):
        stress.repeat()
        if number % REPLAYS_OF_A_LOOK == 0:
            stress.exchange.raise_fault()
    synchronize(world.device)
    seconds = time.perf_counter() - began
    stress.exchange.raise_fault()
    by_rank = world.gather([int(product.differing) for product in stress.products])
    differing = [sum(own) for own in zip(*by_rank, strict=True)]
    report = {
        **describe_run(world, ["stress_gemv.py", *sys.argv[1:]], options.commit),
        "dtype": str(DTYPE).removeprefix("torch."),
        "replays": options.replays,
        "seconds": round(seconds, 2),
        "mean_microseconds": round(1e6 * seconds / max(1, options.replays), 1),
        "longest_delay_microseconds": size.delay * LONG_DELAY,
        "products": [
            {
                **asdict(product.cell),
                "with_bias_and_residual": product.bias is not None,
                "with_norm": product.norm_weight is not None,
                "relative_error": error,
                "elements_that_differ": count,
            }
            for product, error, count in zip(stress.products, stress.errors, differing, strict=True)
        ],
        "passed": not any(differing),
    }
    if world.rank == 0:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    world.log(
        f"{options.replays} replays in {seconds:.1f} s, elements that differ: {sum(differing)}; passed: {report['passed']}"
    )
    return not any(differing)


def step(world: World, options: argparse.Namespace) -> Callable[[int], None]:
    """What is done again and again until a rank is lost. Collective."""
    stress = Stress(world, TINY if options.tiny else FULL, options.seed)

    def repeat(_: int) -> None:
        stress.repeat()
        stress.exchange.raise_fault()

    return repeat


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--tiny", action="store_true", help="small enough for compute-sanitizer and the CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="for the report, where there is no git")
    killed_rank.add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.output = options.output.absolute()
    return killed_rank.run(options, run_replays, step)


if __name__ == "__main__":
    sys.exit(main())
