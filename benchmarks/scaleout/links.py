"""Collectives, and the stores of kernels, beside the time in which the links between ranks carry the bytes.

``benchmarks/calibrate.py`` measures gloo's collectives between two network namespaces with a rank each, as
``benchmarks/training/compare.py`` has them, and NCCL's and stores between the GPUs of a host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.common.environment import ROOT
from benchmarks.common.harness import World, open_world, time_interleaved
from benchmarks.common.network import Hosts
from dlrm_fused.symmetric import SymmetricMemory

# Seconds in which the links carry what a rank sends, and those that a collective, or ``stores``, takes, by its name.
PointsByName = dict[str, list[tuple[float, float]]]

# By a rank, to all others together. Between hosts, what is smaller fits into the buffers of the kernel and the link, and takes
# no step's time; within a host, from bytes that take as long as the start of a collective to those of large batches.
_SENT_BETWEEN_HOSTS = [2**20, 2**21, 2**22, 2**23]
_SENT_WITHIN_A_HOST = [2**power * part // 2 for power in range(22, 28) for part in (2, 3)]
_PAYLOAD = 1448 / 1514  # of an Ethernet frame of TCP
_PORT = 29500
_STORE_BYTES = 16


def between_hosts(gbits_per_second: Sequence[float]) -> PointsByName:
    """Return the points of gloo's collectives, on links of all these rates."""
    points: PointsByName = {}
    with Hosts(2) as hosts:
        for rate in gbits_per_second:
            hosts.shape(rate * 1e9)
            seconds = _on_hosts(hosts)
            for name in ("all_to_all", "all_reduce"):
                link = [sent / (rate * 1e9 / 8 * _PAYLOAD) for sent in _SENT_BETWEEN_HOSTS]
                points.setdefault(name, []).extend(zip(link, seconds[name], strict=True))
    return points


def within_a_host(gpus: int, bytes_per_second: float) -> PointsByName:
    """Return the points of NCCL's collectives and of stores.

    Args:
        bytes_per_second: of a GPU's links, in one direction.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "-m", __name__, "--stores", *map(str, _SENT_WITHIN_A_HOST)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"the ranks on NVLink ended with status {ended.returncode}; what they say is above")
    link = [sent / bytes_per_second for sent in _SENT_WITHIN_A_HOST]
    return {name: list(zip(link, seconds, strict=True)) for name, seconds in _last_line(ended.stdout).items()}


def _on_hosts(hosts: Hosts) -> dict[str, list[float]]:
    """Run this module with a rank on each host, on their CPUs."""
    command = [sys.executable, "-m", __name__, *map(str, _SENT_BETWEEN_HOSTS)]
    all_ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(_PORT)}
    all_ranks |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        hosts.popen(rank, command, {**all_ranks, "RANK": str(rank)}, cwd=ROOT, stdout=subprocess.PIPE) for rank in range(2)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank of the collectives failed")
    return _last_line(printed[0])


def _last_line(printed: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print seconds by the name of what sends, on a rank of several."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sent", type=int, nargs="+", help="bytes that a rank sends")
    parser.add_argument("--stores", action="store_true", help="measure those, too")
    options = parser.parse_args(arguments)
    with open_world() as world:
        world.log(json.dumps(_seconds(world, options.sent, options.stores)))


def _seconds(world: World, sizes: Sequence[int], with_stores: bool) -> dict[str, list[float]]:
    """Return a time for each size. Collective."""
    seconds: dict[str, list[float]] = {}
    memory = world.symmetric.allocate("calibration: stores", world.size * _part(world, max(sizes))) if with_stores else None
    for sent in sizes:
        calls = {"all_to_all": _all_to_all(world, sent), "all_reduce": _all_reduce(world, sent)}
        if memory is not None:
            calls["stores"] = _stores(world, memory, sent)
        for name, timing in time_interleaved(world, calls, seconds=0.1).items():
            seconds.setdefault(name, []).append(timing.microseconds / 1e6)
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
    """Return a call by which each rank stores to a place of its own in the memory of each other one."""
    part = _part(world, sent)
    own = torch.ones(part // 4, device=world.device)
    peers = [(world.rank + 1 + i) % world.size for i in range(world.size - 1)]
    theirs = [memory.peer(peer)[world.rank * part :][:part].view(torch.float32) for peer in peers]

    def call() -> None:
        for place in theirs:
            torch.add(own, 1, out=place)

    return call


def _part(world: World, sent: int) -> int:
    """Return the bytes for each other rank, in whole vectors of a store."""
    return sent // (world.size - 1) // _STORE_BYTES * _STORE_BYTES


if __name__ == "__main__":
    main()
