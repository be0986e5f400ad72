"""Rows between processes on the CPU: values, order, gradients, growing memory, faults, and as an operator of PyTorch."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.common import scatter_rows
from dlrm_fused.ops.sequence_all_to_all import Counts, SequenceWorkspace, numbers_of, op, reference, sequence_all_to_all
from dlrm_fused.ops.sequence_all_to_all.op import SequenceCall
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, symmetric_group
from dlrm_fused.symmetric import device as protocol
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import RankFailed, cpu_group, on_hosts, run_program, run_ranks

WIDTH = 8
DIVISOR = 3.0


class Call(NamedTuple):
    """A call of all ranks.

    Attributes:
        counts: [ranks][ranks]: rows that rank i asks rank j for.
        rows: of each rank, those that it was asked for.
        lengths: of each rank, [features, bags].
        batch_sizes: bags of each rank.
        places: of each rank's output rows, as the operator takes them; None in some calls.
        gradients: of each rank's output.
    """

    counts: list[list[int]]
    rows: list[Tensor]
    lengths: list[Tensor]
    batch_sizes: list[int]
    gradients: list[Tensor]
    places: list[Tensor] | None

    @classmethod
    def draw(
        cls, ranks: int, seed: int, dtype: torch.dtype = torch.float32, features: int | None = None, *, placed: bool = False
    ) -> Call:
        """Draw the same call on all ranks; some ask for nothing, are asked for nothing, or have no feature."""
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        batch_sizes = [draw.choice([0, 1, 4]) if seed % 3 == 0 else 3 for _ in range(ranks)]
        lengths = []
        for rank in range(ranks):
            of_rank = draw.choice([0, 1, 3, 5]) if features is None else features
            most = 0 if (seed + rank) % 5 == 0 else draw.choice([1, 2, 9])
            lengths.append(torch.randint(0, most + 1, (of_rank, sum(batch_sizes)), generator=generator))
        asked = [[int(part.sum()) for part in own.split(batch_sizes, dim=1)] for own in lengths]
        counts = [[of_owner[asking] for of_owner in asked] for asking in range(ranks)]
        rows = [torch.randn(sum(n), WIDTH, generator=generator).to(dtype) for n in asked]
        gradients = [torch.randn(sum(n), WIDTH, generator=generator).to(dtype) for n in counts]
        places = [torch.randperm(sum(n), generator=generator) for n in counts] if placed else None
        return cls(counts, rows, lengths, batch_sizes, gradients, places)

    def offsets(self, owner: int) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths[owner].flatten().cumsum(0)])

    def arguments(self, rank: int) -> tuple[Tensor, list[int], list[list[int]]]:
        """What the operator takes beside the rows, the divisor and the places."""
        return self.offsets(rank), self.batch_sizes, self.counts

    def places_of(self, rank: int) -> Tensor | None:
        return None if self.places is None else self.places[rank]

    def numbers(self, owner: int, asking: int) -> list[int]:
        """Which rows of a rank go to another one, in their order there."""
        features, bags = self.lengths[owner].shape
        first, offsets = sum(self.batch_sizes[:asking]), self.offsets(owner).tolist()
        own = range(first, first + self.batch_sizes[asking])
        ranges = [range(offsets[f * bags + bag], offsets[f * bags + bag + 1]) for f in range(features) for bag in own]
        return [row for rows in ranges for row in rows]

    def pieces(self, asking: int) -> list[Tensor]:
        """The rows that a rank gets from each rank."""
        return [self.rows[owner][self.numbers(owner, asking)] for owner in range(len(self.counts))]

    def output(self, asking: int) -> Tensor:
        """What a rank gets."""
        received, places = torch.cat(self.pieces(asking)), self.places_of(asking)
        if places is None:
            return received
        output = torch.empty_like(received)
        output[places] = received
        return output

    def gradient_of(self, owner: int) -> Tensor:
        """The undivided gradient of the rows of a rank."""
        gradient = torch.empty_like(self.rows[owner])
        for asking, (of_rank, asked) in enumerate(zip(self.gradients, self.counts, strict=True)):
            places = self.places_of(asking)
            as_received = of_rank if places is None else of_rank[places]
            gradient[self.numbers(owner, asking)] = as_received.split(asked)[owner]
        return gradient


def new_workspace(group: SymmetricGroup, timeout_seconds: float = 30.0, **settings: object) -> SequenceWorkspace:
    settings["timeout_seconds"] = timeout_seconds
    return SequenceWorkspace(group, WIDTH, name="sequences", **settings)  # type: ignore[arg-type]


def wrong_calls(seeds: Sequence[int], dtype: torch.dtype, longest_delay: float = 0.01, mutant: str | None = None) -> list[str]:
    """Seeds of the calls whose results or gradients are wrong on this rank. Results of earlier calls are held, and compared
    when later ones have been made; gradients go back in another order than that of the calls."""
    wrong = []
    with cpu_group() as group:
        workspace = new_workspace(group, output_dtype=dtype, forward_wire=dtype, backward_wire=dtype)
        for several in (seeds[i : i + 5] for i in range(0, len(seeds), 5)):
            calls = [Call.draw(group.world_size, seed, dtype, placed=seed % 2 > 0) for seed in several]
            leaves = [call.rows[group.rank].clone().requires_grad_() for call in calls]
            results = []
            for seed, call, rows in zip(several, calls, leaves, strict=True):
                if seed % group.world_size == group.rank:
                    time.sleep(random.Random(seed).random() * 0.01)
                arguments = *call.arguments(group.rank), DIVISOR, call.places_of(group.rank)
                results.append(sequence_all_to_all(workspace, rows, *arguments))
            for seed, call, rows, result in reversed(list(zip(several, calls, leaves, results, strict=True))):
                result.backward(call.gradients[group.rank])
                expected = (call.gradient_of(group.rank) / DIVISOR).to(dtype)
                if not torch.equal(result, call.output(group.rank)):
                    wrong.append(f"result of {seed}")
                if not torch.equal(rows.grad, expected):
                    wrong.append(f"gradient of {seed}")
    return wrong


@pytest.mark.also_interpreted
@pytest.mark.parametrize(
    ("hosts", "dtype"),
    [
        ((0,), torch.float32),
        ((0, 0), torch.bfloat16),
        ((0, 0, 0), torch.float32),
        ((0, 1), torch.float16),
        ((0, 0, 1), torch.float32),
        ((0, 1, 2, 0), torch.float32),
    ],
    ids=str,
)
def test_every_row_and_gradient_has_its_place(hosts: tuple[int, ...], dtype: torch.dtype) -> None:
    count = 15 if os.environ.get("TRITON_INTERPRET") == "1" else 60
    assert run_ranks(len(hosts), on_hosts, hosts, wrong_calls, range(count), dtype) == [[]] * len(hosts)


@triton.jit
def do_not_wait(channel, epoch, fingerprint):  # type: ignore[no-untyped-def]
    return tl.full((), 1, tl.int1)


@triton.jit
def complete_at_once(channel, epoch):  # type: ignore[no-untyped-def]
    tl.atomic_xchg(channel.state + protocol.EPOCH, epoch, sem="relaxed", scope="gpu")


def wait_and_be_late(channel: Any, epoch: Any, fingerprint: Any) -> Any:
    """Rank 1 stores late, as the interpreter allows: a rank that does not wait for it reads too early."""
    are_ready = protocol.wait_until_all_ready(channel, epoch, fingerprint)
    if os.environ["RANK"] == "1":
        time.sleep(0.1)
    return are_ready


def do_not_wait_for_arrivals() -> None:
    protocol._wait_for_arrivals = complete_at_once
    scatter_rows.wait_until_all_ready = wait_and_be_late


def reuse_blocks_that_are_held() -> None:
    receive = BlockPool.receive

    def receive_and_forget(self: BlockPool, shape: Sequence[int], dtype: torch.dtype, size: int = 0) -> Tensor:
        block = receive(self, shape, dtype, size)
        if not block.numel():
            return block
        # The same memory in a tensor that does not hold the lease, as with double buffering.
        memory = self.memory.local[self.offset_of(block) :][: block.numel() * block.element_size()]
        return torch.from_numpy(memory.numpy()).view(dtype).view(tuple(shape))

    BlockPool.receive = receive_and_forget  # type: ignore[method-assign]


def send_gradients_by_the_destinations_of_the_first_call() -> None:
    receive, first = op.receive_gradient, list[Tensor]()

    def receive_with_those(call: op.SequenceCall, gradient: Tensor, destinations: Tensor) -> Tensor:
        first.append(destinations)
        return receive(call, gradient, first[0])

    op.receive_gradient = receive_with_those


MUTANTS: dict[str, Callable[[], None]] = {
    "wait for readiness removed": lambda: setattr(scatter_rows, "wait_until_all_ready", do_not_wait),
    "wait for arrivals removed": do_not_wait_for_arrivals,
    "slot reused too early": reuse_blocks_that_are_held,
    "destinations of another call": send_gradients_by_the_destinations_of_the_first_call,
}


def wrong_calls_of(mutant: str | None) -> list[int]:
    """The numbers of wrong calls among some between the same numbers of rows, so that a mutant stores within its memory: rank 0
    comes late to every third, and results are held."""
    if mutant is not None:
        MUTANTS[mutant]()
    with cpu_group() as group:
        workspace, shape = new_workspace(group, held_outputs=4), Call.draw(group.world_size, 16, features=3)
        calls, wrong, held = [], [], []
        for number in range(12):
            # Features change places, so that rows of two calls have other ranks, but not other numbers of them.
            lengths = [own.roll(number, dims=0) for own in shape.lengths]
            calls.append(shape._replace(rows=[own + number for own in shape.rows], lengths=lengths))
            rows = calls[-1].rows[group.rank].clone().requires_grad_()
            if number % 3 == 0 and group.rank == 0:
                time.sleep(0.4)
            result = sequence_all_to_all(workspace, rows, *calls[-1].arguments(group.rank))
            held.append((number, rows, result))
            if len(held) == 4:
                for earlier, of_call, received in held:
                    received.backward(calls[earlier].gradients[group.rank])
                    is_right = torch.equal(received, torch.cat(calls[earlier].pieces(group.rank)))
                    is_right &= torch.equal(of_call.grad, calls[earlier].gradient_of(group.rank))
                    wrong += [] if is_right else [earlier]
                held.clear()
        return wrong


@pytest.mark.interpreted
def test_calls_between_the_same_numbers_of_rows() -> None:
    assert run_ranks(2, wrong_calls_of, None) == [[], []]


@pytest.mark.interpreted
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_is_noticed(mutant: str) -> None:
    try:
        wrong = run_ranks(2, wrong_calls_of, mutant)
    except RankFailed as failed:
        if not isinstance(failed.error, CommunicationError):  # a rank that is ahead makes another call
            raise
        return
    assert any(wrong)


def differences_from_the_reference(seeds: Sequence[int]) -> list[int]:
    with cpu_group() as group:
        workspace, found = new_workspace(group), []
        for seed in seeds:
            call = Call.draw(group.world_size, seed, placed=seed % 2 > 0)
            gradient = call.gradients[group.rank]
            ours, theirs = (call.rows[group.rank].clone().requires_grad_() for _ in range(2))
            arguments, places = call.arguments(group.rank), call.places_of(group.rank)
            result = sequence_all_to_all(workspace, ours, *arguments, places=places)
            expected = reference(dist.group.WORLD, theirs, *arguments, places)
            result.backward(gradient)
            expected.backward(gradient)
            if not (torch.equal(result, expected) and torch.equal(ours.grad, theirs.grad)):
                found.append(seed)
        return found


def test_the_reference_is_the_same() -> None:
    assert run_ranks(3, differences_from_the_reference, range(8)) == [[]] * 3


def rounded_by_the_wire() -> bool:
    with cpu_group() as group:
        workspace = new_workspace(group, forward_wire=torch.bfloat16, backward_wire=torch.float16)
        call = Call.draw(group.world_size, 9)
        rows = call.rows[group.rank].clone().requires_grad_()
        rows.data[:1] = 1e9
        call.rows[group.rank].copy_(rows.data)
        gradient = call.gradients[group.rank] * 1e5  # beyond the largest of fp16
        result = sequence_all_to_all(workspace, rows, *call.arguments(group.rank))
        result.backward(gradient)
        assert result.dtype == rows.grad.dtype == torch.float32
        sent = call._replace(gradients=[(of_rank * 1e5).clamp(-65504, 65504).half().float() for of_rank in call.gradients])
        own = call.pieces(group.rank)[group.rank].bfloat16().float()
        received = result.split(call.counts[group.rank])[group.rank]
        return torch.equal(received, own) and torch.equal(rows.grad, sent.gradient_of(group.rank))


def test_rows_and_gradients_travel_in_the_dtypes_of_the_wire() -> None:
    assert run_ranks(2, rounded_by_the_wire) == [True, True]


class WithoutGradient(torch.autograd.Function):
    """Something of a user's that gives no gradient to what is before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def gradient_where_rank_0_gives_none() -> bool:
    with cpu_group() as group:
        workspace, call = new_workspace(group), Call.draw(group.world_size, 9)
        rows = call.rows[group.rank].requires_grad_()
        result = sequence_all_to_all(workspace, rows, *call.arguments(group.rank))
        (WithoutGradient.apply(result) if group.rank == 0 else result).backward(call.gradients[group.rank])
        assert rows.grad is not None
        of_others = call._replace(gradients=[torch.zeros_like(call.gradients[0]), *call.gradients[1:]])
        return torch.equal(rows.grad, of_others.gradient_of(group.rank))


