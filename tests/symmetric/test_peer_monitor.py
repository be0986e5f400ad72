"""The handshake of the peer monitor, with two of them in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dlrm_fused.errors import CommunicationError
from dlrm_fused.symmetric import PeerMonitor, connections, peer_monitor


class Meeting:
    """``gather`` for watches in threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._values: list[Any] = [None] * ranks

    def gather_of(self, rank: int) -> Callable[[Callable[[], Any]], list[Any]]:
        def gather(work: Callable[[], Any]) -> list[Any]:
            value = work()
            self._barrier.wait()
            self._values[rank] = value
            self._barrier.wait()
            return list(self._values)

        return gather


def watches(before: Callable[[Any], None] = lambda address: None, ranks: int = 2) -> list[PeerMonitor]:
    """Watches of ranks of this host; ``before`` is given the address of each before they connect."""
    meeting = Meeting(ranks)

    def begin(rank: int) -> PeerMonitor:
        gather = meeting.gather_of(rank)

        def observed(work: Callable[[], Any]) -> list[Any]:
            def do() -> Any:
                result = work()
                if result is not None:
                    before(result)
                return result

            return gather(do)

        return PeerMonitor(rank, ranks, observed)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(begin, range(ranks)))


def close(*those: PeerMonitor) -> None:
    for one in those:
        one.close()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_strangers_that_find_the_port_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_STRANGER_SECONDS", 1.0)
    strangers: list[socket.socket] = []

    def intrude(address: Any) -> None:
        for greeting in (b"", b"GET / HTTP/1.1\r\nHost: somebody.example\r\n\r\n"):
            stranger = socket.create_connection(("127.0.0.1", address.port))
            stranger.sendall(greeting)
            strangers.append(stranger)

    first, second = watches(intrude)
    assert first.lost_peer() is None
    second.close()
    until(lambda: first.has_left(1))
    first.close()
    assert len(strangers) == 4
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_has_left_is_not_lost_but_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_monitor, "_GRACE_SECONDS", 0.3)
    first, second = watches()
    gone: list[int] = []
    first.on_gone(gone.append)
    second.close()
    until(lambda: first.has_left(1))
    assert gone == []
    until(lambda: gone == [1])
    assert first.lost_peer() is None
    late: list[int] = []
    first.on_gone(late.append)
    assert late == [1]
    first.close()


def test_a_rank_that_ends_because_of_a_loss_has_told_which_rank_was_the_first() -> None:
    """Also a rank that has not noticed the first loss itself when it notices the second."""
    first, second, third = watches(ranks=3)
    second._closing = True  # it notices nothing any more, as if its process had ended
    second._peers[2].shutdown(socket.SHUT_RDWR)
    until(lambda: third.lost_peer() == 1)
    third._peers[0].shutdown(socket.SHUT_RDWR)
    until(lambda: first.lost_peer() is not None)
    assert first.lost_peer() == 1
    second._closing = False
    close(first, second, third)


def test_a_closed_watch_leaves_no_thread_and_may_be_closed_again() -> None:
    def watching() -> int:
        return sum(thread.name == "dlrm_fused peer monitor" for thread in threading.enumerate())

    before = watching()
    both = watches()
    assert watching() == before + 2
    close(*both, *both)
    assert watching() == before


def test_a_failing_callback_does_not_keep_others_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    first, second = watches()

    def fail(rank: int) -> None:
        raise RuntimeError(f"cannot bear the loss of {rank}")

    told: list[int] = []
    first.on_gone(fail)
    first.on_gone(told.append)
    # As the kernel does for a process that ends: without a goodbye.
    second._peers[0].shutdown(socket.SHUT_RDWR)
    until(lambda: told == [1])
    assert first.lost_peer() == 1
    assert "cannot bear the loss of 1" in caplog.text
    close(first, second)


def test_alone_there_is_nothing_to_watch() -> None:
    alone = PeerMonitor(0, 1, lambda work: [work()])
    assert alone.lost_peer() is None
    assert alone.describe(0).startswith("rank 0 on ")
    alone.close()


def test_ranks_say_how_many_messages_they_have_begun_but_for_one_that_cannot() -> None:
    those = watches(ranks=3)
    for rank, one in enumerate(those):
        one.answer_with(lambda rank=rank: 10 + rank)  # type: ignore[misc]
    assert those[0].ask_begun(10.0) == {1: 11, 2: 12}
    is_stopped = threading.Event()
    those[2].answer_with(lambda: is_stopped.wait(10.0) and 0)
    began = time.monotonic()
    assert those[1].ask_begun(0.5) == {0: 10}
    assert time.monotonic() - began < 5.0
    is_stopped.set()
    close(*those)


@pytest.mark.parametrize("error", ["remote process exited or there was a network error", "unhandled system error"])
def test_after_an_error_of_the_network_the_loss_of_a_silent_host_is_waited_for(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP notices it later than NCCL."""
    monkeypatch.setattr(peer_monitor, "_HEARSAY_SECONDS", 0.0)
    monkeypatch.setattr(PeerMonitor, "has_other_hosts", True)
    first, second = watches()
    late = threading.Timer(0.3, first._lose, [1])
    late.start()
    with pytest.raises(CommunicationError, match=r"rank 1 on .* is lost.*NCCL"), peer_monitor.name_lost_peer():
        raise RuntimeError(f"NCCL error in: ProcessGroupNCCL.cpp: {error}")
    close(first, second)


@pytest.mark.parametrize(("error", "has_other_hosts"), [("unhandled cuda error", True), ("unhandled system error", False)])
def test_nobody_waits_for_a_silent_host_after_another_error_or_where_there_is_one_host(
    error: str, has_other_hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_monitor, "_HEARSAY_SECONDS", 0.0)
    if has_other_hosts:
        monkeypatch.setattr(PeerMonitor, "has_other_hosts", True)
    first, second = watches()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=error), peer_monitor.name_lost_peer():
        raise RuntimeError(f"NCCL error in: ProcessGroupNCCL.cpp: {error}")
    assert time.monotonic() - began < peer_monitor._SILENCE_SECONDS / 2
    close(first, second)
