"""Print the choices of the rules on each GPU that has a data sheet, for twenty calls of each operator; needs no GPU:

python -m benchmarks.schedules.choices [--gpu "NVIDIA L40S" ...] [--operator gemv_all_reduce ...] [--ranks 4]

Tables in Markdown. ``auto`` takes the schedule where it cannot measure. docs/schedules.md says why choices differ.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.operators import all_gather_gemm as sharded
from benchmarks.operators import embedding_lookups as lookups
from benchmarks.operators import gemm_all_to_all as products
from benchmarks.operators import gemv_all_reduce as gemvs
from dlrm_fused.ops.all_gather_gemm.tuning import tiles_and_pushers, tiles_of_pieces
from dlrm_fused.ops.common.gpus import GPUS, Gpu
from dlrm_fused.ops.embedding_all_to_all.tuning import Blocks as LookupBlocks
from dlrm_fused.ops.embedding_all_to_all.tuning import LookupShape
from dlrm_fused.ops.embedding_all_to_all.tuning import choose_blocks as choose_lookup_blocks
from dlrm_fused.ops.gemm_all_to_all.schedule import by_rule as products_by_rule
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles, fitted, needed_memory, tiles_of_product
from dlrm_fused.ops.gemv_all_reduce import tuning as gemv_tuning
from dlrm_fused.ops.gemv_all_reduce.schedule import by_rule as sums_by_rule
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_ROWS, Blocks, choose_blocks
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import machine_of
from dlrm_fused.ops.schedules.rule import choose

CALLS = 20
_BYTES = products.DTYPE.itemsize


@dataclass(frozen=True)
class Choice:
    """For one call on one GPU.

    Attributes:
        call: its name.
        schedule: that the rule takes.
        blocks: of the operator's own kernel.
        programs: of its launch.
        memory: bytes of shared memory that a program may need; lookups need none to speak of.
        resident: how many of them must be on the GPU at once, since they wait for each other.
        pushers: of them, those that store at the peers before they multiply.
    """

    call: str
    schedule: str
    blocks: Tiles | Blocks | LookupBlocks
    programs: int
    memory: int = 0
    resident: int = 0
    pushers: int = 0


def gathered(gpu: Gpu, ranks: int) -> list[Choice]:
    """AllGather + GEMM."""
    found = []
    for cell in _of_pair(Pair.all_gather_gemm):
        rows = cell.m // ranks
        tiles, pushers = tiles_and_pushers(rows, cell.n, cell.k, _BYTES, ranks - 1, gpu)
        count = tiles.count(rows, cell.n)
        programs = min(max(pushers + count, (ranks - 1) * count), tiles.programs * gpu.multiprocessors)
        schedule = _schedule(cell.pair, gpu, ranks, cell)
        found.append(Choice(cell.name, schedule, tiles, programs, needed_memory(tiles, _BYTES), pushers=pushers))
    return found


def scattered(gpu: Gpu, ranks: int) -> list[Choice]:
    """GEMM + ReduceScatter. Programs wait for those of the peers, which may wait for theirs: all are resident."""
    found = []
    for cell in _of_pair(Pair.gemm_reduce_scatter):
        tiles = tiles_of_pieces(cell.m, cell.n, cell.k, _BYTES, gpu, added=1 / ranks)
        programs = min(ranks * tiles.count(cell.m // ranks, cell.n), tiles.programs * gpu.multiprocessors)
        schedule = _schedule(cell.pair, gpu, ranks, cell)
        found.append(Choice(cell.name, schedule, tiles, programs, needed_memory(tiles, _BYTES), resident=programs))
    return found


def exchanged(gpu: Gpu, ranks: int) -> list[Choice]:
    """GEMM + All-to-All."""
    found = []
    for m, n, k in products.PRODUCTS[:CALLS]:
        tiles = fitted(tiles_of_product(m, n, k, _BYTES, gpu), _BYTES, gpu.shared_memory)
        programs = min(ranks * tiles.count(m // ranks, n) * tiles.splits, tiles.programs * gpu.multiprocessors)
        found.append(
            Choice(
                f"{m}x{n}x{k}", products_by_rule(ranks, (m, n, k), _BYTES, gpu), tiles, programs, needed_memory(tiles, _BYTES)
            )
        )
    return found


def reduced(gpu: Gpu, ranks: int) -> list[Choice]:
    """GEMV + AllReduce with the norm behind it, whose programs wait for each other; and the product of many rows."""
    found = []
    for (n, k), m in itertools.product(gemvs.SHAPES[: CALLS // 4], (1, 16, MAX_ROWS, gemvs.LARGE_ROWS[-1])):
        cell = gemvs.Cell(m, n, k)
        depth = cell.depth(ranks)
        if m > MAX_ROWS:
            schedule = sums_by_rule(Size(Pair.gemm_all_reduce, ranks, m, n, depth, _BYTES), machine_of(gpu))
            tiles = fitted(tiles_of_product(m, n, depth, _BYTES, gpu), _BYTES, gpu.shared_memory)
            programs = min(tiles.count(m, n), tiles.programs * gpu.multiprocessors)
            found.append(Choice(cell.name, schedule, tiles, programs, needed_memory(tiles, _BYTES)))
        else:
            blocks = choose_blocks(m, n, depth, ranks, _BYTES, gpu, with_norm=True)
            blocks = gemv_tuning.fitted(blocks, m, _BYTES, gpu.shared_memory)
            memory = gemv_tuning.needed_memory(blocks, m, _BYTES)
            programs = -(-n // blocks.columns) * blocks.splits
            found.append(Choice(cell.name, "kernel", blocks, programs, memory, resident=programs))
    return found


def looked_up(gpu: Gpu, ranks: int) -> list[Choice]:
    """Embedding lookup + All-to-All."""
    found = []
    for cell in lookups.full_cells()[::2][:CALLS]:
        pooling = 20.0 if isinstance(cell.pooling, str) else float(cell.pooling)
        bags, dtype = cell.tables * cell.bags, cell.torch_dtype
        blocks = choose_lookup_blocks(LookupShape(cell.dim, dtype, pooling, bags), gpu)
        items = ranks * cell.tables * -(-cell.bags // ranks // blocks.bags)
        found.append(Choice(cell.name, "kernel", blocks, min(items, blocks.programs)))
    return found


OPERATORS: dict[str, Callable[[Gpu, int], list[Choice]]] = {
    "all_gather_gemm": gathered,
    "gemm_reduce_scatter": scattered,
    "gemm_all_to_all": exchanged,
    "gemv_all_reduce": reduced,
    "embedding_all_to_all": looked_up,
}


def _of_pair(pair: Pair) -> list[sharded.Layer]:
    return [cell for cell in sharded.all_cells() if cell.pair is pair][:CALLS]


def _schedule(pair: Pair, gpu: Gpu, ranks: int, cell: sharded.Layer) -> str:
    return choose(Size(pair, ranks, cell.m, cell.n, cell.k, _BYTES), machine_of(gpu))


def describe(gpu: Gpu) -> str:
    """Its figures, in a line."""
    link = f"NVLink {gpu.nvlink / 1e9:g} GB/s" if gpu.nvlink else f"PCIe {gpu.pcie / 1e9:g} GB/s"
    bridge = f" by a bridge, else PCIe {gpu.pcie / 1e9:g} GB/s" if gpu.needs_bridge else ""
    return (
        f"{gpu.multiprocessors} multiprocessors of {gpu.shared_memory >> 10} KiB, L2 {gpu.l2 >> 20} MiB, "
        f"memory {gpu.memory / 1e9:g} GB/s, {gpu.bf16 / 1e12:g} TFLOP/s in bf16, {link}{bridge}"
    )


def describe_blocks(blocks: Tiles | Blocks | LookupBlocks) -> str:
    """Describe the share of one program, for people."""
    if isinstance(blocks, Tiles):
        splits = f", K in {blocks.splits}" if blocks.splits > 1 else ""
        return f"{blocks.rows} x {blocks.columns} x {blocks.depth}, {blocks.stages} stages{splits}"
    if isinstance(blocks, Blocks):
        shots = "two-shot, flags" if blocks.flagged else "two-shot" if blocks.two_shot else "one-shot"
        return f"{blocks.columns} columns x {blocks.depth}, {blocks.stages} stages, K in {blocks.splits}, {shots}"
    shares = f", in {blocks.split} shares" if blocks.split > 1 else ""
    return f"{blocks.bags} bags, {blocks.rows} rows of each at once{shares}, {blocks.warps} warps"


def table(choices: Sequence[Choice]) -> str:
    """In Markdown."""
    lines = ["| call | schedule | kernel's blocks | programs | KiB of each | |", "|---|---|---|---|---|---|"]
    for one in choices:
        more = f"{one.pushers} of them push" if one.pushers else ""
        cells = (one.call, one.schedule, describe_blocks(one.blocks), one.programs, -(-one.memory // 1024) or "-", more)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=list(GPUS), default=list(GPUS), help="as torch names them")
    parser.add_argument("--operator", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--ranks", type=int, default=4, help="of the host")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks={options.ranks}: needed: at least 2")
    for name in options.gpu:
        print(f"## {name}\n\n{describe(GPUS[name])}\n")
        for operator in options.operator:
            print(f"### {operator}\n\n{table(OPERATORS[operator](GPUS[name], options.ranks))}\n")


if __name__ == "__main__":
    main()