@pytest.mark.also_interpreted
def test_a_rank_whose_output_gets_no_gradient_sends_zeros() -> None:
    assert run_ranks(2, gradient_where_rank_0_gives_none) == [True, True]


def inference_before_training() -> bool:
    with cpu_group() as group:
        workspace = new_workspace(group)
        small, large = Call.draw(group.world_size, 5), Call.draw(group.world_size, 9)  # the memory grows in between
        with torch.inference_mode():
            first = sequence_all_to_all(workspace, small.rows[group.rank], *small.arguments(group.rank))
        rows = large.rows[group.rank].requires_grad_()
        result = sequence_all_to_all(workspace, rows, *large.arguments(group.rank))
        result.backward(large.gradients[group.rank])
        assert rows.grad is not None
        return torch.equal(first, torch.cat(small.pieces(group.rank))) and torch.equal(rows.grad, large.gradient_of(group.rank))


def test_a_call_under_inference_mode_may_be_the_first() -> None:
    assert run_ranks(2, inference_before_training) == [True, True]


def opcheck() -> None:
    with cpu_group() as group:
        workspace = new_workspace(group)
        call = Call.draw(group.world_size, 9, placed=True)
        rows = call.rows[group.rank].requires_grad_()
        offsets, batch_sizes, counts = call.arguments(group.rank)
        call_of_rank = batch_sizes, workspace.counts(counts).numbers, DIVISOR, workspace.handle
        for places in (None, call.places_of(group.rank)):
            arguments = rows, offsets, places, *call_of_rank
            torch.library.opcheck(torch.ops.dlrm_fused.sequence_all_to_all.default, arguments)


