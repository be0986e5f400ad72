"""Operators whose ranks lie on several hosts, on the CPU: they compute what they compute on one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter, scatter
from dlrm_fused.ops.common.exchanges import halves_of
from dlrm_fused.ops.moe import expert_layer
from dlrm_fused.ops.moe.op import _fake_forward, expert_layer_with_slots
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric.channel import Channel, ChannelExchange
from dlrm_fused.symmetric.hosts import Hosts
from tests.distributed.launch import cpu_group, on_hosts, run_ranks
from tests.ops.all_gather_gemm import cases as layers
from tests.ops.gemm_all_to_all import cases as products
from tests.ops.gemv_all_reduce import test_op as sums
from tests.ops.moe import cases as experts

# Two hosts with two ranks each, whose numbers may alternate; one rank beside three; and three hosts.
HOSTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 2)]
EQUAL, SMALL = products.Case(72, 40, rows=24), products.Case(40, 24, rows=48)
GATHERED, SCATTERED = layers.Case(Pair.all_gather_gemm, 24, 72, 40), layers.Case(Pair.gemm_reduce_scatter, 24, 72, 40)


@pytest.mark.parametrize("hosts", HOSTS)
def test_products_and_their_gradients_with_a_straggler(hosts: tuple[int, ...]) -> None:
    cases = [EQUAL, SMALL, products.Case(40, 32, rows=12, fp8=True)]
    products.check(cases, 4, calls=16, with_gradients=True, hosts=hosts)


@pytest.mark.parametrize("hosts", [*HOSTS, (0, 0, 1), (0, 0, 0, 1, 2)])
def test_products_of_sharded_rows_and_their_gradients_with_a_straggler(hosts: tuple[int, ...]) -> None:
    cases = [GATHERED, SCATTERED, replace(GATHERED, rows=5), replace(SCATTERED, rows=5)]
    layers.check(cases, len(hosts), calls=18, with_gradients=True, hosts=hosts)


def cut_into_halves() -> None:
    scatter._BYTES_IN_HALVES = 1


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), HOSTS[0]])  # of the first alone in halves
def test_rows_whose_halves_travel_one_after_the_other(hosts: tuple[int, ...]) -> None:
    cases = [SCATTERED, replace(SCATTERED, rows=5)]
    layers.check(cases, len(hosts), calls=8, with_gradients=True, hosts=hosts, mutate=cut_into_halves)


@contextmanager
def bytes_of_exchanges() -> Iterator[list[int]]:
    """The bytes that each exchange within it sends to other hosts."""
    sent_bytes, exchange = list[int](), Channel.exchange

    def counted(channel: Channel, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], **what: int) -> ChannelExchange:
        sent_bytes.append(sum(part.nbytes for part in sent.values()))
        return exchange(channel, sent, received, **what)

    with mock.patch.object(Channel, "exchange", counted):
        yield sent_bytes


def bytes_of_gathered_rows() -> int:
    """On a rank: the bytes that it sends to other hosts when each rank has 6 rows of 8 numbers."""
    with cpu_group() as group, bytes_of_exchanges() as sent_bytes:
        workspace = ShardWorkspace(group, name="rows", max_rows=6 * group.world_size, max_columns=8, dtype=torch.float32)
        all_gather_gemm(workspace, torch.ones(6, 8), torch.ones(4, 8))
    return sum(sent_bytes)


def test_a_gathered_row_crosses_once_to_each_other_host() -> None:
    hosts = (0, 0, 0, 1, 1, 2)
    assert run_ranks(len(hosts), on_hosts, hosts, bytes_of_gathered_rows) == [2 * 6 * 8 * 4] * len(hosts)


def bytes_of_scattered_rows() -> int:
    """On a rank: the bytes that it sends to other hosts when each rank gets 6 rows of 8 numbers."""
    with cpu_group() as group, bytes_of_exchanges() as sent_bytes:
        rows = 6 * group.world_size
        workspace = ShardWorkspace(group, name="rows", max_rows=rows, max_columns=8, dtype=torch.float32)
        assert workspace.received_shards == group.world_size  # unequal hosts need no more memory here
        gemm_reduce_scatter(workspace, torch.ones(rows, 4), torch.ones(8, 4))
    return sum(sent_bytes)


def test_of_a_hosts_ranks_one_sum_crosses_for_each_scattered_row() -> None:
    hosts = (0, 0, 0, 1, 1, 2)
    served = [len(Hosts(((0, 1, 2), (3, 4), (5,)), rank).served) for rank in range(len(hosts))]
    assert sum(served) == 2 * len(hosts)
    by_rank = run_ranks(len(hosts), on_hosts, hosts, bytes_of_scattered_rows)
    assert by_rank == [count * 6 * 8 * 4 for count in served]


def scattered_in_16_bits() -> Tensor:
    """On a rank: its row of the sum of 2048, 1, 1 and 0 of four ranks."""
    with cpu_group() as group:
        workspace = ShardWorkspace(group, name="rows", max_rows=4, max_columns=8, dtype=torch.float16)
        x = torch.full((4, 8), (2048.0, 1.0, 1.0, 0.0)[group.rank], dtype=torch.float16)
        return gemm_reduce_scatter(workspace, x, torch.eye(8, dtype=torch.float16))


def test_the_sum_of_a_host_is_rounded_once() -> None:
    """Added up in 16 bits, 2048 + 1 + 1 would be 2048."""
    (*_, row) = run_ranks(4, on_hosts, (0, 0, 0, 1), scattered_in_16_bits)
    assert row.tolist() == [[2050.0] * 8]


def test_large_messages_alone_are_cut_into_halves() -> None:
    rows, row_bytes = 4096, 8192
    assert halves_of(rows - 1, row_bytes, rows * row_bytes) == [slice(0, rows - 1)]
    assert halves_of(rows, row_bytes, rows * row_bytes) == [slice(0, rows // 2), slice(rows // 2, rows)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_sums_are_the_same_bits_on_all_ranks_and_those_of_the_reference(hosts: tuple[int, ...]) -> None:
    fused = run_ranks(4, on_hosts, hosts, sums.results_and_gradients, "auto")
    expected = run_ranks(4, sums.results_and_gradients, None)
    for own, wanted in zip(fused, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(own["out"], fused[0]["out"])


@pytest.mark.parametrize("hosts", HOSTS)
def test_experts_are_the_dense_computation(hosts: tuple[int, ...]) -> None:
    by_rank = run_ranks(4, on_hosts, hosts, experts.run_cases, experts.CASES[4])
    for number, case in enumerate(experts.CASES[4]):
        for rank, wanted in enumerate(experts.expected(case, number)):
            for own in by_rank[rank][number]:
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


def test_steps_of_experts_with_a_straggler_and_passes_in_flight_repeat_to_the_bit() -> None:
    case = experts.CASES[4][0]
    for rank, by_seed in enumerate(run_ranks(4, on_hosts, HOSTS[0], experts.run_steps, case, 40)):
        for seed, own in enumerate(by_seed):
            torch.testing.assert_close(own, experts.expected(case, seed)[rank], rtol=1e-5, atol=1e-5)


def bytes_between_hosts(case: experts.Case) -> list[int]:
    """On a rank: the bytes that each exchange of a forward pass sends to other hosts."""
    with cpu_group() as group, bytes_of_exchanges() as sent_bytes:
        inputs = experts.draw(case, 0)[group.rank]
        expert_layer(experts.make_workspace(group, case), *inputs.arguments())
    return sent_bytes


def test_a_token_crosses_once_to_each_host_that_has_some_of_its_experts_and_one_sum_comes_back() -> None:
    hosts = (0, 0, 1, 1, 2)
    case = experts.Case("five experts each", (7, 5, 6, 3, 4), 15, 5, experts.with_gaps)
    row, experts_and_gates = 4 * case.width, 48  # bytes; ten words and two that fill up
    visits = [[0] * len(hosts) for _ in hosts]  # [a rank][the counterpart to which its tokens go]
    for rank, inputs in enumerate(experts.draw(case, 0)):
        for chosen in inputs.experts.tolist():
            for host in {hosts[expert // 3] for expert in chosen if expert >= 0} - {hosts[rank]}:
                visits[rank][Hosts(((0, 1), (2, 3), (4,)), rank).counterpart(rank, host)] += 1
    by_rank = run_ranks(len(hosts), on_hosts, hosts, bytes_between_hosts, case)
    for rank, (_, tokens, results) in enumerate(by_rank):
        assert tokens == sum(visits[rank]) * (row + experts_and_gates)
        assert results == sum(to[rank] for to in visits) * row


def slots_of_experts(case: experts.Case) -> Tensor:
    """On a rank: how many tokens have each expert, as the layer says."""
    with cpu_group() as group:
        workspace = experts.make_workspace(group, case)
        return expert_layer_with_slots(workspace, *experts.draw(case, 0)[group.rank].arguments())[1]


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_rank_is_told_how_many_tokens_of_all_hosts_have_each_expert(hosts: tuple[int, ...]) -> None:
    case = experts.CASES[4][1]
    chosen = torch.cat([inputs.experts for inputs in experts.draw(case, 0)])
    wanted = torch.bincount(chosen[chosen >= 0], minlength=case.experts)
    for told in run_ranks(4, on_hosts, hosts, slots_of_experts, case):
        assert torch.equal(told, wanted)


def kinds_of_outputs(case: experts.Case) -> tuple[list[object], list[object]]:
    """On a rank: shapes and dtypes of the operator's outputs, and of those that a compiler is told to expect."""
    with cpu_group() as group:
        inputs, workspace = experts.draw(case, 0)[group.rank], experts.make_workspace(group, case)
        arguments = *inputs.arguments(), 1.0, workspace.handle
        found, expected = torch.ops.dlrm_fused.expert_layer(*arguments), _fake_forward(*arguments)
        return [(out.shape, out.dtype) for out in found], [(out.shape, out.dtype) for out in expected]


