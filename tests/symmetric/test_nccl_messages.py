"""Messages of NCCL end when a rank takes no part in them: NCCL and the device are stand-ins, the watching threads are real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.symmetric import messages
from dlrm_fused.symmetric.messages import LateRankError, NcclLink, Why

TIMEOUT_SECONDS = 0.3
Counts = dict[int, Callable[[], int]]


class Monitor:
    """Of a rank; it hears of nothing but what a test tells, and what the monitors in ``counts`` answer."""

    def __init__(self, rank: int, counts: Counts) -> None:
        self.refused: int | None = None
        self.lost: int | None = None
        self.rank, self.counts = rank, counts

    def answer_with(self, count_begun: Callable[[], int]) -> None:
        self.counts[self.rank] = count_begun

    def ask_begun(self, _: float) -> dict[int, int]:
        return {rank: count() for rank, count in self.counts.items() if rank != self.rank}

    def on_gone(self, callback: Any) -> None:
        self.gone = callback

    def any_refused(self) -> int | None:
        return self.refused

    def hear_of_loss(self, _: Exception) -> int | None:
        return self.lost


class Nccl:
    """A communicator whose messages arrive when the test says so."""

    def __init__(self) -> None:
        self.are_pairs_connected = self.are_sums_connected = False
        self.begun: list[tuple[list[Tensor], list[Tensor]]] = []  # what is received, and what is sent
        self.is_aborted = threading.Event()
        self.is_done = threading.Event()

    def allreduce(self, *_: object) -> Any:
        self.are_sums_connected = True
        return SimpleNamespace(wait=lambda: None)

    def alltoall(self, received: list[Tensor], sent: list[Tensor], options: Any = None) -> Any:
        if options is None:
            self.are_pairs_connected = True
            return SimpleNamespace(wait=lambda: None)
        self.begun.append((received, sent))
        return SimpleNamespace(wait=lambda: None) if options.asyncOp else None

    def abort(self) -> None:
        self.is_aborted.set()

    def query(self) -> bool:
        """Return whether what was launched has ended: as an event of the device."""
        return self.is_done.is_set() or self.is_aborted.is_set()


@dataclass
class Event:
    """Of the device."""

    query: Callable[[], bool]
    records: int = 0

    def record(self, _: object) -> None:
        self.records += 1


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclLink]]:
    """Those of three ranks."""
    store = dist.HashStore()
    monkeypatch.setattr(messages, "default_store", lambda: store)
    monkeypatch.setattr(messages, "nccl_backend", lambda *_: Nccl())
    monkeypatch.setattr(messages, "current_stream", lambda _: None)
    monkeypatch.setattr(messages, "sleep_on_device", lambda _: None)
    for name, seconds in (("_LOOK_SECONDS", 0.005), ("_REFUSAL_SECONDS", 0.1)):
        monkeypatch.setattr(messages, name, seconds)
    cpu, counts = torch.device("cpu"), Counts()
    made = [NcclLink(_group(rank), cpu, Monitor(rank, counts), "messages") for rank in range(3)]  # type: ignore[arg-type]
    yield made
    for link in made:
        link.close()
        link._thread.join(5.0)
        assert not link._thread.is_alive()


def _group(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: 3)


def begin(link: NcclLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin an exchange that ends when the stand-in of NCCL says so."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(link._nccl.query))
    link.watch(time.monotonic() + TIMEOUT_SECONDS)


def failure_of(link: NcclLink) -> LateRankError:
    assert link._nccl.is_aborted.wait(10.0)
    until = time.monotonic() + 10.0
    while link.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    assert link.failure is not None
    return link.failure


def test_all_ranks_are_connected_before_the_first_exchange(links: list[NcclLink]) -> None:
    """Nothing looks after a host that waits in its first call for a rank to connect."""
    assert all(link._nccl.are_pairs_connected and link._nccl.are_sums_connected for link in links)


def test_an_exchange_is_one_launch_for_all_ranks(links: list[NcclLink]) -> None:
    mine, theirs = torch.ones(3), torch.zeros(5, dtype=torch.int32)
    links[0].exchange({2: mine}, {1: theirs}, tag=0)
    ((received, sent),) = links[0]._nccl.begun
    assert [slice_.numel() for slice_ in received] == [0, 5, 0]
    assert [slice_.numel() for slice_ in sent] == [0, 0, 3]
    assert received[1] is theirs
    assert sent[2] is mine


def test_a_message_has_a_head_start_on_what_runs_beside_it(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(messages, "sleep_on_device", sleeps.append)
    values = torch.ones(3)
    links[0].exchange({2: values}, {}, tag=0)
    links[0].all_reduce(values)
    assert len(sleeps) == 2
    links[0].exchange({2: values}, {}, tag=0, beside=False)
    links[0].all_reduce(values, beside=False)
    assert len(sleeps) == 2


def test_what_is_not_beside_the_current_stream_has_nothing_to_wait_for_and_is_watched(links: list[NcclLink]) -> None:
    link, watched = links[0], []
    link.watch_begun = watched.append  # type: ignore[method-assign]
    values = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for begun in (link.exchange({2: values}, {}, tag=0, beside=False), link.all_reduce(values, beside=False)):
            begun.finish(7.0)
            begun.finish(8.0)
    assert watched == [7.0, 7.0]
    del link.watch_begun


def test_a_rank_with_nothing_to_exchange_takes_part_and_is_watched(
    links: list[NcclLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's All-to-All waits for what is empty, too."""
    link, watched = links[0], []
    monkeypatch.setattr(link, "watch_begun", watched.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert list(link.exchange({}, {}, tag=0).arrivals(7.0)) == []
    ((received, sent),) = link._nccl.begun
    assert [slice_.numel() for slice_ in (*received, *sent)] == [0] * 6
    assert watched == [7.0]


def test_all_that_wait_name_the_rank_that_does_not(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    begin(links[0], monkeypatch)
    time.sleep(0.1)  # ranks do not begin together
    begin(links[2], monkeypatch)
    assert [(failure.rank, failure.why) for failure in map(failure_of, (links[0], links[2]))] == [(1, Why.is_late)] * 2
    assert links[1].failure is None


def test_ranks_that_all_wait_name_the_next_one(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    for link in links:
        begin(link, monkeypatch)
    assert [failure_of(link).rank for link in links] == [1, 2, 0]


def test_a_rank_that_has_refused_is_named_before_the_limit(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.symmetric.test_nccl_messages.TIMEOUT_SECONDS", 60.0)
    links[0]._monitor.refused = 2  # type: ignore[attr-defined]
    begin(links[0], monkeypatch)
    failure = failure_of(links[0])
    assert (failure.rank, failure.why) == (2, Why.has_refused)


def test_what_arrives_in_time_is_no_failure(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        begin(links[0], monkeypatch)
    links[0]._nccl.is_done.set()
    time.sleep(2 * TIMEOUT_SECONDS)
    assert links[0].failure is None
    assert not links[0]._nccl.is_aborted.is_set()


def test_an_event_serves_later_exchanges(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """To let go of one is a call to the driver, in which the thread that looks after messages could be stuck."""
    event = Event(lambda: True)
    made = iter([event])
    monkeypatch.setattr(torch.cuda, "Event", lambda: next(made))
    for number in range(1, 4):
        links[0].watch(time.monotonic() + TIMEOUT_SECONDS)
        until = time.monotonic() + 10.0
        while not links[0]._events:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert event.records == number


def test_a_rank_that_is_gone_is_named_by_who_waits_and_by_nobody_else(
    links: list[NcclLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(links[0], monkeypatch)
    time.sleep(0.05)
    for link in links[:2]:
        link._monitor.gone(2)  # type: ignore[attr-defined]
    failure = failure_of(links[0])
    assert (failure.rank, failure.why) == (2, Why.is_gone)
    assert links[1]._nccl.is_aborted.wait(10.0)
    assert links[1].failure is None


def test_an_abort_that_the_driver_holds_back_does_not_keep_the_monitor(links: list[NcclLink]) -> None:
    """It tells waiting kernels next, and for them the driver waits."""
    kernels_have_ended = threading.Event()
    links[0]._nccl.abort = lambda: kernels_have_ended.wait(10.0)
    began = time.monotonic()
    links[0]._monitor.gone(1)  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5.0
    kernels_have_ended.set()


def test_errors_of_nccl_say_which_rank_is_gone(links: list[NcclLink]) -> None:
    with pytest.raises(LateRankError) as raised, links[0].call():
        links[0]._gone = LateRankError(1, Why.is_gone)
        raise RuntimeError("NCCL communicator was aborted")
    assert (raised.value.rank, raised.value.why) == (1, Why.is_gone)


def test_a_loss_that_nccl_notices_before_the_monitor_is_named(links: list[NcclLink]) -> None:
    links[0]._monitor.lost = 2  # type: ignore[attr-defined]
    with pytest.raises(LateRankError) as raised, links[0].call():
        raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")
    assert (raised.value.rank, raised.value.why) == (2, Why.is_gone)


def test_why_messages_were_aborted_is_told_at_once(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is lost then, and the monitor would be asked in vain."""
    monkeypatch.setattr(links[0]._monitor, "hear_of_loss", lambda _: pytest.fail("asked"))
    with pytest.raises(LateRankError) as raised, links[0].names_failure():
        links[0].failure = LateRankError(1, Why.is_late)
        raise RuntimeError("NCCL communicator was aborted")
    assert (raised.value.rank, raised.value.why) == (1, Why.is_late)


def test_no_call_is_made_by_who_waited_for_an_abort(links: list[NcclLink]) -> None:
    calls = []

    def call() -> None:
        with pytest.raises(LateRankError), links[0].call():
            calls.append(0)

    with links[0]._calls:
        waiting = threading.Thread(target=call)
        waiting.start()
        time.sleep(0.1)
        links[0]._gone = LateRankError(1, Why.is_gone)
    waiting.join(10.0)
    assert not waiting.is_alive()
    assert calls == []


def test_no_call_is_made_after_an_abort(links: list[NcclLink]) -> None:
    links[0]._monitor.gone(1)  # type: ignore[attr-defined]
    with pytest.raises(LateRankError) as raised:
        links[0].exchange({}, {}, tag=0)
    assert (raised.value.rank, raised.value.why) == (1, Why.is_gone)
    assert links[0]._nccl.begun == []


def test_an_abort_waits_for_a_call_that_returns(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees what the call uses."""
    monkeypatch.setattr(messages, "_CALL_SECONDS", 60.0)
    with links[0].call():
        links[0]._monitor.gone(1)  # type: ignore[attr-defined]
        assert not links[0]._nccl.is_aborted.wait(0.2)
    assert links[0]._nccl.is_aborted.wait(10.0)


def test_an_abort_frees_a_call_that_does_not_return(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_CALL_SECONDS", 0.1)
    with links[0].call():
        links[0]._monitor.gone(1)  # type: ignore[attr-defined]
        assert links[0]._nccl.is_aborted.wait(10.0)


def test_a_rank_that_has_done_its_part_is_not_named(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    for link in links[1:]:
        begin(link, monkeypatch)
    links[2]._nccl.is_done.set()
    failure = failure_of(links[1])
    assert (failure.rank, failure.why) == (0, Why.is_late)


def test_of_ranks_that_all_wait_the_one_with_the_fewest_exchanges_is_named(
    links: list[NcclLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in links[:2]:
        link.exchange({}, {}, tag=0)
    for link in links:
        begin(link, monkeypatch)
    assert [failure_of(link).rank for link in links[:2]] == [2, 2]


def test_a_rank_that_does_not_say_what_it_has_begun_is_named(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose process is stopped."""
    for link in links:
        begin(link, monkeypatch)
    links[0]._monitor.counts.pop(2)  # type: ignore[attr-defined]
    assert [failure_of(link).rank for link in links[:2]] == [2, 2]


def test_an_error_of_the_device_ends_all_messages(links: list[NcclLink], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(links[0]._nccl, "query", fail)
    begin(links[0], monkeypatch)
    assert links[0]._nccl.is_aborted.wait(10.0)


def test_other_errors_of_nccl_stay(links: list[NcclLink]) -> None:
    with pytest.raises(RuntimeError, match="unhandled cuda error"), links[0].call():
        raise RuntimeError("unhandled cuda error")
