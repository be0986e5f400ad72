"""Features that go to ranks of other hosts: their lengths and counts in one message, and their values in a second one.

A message of lengths has the same size on both sides, whatever the batch: nobody needs to know more before it is sent. It begins
with words, int64 [slots + 1, 2]: how many values the receiver gets of each feature, and where they begin at the sender; the
last two are how many values and bags the sender's batch has. After them come lengths [slots, most bags] of the dtype sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import round_up

_WORD = 8  # bytes
_ALIGNMENT = 16


class FeatureMessages:
    """The messages between one rank and those of other hosts, for batches up to some number of bags.

    Attributes:
        ranks: of other hosts, ascending.
        sent: uint8, the messages of lengths to ``ranks``, one after the other.
        received_words: int64 [ranks, slots + 1, 2], received.
        sent_words: the same, as sent.
    """

    def __init__(
        self, channel: Channel, features_of_ranks: Sequence[Sequence[int]], dtypes: tuple[torch.dtype, torch.dtype], bags: int
    ) -> None:
        """Args:
        features_of_ranks: as :class:`~dlrm_fused.ops.feature_all_to_all.FeatureExchange` takes them; ``dtypes`` too.
        bags: the most of any rank.
        """
        self._channel, self.ranks = channel, sorted(channel.group.hosts.remote)
        self._slots, self._bags = max(map(len, features_of_ranks)), bags
        self._lengths_dtype, self._values_dtype = dtypes
        self._features = [len(features) for features in features_of_ranks]
        self._words_size = 2 * (self._slots + 1) * _WORD
        self._distance = round_up(self._words_size + self._lengths_size(self._slots), _ALIGNMENT)
        device, size = channel.group.device, len(self.ranks) * self._distance
        self.sent = torch.zeros(size, dtype=torch.uint8, device=device)
        self._received = torch.zeros(size, dtype=torch.uint8, device=device)
        self.sent_words, self.received_words = self._words(self.sent), self._words(self._received)
        self._places = torch.tensor(self.ranks, device=device)

    def words_begin(self, rank: int, slot: int) -> int:
        """Return the byte of ``sent`` where the two words of a feature for a rank begin."""
        return self.ranks.index(rank) * self._distance + slot * 2 * _WORD

    def lengths_begin(self, rank: int, slot: int) -> int:
        """Return the byte of ``sent`` where the lengths of a feature for a rank begin."""
        return self.ranks.index(rank) * self._distance + self._words_size + self._lengths_size(slot)

    def exchange_lengths(self, words: Tensor) -> None:
        """Send what is in ``sent``, and receive. Collective; on GPUs the current stream waits, not the host.

        Args:
            words: int64 [slots + 1, ranks of all hosts, 2], of which those of other hosts are set.
        """
        own = self._features[self._channel.group.rank]
        sent = {rank: self._message(self.sent, rank, self._features[rank]) for rank in self.ranks}
        received = {rank: self._message(self._received, rank, own) for rank in self.ranks}
        self._channel.exchange(sent, received, fingerprint=fingerprint_of("lengths", self._bags), beside=False).complete()
        words.index_copy_(1, self._places, self.received_words.transpose(0, 1))

    def lengths(self, rank: int, bags: int) -> Tensor:
        """Return the lengths [features of this rank, bags] that a rank has sent."""
        own = self._features[self._channel.group.rank]
        begin = self.ranks.index(rank) * self._distance + self._words_size
        lengths = self._received[begin : begin + self._lengths_size(own)].view(self._lengths_dtype)
        return lengths.view(own, self._bags)[:, :bags]

    def exchange_values(self, values: Tensor, sent_words: Sequence[Sequence[Sequence[int]]], counts: Sequence[int]) -> Tensor:
        """Send each rank the values of its features, and receive. Collective; on GPUs the current stream waits, not the host.

        Args:
            values: of this rank's batch.
            sent_words: for each of ``ranks``, how many values its features have, and where these begin.
            counts: for each of ``ranks``, how many values it sends.

        Returns:
            [sum of counts], those of the first rank first, by feature.
        """
        received = torch.empty(sum(counts), dtype=self._values_dtype, device=values.device)
        parts = dict(zip(self.ranks, received.split(list(counts)), strict=True))
        sent = {rank: _gathered(values, words) for rank, words in zip(self.ranks, sent_words, strict=True)}
        self._channel.exchange(sent, parts, fingerprint=fingerprint_of("values"), beside=False).complete()
        return received

    def _lengths_size(self, slots: int) -> int:
        return slots * self._bags * self._lengths_dtype.itemsize

    def _words(self, messages: Tensor) -> Tensor:
        words = messages.view(len(self.ranks), self._distance)[:, : self._words_size].view(torch.int64)
        return words.view(len(self.ranks), self._slots + 1, 2)

    def _message(self, messages: Tensor, rank: int, slots: int) -> Tensor:
        begin = self.ranks.index(rank) * self._distance
        return messages[begin : begin + self._words_size + self._lengths_size(slots)]


def _gathered(values: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Return the runs of ``values``, each a count and a begin, one after the other: neighbours need no copy."""
    ends: list[list[int]] = []
    for count, begin in runs:
        if ends and ends[-1][1] == begin:
            ends[-1][1] += count
        elif count:
            ends.append([begin, begin + count])
    parts = [values[begin:end] for begin, end in ends]
    return parts[0] if len(parts) == 1 else torch.cat([values[:0], *parts])
