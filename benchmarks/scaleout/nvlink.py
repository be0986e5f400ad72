"""NCCL's collectives, and the stores of kernels, within a host, beside the time in which NVLink carries the bytes.

``benchmarks/calibrate.py`` starts it with a rank for each GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.common.environment import ROOT
from benchmarks.common.harness import World, open_world, time_interleaved
from dlrm_fused.symmetric import SymmetricMemory

# By a rank, to all others together: from bytes that take as long as the start of a collective, to those of large batches.
_SENT_BYTES = [2**power * part // 2 for power in range(22, 28) for part in (2, 3)]


def measure(gpus: int, bytes_per_second: float) -> dict[str, list[tuple[float, float]]]:
    """Seconds in which the links carry what a rank sends, and those that the collective, or ``stores``, take, by its name.

    Args:
        bytes_per_second: of a GPU's links, in one direction.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "-m", __name__]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    link = [sent / bytes_per_second for sent in _SENT_BYTES]
    return {name: list(zip(link, of_sizes, strict=True)) for name, of_sizes in seconds.items()}


def _seconds(world: World) -> dict[str, list[float]]:
    """Of each number of bytes that a rank sends. Collective."""
    memory = world.symmetric.allocate("calibration: stores", max(_SENT_BYTES) // (world.size - 1))
    seconds: dict[str, list[float]] = {"all_to_all": [], "all_reduce": [], "stores": []}
    for sent in _SENT_BYTES:
        calls = {
            "all_to_all": _all_to_all(world, sent),
            "all_reduce": _all_reduce(world, sent),
            "stores": _stores(world, memory, sent),
        }
        for name, timing in time_interleaved(world, calls, seconds=0.1).items():
            seconds[name].append(timing.microseconds / 1e6)
    return seconds


def _all_to_all(world: World, sent: int) -> Callable[[], object]:
    given = torch.ones(sent // (world.size - 1) // 4 * world.size, device=world.device)
    received = torch.empty_like(given)
    return lambda: dist.all_to_all_single(received, given)


def _all_reduce(world: World, sent: int) -> Callable[[], object]:
    # In a ring each rank sends all parts but one, to be summed, and as many sums.
    values = torch.zeros(sent * world.size // (world.size - 1) // 8, device=world.device)
    return lambda: dist.all_reduce(values)


def _stores(world: World, memory: SymmetricMemory, sent: int) -> Callable[[], object]:
    part = sent // (world.size - 1)
    own = torch.ones(part // 4, device=world.device)
    theirs = [memory.peer((world.rank + 1 + i) % world.size)[:part].view(torch.float32) for i in range(world.size - 1)]

    def call() -> None:
        for peer in theirs:
            torch.add(own, 1, out=peer)

    return call


def main() -> None:
    with open_world() as world:
        world.log(json.dumps(_seconds(world)))


if __name__ == "__main__":
    main()
