"""Finds out that ranks of two hosts make different calls, which nothing in their memory can say.

A message arrives only where its tag is expected, so who expects another tag would wait for it in vain. Ranks number the slices
that one sends to another. Who has waited for a while tells the sender which slice with which tag it expects, through the peer
monitor; and the sender, when it has sent that slice with another tag or comes to do so, answers that calls differ.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection

from dlrm_fused.symmetric.peer_monitor import PeerMonitor

# A rank is ahead of another by fewer slices of a channel.
_REMEMBERED = 64


class Calls:
    """The calls of one rank, compared with those of ranks on other hosts."""

    def __init__(self, peer_monitor: PeerMonitor) -> None:
        self._peer_monitor = peer_monitor
        self._lock = threading.Lock()
        # By (channel, rank): slices sent there and expected from there, the last ones sent, and the one last asked for.
        self._sent: Counter[tuple[int, int]] = Counter()
        self._expected: Counter[tuple[int, int]] = Counter()
        self._tags: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        self._asked: dict[tuple[int, int], tuple[int, int]] = {}
        peer_monitor.on_expected(self._compare)

    def begin(self, channel: int, tag: int, receivers: Collection[int], senders: Collection[int]) -> dict[int, int]:
        """A slice goes to each receiver and is expected from each sender; returns the numbers of those expected."""
        with self._lock:
            for rank in receivers:
                key = channel, rank
                self._sent[key] += 1
                self._tags.setdefault(key, deque(maxlen=_REMEMBERED)).append((self._sent[key], tag))
                self._answer(key)
            for rank in senders:
                self._expected[channel, rank] += 1
            return {rank: self._expected[channel, rank] for rank in senders}

    def _compare(self, rank: int, channel: int, number: int, tag: int) -> None:
        with self._lock:
            self._asked[channel, rank] = number, tag
            self._answer((channel, rank))

    def _answer(self, key: tuple[int, int]) -> None:
        """Answer the question of a rank, if the slice in question has been sent."""
        if key not in self._asked or self._sent[key] < self._asked[key][0]:
            return
        number, tag = self._asked.pop(key)
        if any(sent == number and tag_sent != tag for sent, tag_sent in self._tags[key]):
            self._peer_monitor.say_differs(key[1], key[0])
