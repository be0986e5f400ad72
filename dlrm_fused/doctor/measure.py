"""Measures latency and bandwidth between pairs of ranks: a message there and back, through the process group."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from dlrm_fused.symmetric.hosts import Host
from dlrm_fused.training.runtime import Rank, process_group

BANDWIDTH_BYTES = 8_000_000
_LATENCY_BYTES = 8
_LATENCY_ROUNDS, _BANDWIDTH_ROUNDS = 50, 8
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """One pair's latency, half the median time there and back, and bandwidth in one direction, with ``BANDWIDTH_BYTES``."""

    ranks: tuple[int, int]
    backend: str
    latency_us: float
    gb_per_s: float


def pairs_to_measure(hosts: Sequence[Host]) -> list[tuple[int, int]]:
    """Return one pair within each host that has two ranks, and one between each two neighbouring hosts."""
    ranks_of = {host: [rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)}
    within = [(ranks[0], ranks[1]) for ranks in ranks_of.values() if len(ranks) > 1]
    firsts = [ranks[0] for ranks in ranks_of.values()]
    between = list(pairwise(firsts))
    # Every second pair goes first, so that no pair waits for a chain of others.
    return within + between[::2] + between[1::2]


def measure(rank: Rank, device: torch.device, pairs: Sequence[tuple[int, int]], seconds: float) -> list[Measurement]:
    """Measure those pairs that this rank is the first of; collective over all ranks of the run.

    All ranks go through the pairs in one order, so none waits in a circle.

    Args:
        seconds: for making the process group, and for each message.
    """
    # NCCL's messages then raise at their time limit; otherwise it ends the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with process_group(rank, device, timedelta(seconds=seconds)):
        measured = [_measure_pair(rank, device, pair) for pair in pairs if rank.index in pair]
        # A rank that leaves earlier would take its connections away.
        dist.all_reduce(torch.zeros(1))
    return [measurement for measurement in measured if measurement.ranks[0] == rank.index]


def _measure_pair(rank: Rank, device: torch.device, pair: tuple[int, int]) -> Measurement:
    (peer,) = set(pair) - {rank.index}
    try:
        latency = _one_way_seconds(rank.index < peer, peer, device, _LATENCY_BYTES, _LATENCY_ROUNDS)
        transfer = _one_way_seconds(rank.index < peer, peer, device, BANDWIDTH_BYTES, _BANDWIDTH_ROUNDS)
    except RuntimeError as error:
        raise RuntimeError(f"no messages between {rank} and rank {peer}: {error}") from error
    backend = "gloo" if device.type == "cpu" else "nccl"
    return Measurement(pair, backend, latency * 1e6, BANDWIDTH_BYTES / transfer / 1e9)


def _one_way_seconds(is_first: bool, peer: int, device: torch.device, size: int, rounds: int) -> float:
    """Half the median time of ``size`` bytes there and back."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    calls = (dist.send, dist.recv) if is_first else (dist.recv, dist.send)
    times = []
    for _ in range(_WARM_UP_ROUNDS + rounds):
        begin = time.perf_counter()
        for call in calls:
            call(message, peer)
        torch.get_device_module(device).synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_WARM_UP_ROUNDS:]) / 2