def test_opcheck() -> None:
    run_ranks(2, opcheck)


def compiled_and_eager() -> list[bool]:
    """Whether results and gradients of calls that one graph has are those of eager mode, on this rank."""
    equal = []
    with cpu_group() as group:
        workspace = new_workspace(group)
        for seed in (9, 10):
            call = Call.draw(group.world_size, seed, placed=seed % 2 > 0)

            def run(rows: Tensor, call: Call = call) -> Tensor:
                arguments = *call.arguments(group.rank), DIVISOR, call.places_of(group.rank)
                return sequence_all_to_all(workspace, 2 * rows, *arguments)

            rows = call.rows[group.rank].requires_grad_()
            seen = []
            for made in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
                result = made(rows)
                seen.append([result, *torch.autograd.grad(result, rows, call.gradients[group.rank])])
            equal.append(all(map(torch.equal, *seen)))
    return equal


def test_a_compiled_call_takes_counts_as_numbers() -> None:
    assert run_ranks(2, compiled_and_eager) == [[True, True]] * 2


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_counts_are_the_same_from_the_host_and_from_a_tensor(ranks: int) -> None:
    draw = random.Random(ranks)
    for most in (0, 3, 2**30):
        asked = [[draw.randint(0, most) for _ in range(ranks)] for _ in range(ranks)]
        for rank in range(ranks):
            assert Counts.between(asked, rank).numbers == numbers_of(torch.tensor(asked), rank).tolist()


