"""The exchange of sparse features on several GPUs: batches of training's size, that grow, on two streams.

With ``TRITON_INTERPRET=1`` it runs on the CPU too, with small ones.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dlrm_fused.ops.feature_all_to_all import FeatureExchange
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import MARKS, ON_GPU, checked_on_all_ranks, delay, synchronize

pytestmark = MARKS
FEATURES = 7
BAGS = (16_384, 16_384, 20_000, 1000) if ON_GPU else (20, 20, 70, 3)
REPEATS = 10 if ON_GPU else 1


def batch(group: SymmetricGroup, rank: int, step: int, bags: int, longest: int) -> tuple[Tensor, Tensor]:
    """Lengths [FEATURES, bags] and values of a rank's batch, which every rank can draw."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, longest + 1, (FEATURES, bags), generator=draws, dtype=torch.int32)
    values = torch.randint(0, 2**40, (int(lengths.sum()),), generator=draws)
    return lengths.to(group.device), values.to(group.device)


def check_step(exchange: FeatureExchange, step: int, bags: int, longest: int, streams: list[torch.cuda.Stream | None]) -> None:
    world = exchange.world_size
    of_ranks = [batch(exchange.group, rank, step, bags, longest) for rank in range(world)]
    lengths, values = of_ranks[exchange.rank]
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0).int()])
    synchronize()
    with torch.cuda.stream(streams[0]):
        sent = exchange.send(lengths, offsets, values)
    with torch.cuda.stream(streams[1]):
        received = sent.receive()
    synchronize()
    parts = [values.split(lengths.sum(1).tolist()) for lengths, values in of_ranks]
    own = exchange.features_of_ranks[exchange.rank]
    expected = [parts[rank][feature] for feature in own for rank in range(world)]
    assert torch.equal(received.values, torch.cat(expected))
    assert torch.equal(received.lengths, torch.stack([torch.cat([of[0][feature] for of in of_ranks]) for feature in own]))
    assert sum(received.counts) == len(received.values)


def check_batches(group: SymmetricGroup) -> None:
    features = [[f for f in range(FEATURES) if f % group.world_size == rank or f == 3] for rank in range(group.world_size)]
    exchange = FeatureExchange(group, features, name="features", timeout_seconds=20.0)
    delays = random.Random(group.rank)
    side = torch.cuda.Stream() if ON_GPU else None
    for repeat in range(REPEATS):
        for step, bags in enumerate(BAGS):
            delay(delays)
            check_step(exchange, 10 * repeat + step, bags, 1 + 5 * step, [side, side if repeat % 2 else None])


CHECKS = {"batches": check_batches}
failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
