"""Sparse features reach the ranks of their tables, by kernels in real processes under Triton's interpreter."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.feature_all_to_all import FeatureExchange
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import on_hosts, run_ranks

pytestmark = pytest.mark.interpreted

FEATURES = 5


def batch(rank: int, step: int, bags: int, longest: int) -> tuple[Tensor, Tensor]:
    """Lengths [FEATURES, bags] and values of a rank's batch, which every rank can draw."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, longest + 1, (FEATURES, bags), generator=draws, dtype=torch.int32)
    lengths[step % FEATURES] = 0
    return lengths, torch.randint(0, 2**40, (int(lengths.sum()),), generator=draws)


def expected(features: list[int], step: int, bags: list[int], longest: int) -> tuple[Tensor, Tensor, list[int]]:
    world = len(bags)
    of_ranks = [batch(rank, step, bags[rank], longest) for rank in range(world)]
    parts = [values.split(lengths.sum(1).tolist()) for lengths, values in of_ranks]
    values = [[parts[rank][feature] for rank in range(world)] for feature in features]
    lengths = [torch.cat([of_ranks[rank][0][feature] for rank in range(world)]) for feature in features]
    counts = [sum(map(len, of_feature)) for of_feature in values]
    nothing = torch.empty(0, dtype=torch.int64)
    return (
        torch.stack(lengths) if lengths else torch.empty(0, sum(bags), dtype=torch.int32),
        torch.cat([nothing, *(part for of_feature in values for part in of_feature)]),
        counts,
    )


def check_steps(
    features_of_ranks: list[list[int]], bags_of_steps: list[int], sent_at_once: int = 1, is_uneven: bool = False
) -> None:
    process = Rank.from_environment()
    with process_group(process, torch.device("cpu")):
        exchange = FeatureExchange(symmetric_group(), features_of_ranks, name="features", timeout_seconds=60.0)
        _check_steps(exchange, bags_of_steps, sent_at_once, is_uneven)
        dist.barrier()  # a rank that ends is lost to those that have not


def _check_steps(exchange: FeatureExchange, bags_of_steps: list[int], sent_at_once: int, is_uneven: bool) -> None:
    rank, world, features = exchange.rank, exchange.world_size, exchange.features_of_ranks[exchange.rank]
    pending = []
    for step, bags in enumerate(bags_of_steps):
        if random.Random(step).randrange(world) == rank:
            time.sleep(0.05)
        bags_of_ranks = [bags + 5 * (is_uneven and i == 0) for i in range(world)]
        lengths, values = batch(rank, step, bags_of_ranks[rank], longest=1 + 3 * step)
        offsets = torch.cat([torch.zeros(1), lengths.flatten().cumsum(0)]).int()
        pending.append((step, bags_of_ranks, exchange.send(lengths, offsets, values)))
        if len(pending) == sent_at_once:
            for sent_step, sent_bags, sent in pending:
                received = sent.receive()
                right = expected(features, sent_step, sent_bags, 1 + 3 * sent_step)
                assert torch.equal(received.lengths, right[0]), f"lengths of step {sent_step}"
                assert torch.equal(received.values, right[1]), f"values of step {sent_step}"
                assert received.counts == right[2]
                assert received.bags == sent_bags
            pending = []


@pytest.mark.parametrize(
    "features_of_ranks",
    [[[3, 0, 4, 1, 2]], [[1, 4], [0, 2, 3]], [[2, 1, 0, 3, 4], []], [[0, 4], [1, 3, 0], [2]]],
    ids=["one rank", "two ranks", "a rank without tables", "a feature of two ranks"],
)
def test_batches_that_grow(features_of_ranks: list[list[int]]) -> None:
    run_ranks(len(features_of_ranks), check_steps, features_of_ranks, [3, 3, 7, 2, 70, 70, 1])


def test_a_batch_may_be_sent_before_the_last_is_received() -> None:
    run_ranks(2, check_steps, [[1, 4], [0, 2, 3]], [3, 8, 8, 5], 2)


def test_ranks_may_have_more_bags_than_others() -> None:
    run_ranks(3, check_steps, [[0, 4], [1, 3, 0], [2]], [3, 70, 1], 1, True)


@pytest.mark.parametrize(
    ("hosts", "features_of_ranks"),
    [
        ([0, 1], [[1, 4], [0, 2, 3]]),
        ([0, 1], [[], [2, 1, 0, 3, 4]]),
        ([0, 1, 0], [[0, 4], [1, 3, 0], [2]]),
        ([0, 0, 1, 1], [[0, 1], [3], [2, 4, 0], []]),
    ],
    ids=["two hosts", "a rank without tables", "a host of two ranks", "two hosts of two ranks"],
)
def test_other_hosts_get_messages(hosts: list[int], features_of_ranks: list[list[int]]) -> None:
    run_ranks(len(hosts), on_hosts, hosts, check_steps, features_of_ranks, [3, 3, 70, 1, 70], 2, True)


def send_what_is_wrong_on_one_rank() -> str:
    with process_group(Rank.from_environment(), torch.device("cpu")):
        group = symmetric_group()
        exchange = FeatureExchange(group, [[0], [1]], name="features")
        offsets = torch.arange(6 if group.rank == 0 else 7, dtype=torch.int32)
        with pytest.raises((UsageError, CommunicationError)) as raised:
            exchange.send(torch.ones(2, 3, dtype=torch.int32), offsets, torch.zeros(6, dtype=torch.int64)).receive()
        return str(raised.value)


def test_offsets_must_belong_to_the_lengths_and_other_ranks_do_not_wait() -> None:
    own, other = run_ranks(2, send_what_is_wrong_on_one_rank)
    assert own == "features: 6 offsets for 6 lengths; needed: one more"
    assert "rank 0" in other