def error_of_a_call(is_refused: bool) -> str:
    """What a rank is told when rank 1 gives rows in fp64, or other counts."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        workspace = new_workspace(symmetric_group())
        call = Call.draw(rank.world_size, 9)
        sequence_all_to_all(workspace, call.rows[rank.index], *call.arguments(rank.index))
        rows, (offsets, batch_sizes, counts) = call.rows[rank.index], call.arguments(rank.index)
        if rank.index == 1 and is_refused:
            rows = rows.double()
        elif rank.index == 1:
            counts = [[counts[0][0] + 1, *counts[0][1:]], *counts[1:]]
        answer = "no error"
        try:
            sequence_all_to_all(workspace, rows, offsets, batch_sizes, counts)
        except (UsageError, CommunicationError) as error:
            answer = f"{type(error).__name__}: {error}"
        dist.barrier()  # who ends earlier is taken for lost
        return answer


def test_a_rank_that_refuses_a_call_is_named() -> None:
    first, second, third = run_ranks(3, error_of_a_call, True)
    assert second.startswith("UsageError: sequences: rows is torch.float64")
    for told in (first, third):
        assert told.startswith("CommunicationError")
        assert "rank 1 on" in told
        assert "did not take part" in told


def test_ranks_with_other_counts_are_told_at_once() -> None:
    for told in run_ranks(2, error_of_a_call, False):
        assert told.startswith("CommunicationError")
        assert "differ in shapes or settings" in told


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1, 2]], "needed: 2 numbers, at least 0, for each of 2 ranks"),
        ([[1, 2], [1]], "needed: 2 numbers, at least 0, for each of 2 ranks"),
        ([[1, -1], [0, 0]], "needed: 2 numbers, at least 0, for each of 2 ranks"),
    ],
    ids=str,
)
def test_wrong_counts(counts: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        SequenceWorkspace.counts(_TwoRanks(), counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "offsets", "batch_sizes", "message"),
    [
        (2**30, [0, 2**30], [1, 0], "a rank receives 1073741824 rows; needed: less than 2**31 / 2"),
        (3, [0, 3], [1], "batch_sizes=[1]; needed: a number, at least 0, for each of 2 ranks"),
        (3, [0, 1, 2, 3], [1, 1], "offsets has shape [4], strides (1,); needed: [3]"),
        (3, [0], [1, 1], "3 ids, but offsets of no feature; counts=[3, 0]"),
        (3, [0.0, 3.0], [1, 0], "offsets is torch.float32; needed: torch.int32 or torch.int64"),
    ],
    ids=str,
)
def test_wrong_calls(count: int, offsets: list[float], batch_sizes: list[int], message: str) -> None:
    counts = SequenceWorkspace.counts(_TwoRanks(), [[count, 0], [0, 0]])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape(message)):
        SequenceCall(torch.tensor(offsets), None, batch_sizes, counts, 1.0, _TwoRanks()).check()  # type: ignore[arg-type]


def test_wrong_places() -> None:
    counts = SequenceWorkspace.counts(_TwoRanks(), [[3, 1], [0, 0]])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape("places has shape [3], strides (1,); needed: [4], contiguous")):
        SequenceCall(torch.tensor([0, 3]), torch.arange(3), [1, 0], counts, 1.0, _TwoRanks()).check()  # type: ignore[arg-type]


class _TwoRanks:
    name, rank, world_size, device = "sequences", 0, 2, torch.device("cpu")


def call_until_rank_1_is_killed() -> None:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        workspace = new_workspace(symmetric_group())
        for number in itertools.count(6, 3):
            if rank.index == 1 and number == 18:
                os.kill(os.getpid(), signal.SIGKILL)
            call = Call.draw(rank.world_size, number)
            rows = call.rows[rank.index].requires_grad_()
            try:
                sequence_all_to_all(workspace, rows, *call.arguments(rank.index)).sum().backward()
            except CommunicationError as error:
                print(error, flush=True)
                os._exit(0)  # the process group would wait for the rank that is gone


def test_every_other_rank_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    ended = run_program(3, tmp_path, 240.0, call_until_rank_1_is_killed)
    assert ended.statuses == [0, -signal.SIGKILL, 0], ended.output
    assert len(re.findall(r"rank 1 on \S+ \(pid \d+\) is lost", ended.output)) == 2, ended.output


def delivered(workspace: SequenceWorkspace, counts: list[list[int]], **changed: Tensor) -> Tensor:
    """A call with one feature, and a sample of each rank."""
    sent = [asked[workspace.rank] for asked in counts]
    offsets = torch.tensor([0, *itertools.accumulate(sent)])
    arguments = {"rows": torch.ones(sum(sent), WIDTH), "offsets": offsets, "batch_sizes": [1] * len(counts), "counts": counts}
    return sequence_all_to_all(workspace, **{**arguments, **changed})


def told_of_different_counts() -> tuple[str, float]:
    """On a rank: the error, and after how many seconds, where the counts of rank 1 alone need more memory."""
    with cpu_group() as group:
        workspace = new_workspace(group, timeout_seconds=5.0)
        delivered(workspace, [[1, 1], [1, 1]])
        began = time.monotonic()
        with pytest.raises(CommunicationError) as told:
            delivered(workspace, [[4, 1], [1, 1]] if group.rank == 1 else [[1, 1], [1, 1]])
        return str(told.value), time.monotonic() - began


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
def test_ranks_of_which_one_needs_more_memory_are_told_within_the_time_limit(hosts: tuple[int, ...]) -> None:
    for told, seconds in run_ranks(2, on_hosts, hosts, told_of_different_counts):
        assert re.search(
            "differ in shapes or settings|a call has failed on rank 0|longer than 5 s|rank 1 .* has ended while", told
        ), told
        assert seconds < 10.0


def told_of_a_rank_that_sleeps() -> tuple[str, float]:
    with cpu_group() as group:
        workspace = new_workspace(group, timeout_seconds=2.0)
        delivered(workspace, [[1, 1], [1, 1]])
        began = time.monotonic()
        if group.rank == 1:
            time.sleep(5.0)
        with pytest.raises(CommunicationError) as told:
            delivered(workspace, [[9, 9], [9, 9]])
        return str(told.value), time.monotonic() - began


def test_a_rank_that_waits_for_memory_waits_no_longer_than_for_anything_else() -> None:
    (told, seconds), (late, _) = run_ranks(2, told_of_a_rank_that_sleeps)
    assert re.search(r"waited for rank 1 .*, longer than 2 s", told)
    assert seconds < 4.0
    assert "a call has failed on rank 0" in late


def told_of_wrong_values(changed: dict[str, Tensor]) -> str:
    with cpu_group() as group:
        workspace = new_workspace(group)
        with pytest.raises((UsageError, CommunicationError)) as told:
            changes = {"places": torch.tensor([1, 0])} if "places" in changed else {}
            delivered(workspace, [[1, 1], [1, 1]], **(changed if group.rank == 1 else changes))
        return str(told.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"offsets": torch.tensor([0, 1, 9])},
            "begin with 0, and give the ranks [1, 8] ids; needed: they rise from 0, and give [1, 1]",
        ),
        (
            {"offsets": torch.tensor([0, 2, 2])},
            "begin with 0, and give the ranks [2, 0] ids; needed: they rise from 0, and give [1, 1]",
        ),
        ({"offsets": torch.empty(0, dtype=torch.int64)}, "offsets has shape [0]"),
        ({"places": torch.tensor([5, 500000])}, "places from 5 to 500000; needed: each number from 0 to 1"),
    ],
    ids=["offsets of more", "offsets of others", "no offsets", "places"],
)
def test_numbers_that_do_not_belong_to_the_counts_are_named(changed: dict[str, Tensor], message: str) -> None:
    other, own = run_ranks(2, told_of_wrong_values, changed)
    assert message in own
    assert "rank 1" in other
