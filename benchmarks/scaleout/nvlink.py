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

_STORE_BYTES = 16


def measure(gpus: int, bytes_per_second: float) -> dict[str, list[tuple[float, float]]]:
    """Seconds in which the links carry what a rank sends, and those that the collective, or ``stores``, take, by its name.

    Args:
        bytes_per_second: of a GPU's links, in one direction.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "-m", __name__]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"the ranks on NVLink ended with status {ended.returncode}; what they say is above")
    seconds: dict[str, list[float]] = json.loads(ended.stdout.splitlines()[-1])
    link = [sent / bytes_per_second for sent in _SENT_BYTES]
    return {name: list(zip(link, of_sizes, strict=True)) for name, of_sizes in seconds.items()}


def _seconds(world: World) -> dict[str, list[float]]:
    """Of each number of bytes that a rank sends. Collective."""
    memory = world.symmetric.allocate("calibration: stores", world.size * _part(world, max(_SENT_BYTES)))
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
    """Each rank stores to a place of its own in the memory of each other one."""
    part = _part(world, sent)
    own = torch.ones(part // 4, device=world.device)
    peers = [(world.rank + 1 + i) % world.size for i in range(world.size - 1)]
    theirs = [memory.peer(peer)[world.rank * part :][:part].view(torch.float32) for peer in peers]

    def call() -> None:
        for place in theirs:
            torch.add(own, 1, out=place)

    return call


def _part(world: World, sent: int) -> int:
    """Bytes for each other rank, in whole vectors of a store."""
    return sent // (world.size - 1) // _STORE_BYTES * _STORE_BYTES


def main() -> None:
    with open_world() as world:
        world.log(json.dumps(_seconds(world)))


if __name__ == "__main__":
    main()
