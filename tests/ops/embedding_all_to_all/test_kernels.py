"""The fused lookup and its backward pass in real processes, under Triton's interpreter.

The mutants are kernels with one rule of the protocol broken; that these tests see them says that they look where it hurts.
"""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from dlrm_fused.errors import CommunicationError
from dlrm_fused.ops.embedding_all_to_all import kernel as fused
from dlrm_fused.ops.embedding_all_to_all import scatter as put
from dlrm_fused.ops.embedding_all_to_all import tuning as lookup_tuning
from dlrm_fused.symmetric import BlockPool
from dlrm_fused.symmetric import device as protocol
from tests.distributed.launch import RankFailed, cpu_group, run_ranks
from tests.ops.embedding_all_to_all.world import Features, Result, Traffic, World, mixed_world, run_epochs

pytestmark = pytest.mark.interpreted

TOLERANCE = 1e-5


def small_world(ranks: int) -> list[list[Features]]:
    """One table on all ranks but the last, and a row-wise one: little work for an interpreter."""
    own = [[Features((7,), (8,), (0,))] for _ in range(ranks - 1)] + [[]]
    return [[*features, Features((6,), (4,), (0,), row_wise=True)] for features in own]


def straggler(rank: int, late_rank: int) -> Callable[[int], None]:
    """One rank comes late by up to 20 ms, at random; the next one sometimes."""
    generator = random.Random(rank)

    def delay(epoch: int) -> None:
        if rank == late_rank or (rank == late_rank + 1 and epoch % 7 == 0):
            time.sleep(generator.uniform(0, 0.02))

    return delay


def run_world(
    make_world: Callable[[int], list[list[Features]]], traffic: Traffic, epochs: int, backward_every: int, mutant: str | None
) -> Result:
    if mutant is not None:
        MUTANTS[mutant]()
    with cpu_group() as group:
        world = World(make_world(group.world_size), traffic, seed=group.world_size)
        workspace = world.workspace(group, "world", timeout_seconds=60.0)
        result = run_epochs(world, workspace, epochs, straggler(group.rank, late_rank=0), backward_every=backward_every)
        return result


def largest_difference(results: list[Result]) -> float:
    return max(result.largest() for result in results)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "epochs"), [(3, 25), *(pytest.param(ranks, 100, marks=pytest.mark.slow) for ranks in (2, 3, 4))]
)
def test_epochs_with_uneven_batches_and_a_straggler(ranks: int, epochs: int) -> None:
    results = run_ranks(ranks, run_world, small_world, Traffic(longest_bag=3, largest_batch=2), epochs, 10, None)
    assert [result.epochs for result in results] == [epochs] * ranks
    assert largest_difference(results) < TOLERANCE


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
def test_poolings_dims_and_index_dtypes_of_all_kinds(optimizer: str) -> None:
    results = run_ranks(3, run_world, mixed_world, Traffic(optimizer=optimizer), 4, 1, None)
    assert largest_difference(results) < TOLERANCE


def run_with_blocks(blocks: lookup_tuning.Blocks) -> Result:
    lookup_tuning.override(blocks)
    return run_world(mixed_world, Traffic(), 3, 1, None)


@pytest.mark.parametrize(
    "blocks", [lookup_tuning.Blocks(1, 1, 1, 3, split=4), lookup_tuning.Blocks(2, 2, 1, 3, split=2)], ids=str
)
def test_bags_are_divided_among_threads(blocks: lookup_tuning.Blocks) -> None:
    assert largest_difference(run_ranks(2, run_with_blocks, blocks)) < TOLERANCE


@pytest.mark.parametrize(
    "traffic",
    [
        pytest.param(Traffic(forward_wire=torch.float16, backward_wire=torch.float16), id="wire"),
        pytest.param(Traffic(torch.float16, torch.float16, torch.float16), id="wire and output"),
        pytest.param(Traffic(output_dtype=torch.float16), id="output", marks=pytest.mark.slow),
    ],
)
def test_fp16(traffic: Traffic) -> None:
    results = run_ranks(2, run_world, mixed_world, traffic, 4, 1, None)
    assert 1e-6 < largest_difference(results) < 5e-3


@pytest.mark.parametrize("held_outputs", [1, 8])
def test_outputs_are_held_with_and_without_copies(held_outputs: int) -> None:
    results = run_ranks(2, run_world, small_world, Traffic(held_outputs=held_outputs), 8, 1, None)
    assert largest_difference(results) < TOLERANCE


@triton.jit
def signal_all(channel, epoch, is_done):
    lanes: tl.constexpr = channel.lanes
    peers = tl.arange(0, lanes)
    there = (peers < channel.world) & is_done
    words = tl.load(channel.flag_addresses + peers, mask=there, other=0).to(tl.pointer_type(tl.int64))
    arrival = words + channel.world + channel.rank
    tl.atomic_xchg(arrival, epoch + tl.zeros((lanes,), tl.int64), mask=there, sem="release", scope="sys")


@triton.jit
def begin_and_signal_at_once(channel, offset, fingerprint):
    epoch = protocol.begin(channel, offset, fingerprint)
    signal_all(channel, epoch, tl.program_id(0) == 0)
    return epoch


@triton.jit
def finish_without_waiting(channel, epoch):
    state = channel.state
    done = tl.atomic_add(state + protocol.PROGRAMS_DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + protocol.PROGRAMS_DONE, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        signal_all(channel, epoch, done >= 0)
        tl.atomic_xchg(state + protocol.EPOCH, epoch, sem="relaxed", scope="gpu")


@triton.jit
def store_where_the_peer_received_last(channel, peer, epoch, fingerprint):
    return (tl.load(channel.flags + peer) & 0xFFFFFFFF) * protocol.OFFSET_UNIT


def use_in_kernels(name: str, function: object) -> None:
    for module in (fused, put):
        setattr(module, name, function)


def reuse_blocks_that_are_held() -> None:
    receive = BlockPool.receive

    def receive_and_forget(self: BlockPool, shape, dtype):  # type: ignore[no-untyped-def]
        block = receive(self, shape, dtype)
        if not block.numel():
            return block
        # The same memory in a tensor that does not hold the lease, as with double buffering.
        memory = self.memory.local[self.offset_of(block) :][: block.numel() * block.element_size()]
        return torch.from_numpy(memory.numpy()).view(dtype).view(tuple(shape))

    BlockPool.receive = receive_and_forget  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "signal before the data": lambda: use_in_kernels("begin", begin_and_signal_at_once),
    "wait for arrivals removed": lambda: use_in_kernels("finish", finish_without_waiting),
    "wait for readiness removed": lambda: use_in_kernels("wait_until_ready", store_where_the_peer_received_last),
    "slot reused too early": reuse_blocks_that_are_held,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_is_noticed(mutant: str) -> None:
    assert_noticed(lambda: run_ranks(3, run_world, small_world, Traffic(), 20, 20, mutant))


def assert_noticed(run: Callable[[], list[Result]]) -> None:
    """By wrong results or an error of communication.

    A rank that does not wait gets ahead of the others, and they see the shapes of another epoch.
    """
    try:
        results = run()
    except RankFailed as failed:
        if not isinstance(failed.error, CommunicationError):
            raise
        return
    assert largest_difference(results) > 100 * TOLERANCE