@pytest.mark.parametrize("case", experts.CASES[4], ids=lambda case: case.name)
def test_a_compiler_expects_the_outputs_of_experts_between_hosts(case: experts.Case) -> None:
    for found, expected in run_ranks(4, on_hosts, HOSTS[2], kinds_of_outputs, case):
        assert found == expected


def told_of_a_wrong_id(case: experts.Case) -> tuple[str, float]:
    """On a rank: the error that it gets when rank 0 has a wrong id, and after how many seconds. All live on until they have."""
    with cpu_group() as group:
        workspace = experts.make_workspace(group, case)
        inputs = experts.draw(case, 0)[group.rank]
        if group.rank == 0:
            inputs.experts[0, 0] = case.experts
        began = time.monotonic()
        with pytest.raises(UsageError if group.rank == 0 else CommunicationError) as raised:
            expert_layer(workspace, *inputs.arguments())
        seconds = time.monotonic() - began
        dist.barrier()
        return str(raised.value), seconds


@pytest.mark.parametrize("hosts", HOSTS)
def test_all_ranks_of_all_hosts_name_a_rank_that_refuses(hosts: tuple[int, ...]) -> None:
    """Some exchange messages with it, some store for it, and some wait for others alone."""
    case = experts.Case(experts.EVEN, (4, 4, 4, 4), 8, 2, experts.evenly)
    (own, _), *others = run_ranks(4, on_hosts, hosts, told_of_a_wrong_id, case)
    assert "experts holds" in own
    for told, seconds in others:
        assert "rank 0 on" in told
        assert "did not take part because of an error" in told
        assert seconds < 10


def told_after_a_missed_call() -> tuple[str, float]:
    """On a rank: the error of a call after one that rank 1 left out and that failed on rank 0, and after how many seconds."""
    with cpu_group() as group:
        workspace = ShardWorkspace(group, name="layers", max_rows=24, max_columns=72, dtype=torch.float32, timeout_seconds=1.0)
        call = partial(gemm_reduce_scatter, workspace, torch.ones(24, 40), torch.ones(72, 40))
        call()
        if group.rank == 0:
            with pytest.raises(CommunicationError, match=r"rank 1 on .* longer than 1 s"):
                call()
        dist.barrier()
        until = time.monotonic() + 10.0
        while group.rank == 1 and group.peer_monitor.failed_peer(workspace.channel._number) is None:  # a thread hears of it
            assert time.monotonic() < until
            time.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(CommunicationError) as raised:
            call()
        return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_call_after_one_that_failed_elsewhere_is_refused_and_gives_no_data_of_that_one(hosts: tuple[int, ...]) -> None:
    (_, *_), (told, seconds) = run_ranks(2, on_hosts, hosts, told_after_a_missed_call)
    assert "a call has failed on rank 0 on" in told
    assert seconds < 0.9
