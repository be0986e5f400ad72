"""gloo's collectives between two hosts, beside the time in which their link carries the bytes.

``benchmarks/calibrate.py`` runs it, for links that no comparison uses. Two network namespaces have a rank each, as in
``benchmarks/training/across_hosts.py``, which says what that needs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.common.environment import ROOT
from benchmarks.common.network import Hosts

PAYLOAD = 1448 / 1514  # of an Ethernet frame of TCP
_RANKS = 2
_PORT = 29500
# By a rank. What is smaller fits into the buffers of the kernel and the link, and takes no step's time.
_SENT_BYTES = [2**20, 2**21, 2**22, 2**23]
_CALLS = 15


def measure(gbits_per_second: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """Seconds in which the link carries what a rank sends, and those that the collective takes, by its name."""
    points: dict[str, list[tuple[float, float]]] = {}
    with Hosts(_RANKS) as hosts:
        for rate in gbits_per_second:
            hosts.shape(rate * 1e9)
            for name, seconds in _run(hosts).items():
                link = (sent / (rate * 1e9 / 8 * PAYLOAD) for sent in _SENT_BYTES)
                points.setdefault(name, []).extend(zip(link, seconds, strict=True))
    return points


def _run(hosts: Hosts) -> dict[str, list[float]]:
    commands = [[sys.executable, "-m", __name__, str(rank), hosts.addresses[0]] for rank in range(_RANKS)]
    ranks = [
        hosts.popen(rank, command, {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=subprocess.PIPE)
        for rank, command in enumerate(commands)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank of the collectives failed")
    found: dict[str, list[float]] = json.loads(printed[0])
    return found


def _seconds_of_rank(rank: int, address: str) -> dict[str, list[float]]:
    """Of each number of bytes that a rank sends."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{_PORT}", rank=rank, world_size=_RANKS)
    seconds = {
        "all_to_all": [_median_seconds(_all_to_all(sent)) for sent in _SENT_BYTES],
        "all_reduce": [_median_seconds(_all_reduce(sent)) for sent in _SENT_BYTES],
    }
    dist.destroy_process_group()
    return seconds


def _all_to_all(sent: int) -> Callable[[], object]:
    given = torch.ones(_RANKS * sent // 4)
    received = torch.empty_like(given)
    return lambda: dist.all_to_all_single(received, given)


def _all_reduce(sent: int) -> Callable[[], object]:
    # Of two ranks each sends half to be summed, and the sum of the other half.
    values = torch.zeros(sent // 4)
    return lambda: dist.all_reduce(values)


def _median_seconds(collective: Callable[[], object]) -> float:
    collective()
    return statistics.median(_seconds(collective) for _ in range(_CALLS))


def _seconds(collective: Callable[[], object]) -> float:
    start = time.perf_counter()
    collective()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(_seconds_of_rank(int(sys.argv[1]), sys.argv[2])))
