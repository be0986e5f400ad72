"""The exchange of sparse features between the ranks of a group, and the memory it takes place in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.common.workspace import Workspace, fingerprint_of
from dlrm_fused.ops.feature_all_to_all.messages import FeatureMessages
from dlrm_fused.symmetric import SymmetricGroup, SymmetricMemory, abort_peers_on_error
from dlrm_fused.symmetric.device import begin, finish, peer_pointer, round_up, uses_kernels, wait_until_all_ready
from dlrm_fused.symmetric.launches import ceil_div, next_power_of_2

_DTYPES = (torch.int32, torch.int64)
# Few programs: they wait for other ranks, and what they would wait for needs multiprocessors, too.
_SEND_PROGRAMS = 64
_FETCH_PROGRAMS_OF_A_RUN = 8
_BAGS, _ELEMENTS = 1024, 2048
_BAG_UNIT = 64  # lengths of a feature and rank begin at multiples of it, so that stores are wide
# Memory for so many times the values of the largest batch so far, so that it seldom grows.
_ROOM = 1.25
_WORD = 8  # bytes
_ROUTE_FIELDS = 4
_FIELDS = tl.constexpr(_ROUTE_FIELDS)


class ReceivedFeatures(NamedTuple):
    """The features of this rank's tables, of all ranks' batches.

    Attributes:
        lengths: [features, sum of the ranks' bags] of the dtype sent: of all ranks' bags, those of rank 0 first.
        values: [n] of the dtype sent: by feature, and then in the order of ``lengths``.
        counts: values of each feature; on the host, as ``bags``.
        bags: of each rank.
    """

    lengths: Tensor
    values: Tensor
    counts: list[int]
    bags: list[int]


class FeatureExchange(Workspace):
    """Brings each feature of a batch to the ranks that have its tables. Making one is collective.

    Args:
        group: the ranks that take part.
        features_of_ranks: for each rank, which features of a batch it gets, in the order that it wants; one may go to several.
        dtypes: of lengths and of values: int32 or int64.
        name: for messages; equal on all ranks, and not used by another workspace of the group.
        timeout_seconds: how long a rank waits for another.

    Raises:
        UsageError: on all ranks, if an argument is wrong or differs, or kernels do not run on the group's device.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        features_of_ranks: Sequence[Sequence[int]],
        *,
        name: str,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int64),
        timeout_seconds: float = 600.0,
    ) -> None:
        self.features_of_ranks = [list(features) for features in features_of_ranks]

        def check() -> dict[str, object]:
            if not uses_kernels(group.device):
                raise UsageError(f"{name}: on {group.device}: its kernels need a GPU or TRITON_INTERPRET=1")
            if len(features_of_ranks) != group.world_size:
                raise UsageError(f"{name}: features of {len(features_of_ranks)} ranks, and there are {group.world_size}")
            if any(dtype not in _DTYPES for dtype in dtypes):
                raise UsageError(f"{name}: dtypes={dtypes}; allowed: int32, int64")
            return {"features_of_ranks": self.features_of_ranks, "dtypes": dtypes}

        super().__init__(group, name, check, timeout_seconds=timeout_seconds)
        self.lengths_dtype, self.values_dtype = dtypes
        self._own_features = len(self.features_of_ranks[self.rank])
        self._most_features = max(map(len, self.features_of_ranks))
        self._last_feature = max((max(features) for features in self.features_of_ranks if features), default=-1)
        self._words = 2 * (self._most_features + 1) * self.world_size
        # One batch at a time uses these, as it does the memory.
        self._words_on_host = self._on_host(self._words)
        self._messages: FeatureMessages | None = None
        self._memory: SymmetricMemory | None = None
        self._allocate(_BAG_UNIT, 1)
        self._pending: SentFeatures | None = None

    def send(self, lengths: Tensor, offsets: Tensor, values: Tensor) -> SentFeatures:
        """Send the features of this rank's batch. Collective; does not wait for the device.

        Args:
            lengths: [features, bags].
            offsets: of the dtype of ``lengths``, [features * bags + 1], where bags begin in ``values``.
            values: [n]; alive and unchanged until they are received.

        Raises:
            UsageError: for other dtypes or shapes.
            CommunicationError: if an earlier call has failed since.
        """
        self.raise_fault()
        if self._pending is not None:
            self._pending.receive()  # its memory is needed
        with abort_peers_on_error(self.channel):
            self._check(lengths, offsets, values)
        self._pending = SentFeatures(self, lengths, offsets, values)
        return self._pending

    def _check(self, lengths: Tensor, offsets: Tensor, values: Tensor) -> None:
        expected = {"lengths": (self.lengths_dtype, 2), "offsets": (self.lengths_dtype, 1), "values": (self.values_dtype, 1)}
        for (key, (dtype, dims)), tensor in zip(expected.items(), (lengths, offsets, values), strict=True):
            if tensor.dtype != dtype or tensor.device != self.device or tensor.dim() != dims or not tensor.is_contiguous():
                raise UsageError(
                    f"{self.name}: {key} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; needed: {dtype}, {dims}-D, "
                    f"contiguous, on {self.device}"
                )
        if offsets.numel() != lengths.numel() + 1:
            raise UsageError(f"{self.name}: {offsets.numel()} offsets for {lengths.numel()} lengths; needed: one more")
        if len(lengths) <= self._last_feature:
            raise UsageError(f"{self.name}: lengths of {len(lengths)} features; feature {self._last_feature} has an owner")

    @lasting
    def _allocate(self, bags: int, values: int) -> None:
        """Memory for batches of so many bags and values of a rank. Collective."""
        self._release_memory()
        self._most_bags, self._most_values = round_up(bags, _BAG_UNIT), values
        self._memory = self.group.allocate(self.name, self._words_end)
        # Views cost the host as much as launches do.
        self._received_words = self._view(self._word_begin(0, 0), torch.int64, self._words)
        self._received_lengths = self._view(
            self._lengths_begin, self.lengths_dtype, self._own_features, self.world_size, self._most_bags
        )
        self._addresses = self._memory.addresses
        if self.group.hosts.are_many:
            dtypes = self.lengths_dtype, self.values_dtype
            self._messages = FeatureMessages(self.channel, self.features_of_ranks, dtypes, self._most_bags)
            sent = torch.tensor([self._messages.sent.data_ptr()], device=self.device)
            self._addresses = torch.cat([self._addresses, sent])
            self._sent_words_on_host = self._on_host(*self._messages.sent_words.shape)
        places = [self._places_at(peer) for peer in range(self.world_size)]
        routes = [
            [memory, feature, *words]
            for features, (memory, _, places_of_slots) in zip(self.features_of_ranks, places, strict=True)
            for feature, words in zip(features, places_of_slots, strict=True)
        ]
        self._routes = torch.tensor(routes, dtype=torch.int64).view(-1, _ROUTE_FIELDS).to(self.device)
        self._told = torch.tensor([[memory, told_at] for memory, told_at, _ in places], dtype=torch.int64).to(self.device)

    def _on_host(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")

    def _places_at(self, peer: int) -> tuple[int, int, list[tuple[int, int]]]:
        """Return where this rank tells a peer of its batch: the number of a memory of ``_addresses``, the byte there of two
        words of the whole batch, and by slot those of lengths and of two words."""
        slots = range(len(self.features_of_ranks[peer]))
        if self._messages is not None and peer in self._messages.ranks:
            message = self._messages
            places = [(message.lengths_begin(peer, slot), message.words_begin(peer, slot)) for slot in slots]
            return self.world_size, message.words_begin(peer, self._most_features), places
        lengths = [self._lengths_begin + self._length_bytes(slot, self.rank) for slot in slots]
        places = list(zip(lengths, (self._word_begin(slot, self.rank) for slot in slots), strict=True))
        return peer, self._word_begin(self._most_features, self.rank), places

    def _event(self) -> torch.cuda.Event | None:
        """Return an event after all that the current stream has been given; None on the CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _release_memory(self) -> None:
        if self._memory is not None:
            self.group.release(self._memory)
            self._memory = None

    # A rank's memory: its values; lengths [features, ranks, bags]; words [features, ranks, 2], and [ranks, 2].

    @property
    def _lengths_begin(self) -> int:
        return round_up(self._most_values * self.values_dtype.itemsize, 256)

    def _length_bytes(self, slot: int, rank: int) -> int:
        return (slot * self.world_size + rank) * self._most_bags * self.lengths_dtype.itemsize

    def _word_begin(self, slot: int, rank: int) -> int:
        begin = self._lengths_begin + self._length_bytes(self._most_features, 0)
        return begin + (slot * self.world_size + rank) * 2 * _WORD

    @property
    def _words_end(self) -> int:
        return self._word_begin(self._most_features + 1, 0)

    def _view(self, begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        assert self._memory is not None
        return self._memory.local[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class SentFeatures:
    """The features of a batch that are on their way."""

    def __init__(self, exchange: FeatureExchange, lengths: Tensor, offsets: Tensor, values: Tensor) -> None:
        self._exchange = exchange
        self._sent = lengths, offsets, values
        self._received: ReceivedFeatures | None = None
        self._fetched: torch.cuda.Event | None = None
        self._send()

    def _send(self) -> None:
        exchange, (lengths, offsets, values) = self._exchange, self._sent
        exchange.begin_call()
        bags = lengths.shape[1]
        blocks = max(1, ceil_div(bags, _BAGS))
        items = len(exchange._routes) * blocks + ceil_div(values.numel(), _ELEMENTS)
        send_kernel[(max(1, min(items, _SEND_PROGRAMS)),)](
            lengths, offsets, values, exchange._routes, len(exchange._routes), bags, blocks, values.numel(),
            exchange._most_bags, exchange._most_values, exchange._told, exchange._addresses, exchange.channel.args,
            fingerprint_of(exchange._most_bags, exchange._most_values),
            BAGS=_BAGS, ELEMENTS=_ELEMENTS, num_warps=8,
        )  # fmt: skip
        if exchange._messages is not None:
            exchange._messages.exchange_lengths(exchange._received_words.view(-1, exchange.world_size, 2))
            exchange._sent_words_on_host.copy_(exchange._messages.sent_words, non_blocking=True)
        exchange._words_on_host.copy_(exchange._received_words, non_blocking=True)
        self._told = exchange._event()

    def receive(self) -> ReceivedFeatures:
        """Return the features of this rank's tables. Collective; waits until all ranks have sent, and no longer.

        Raises:
            CommunicationError: if a peer is lost, or was waited for too long.
        """
        if self._received is None:
            exchange, (values, bags) = self._exchange, self._needed()
            while values > exchange._most_values or bags > exchange._most_bags:  # all ranks know the same
                exchange.channel.assemble()
                exchange._allocate(max(bags, exchange._most_bags), max(int(_ROOM * values), exchange._most_values))
                self._send()
                values, bags = self._needed()
            exchange.begin_call()
            self._received = self._fetch()
            self._fetched, exchange._pending = exchange._event(), None
        if self._fetched is not None:
            torch.cuda.current_stream(self._exchange.device).wait_event(self._fetched)
        return self._received

    def _needed(self) -> tuple[int, int]:
        """Wait for the words of all ranks. How many values has the rank that has most, and how many bags?"""
        if self._told is not None:
            self._told.synchronize()
        self._exchange.raise_fault()
        words = self._exchange._words_on_host.tolist()
        pairs = list(zip(words[::2], words[1::2], strict=True))
        self._of_runs, of_ranks = pairs[: -self._exchange.world_size], pairs[-self._exchange.world_size :]
        self._bags = [bags for _, bags in of_ranks]
        return max(values for values, _ in of_ranks), max(self._bags)

    def _fetch(self) -> ReceivedFeatures:
        exchange, messages, bags = self._exchange, self._exchange._messages, self._bags
        world = exchange.world_size
        runs = exchange._own_features * world
        of_runs = [values for values, _ in self._of_runs[:runs]]
        counts = [sum(of_runs[run : run + world]) for run in range(0, runs, world)]
        sent = exchange._received_lengths
        lengths = [sent[:, rank, : bags[rank]] for rank in range(world)]
        values = torch.empty(sum(counts), dtype=exchange.values_dtype, device=exchange.device)
        from_hosts = values
        if messages is not None:
            for rank in messages.ranks:
                lengths[rank] = messages.lengths(rank, bags[rank])
            words = [
                of_rank[: len(exchange.features_of_ranks[rank])]
                for rank, of_rank in zip(messages.ranks, exchange._sent_words_on_host.tolist(), strict=True)
            ]
            from_hosts = messages.exchange_values(self._sent[-1], words, [sum(of_runs[rank::world]) for rank in messages.ranks])
        if len(values):
            fetch_kernel[(runs, _FETCH_PROGRAMS_OF_A_RUN)](
                exchange._received_words, runs, exchange._addresses, from_hosts, values,
                WORLD=world, RUNS=next_power_of_2(runs), HOSTS=messages is not None, ELEMENTS=_ELEMENTS, num_warps=8,
            )  # fmt: skip
        return ReceivedFeatures(torch.cat(lengths, dim=1), values, counts, bags)


@triton.jit
def _copy(source, destination, count, number, programs, ELEMENTS: tl.constexpr):
    """Copy this program's blocks of ``count`` elements: of as many ``programs``, it has the number ``number``."""
    for begin_at in range(number.to(tl.int64) * ELEMENTS, count, programs.to(tl.int64) * ELEMENTS):
        place = begin_at + tl.arange(0, ELEMENTS)
        inside = place < count
        tl.store(destination + place, tl.load(source + place, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["routes_count", "bags", "blocks", "count", "most_bags", "most_values", "fingerprint"])
def send_kernel(
    lengths, offsets, values, routes, routes_count, bags, blocks, count, most_bags, most_values, told, addresses, channel,
    fingerprint,
    BAGS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Tell the tables' owners the lengths of this rank's bags, and leave its values where they can fetch them. One epoch.

    Args:
        lengths: int32 or int64 [features * bags].
        offsets: int32 or int64 [features * bags + 1], where bags begin in ``values``.
        routes: int64 [routes_count, 4]: a memory, a feature, and at which bytes there the lengths of this rank's bags of it
            belong, and its two words: their values' count, and where these begin. The memory is the owner's or the messages'.
        blocks: of BAGS bags in ``bags``.
        count: of values.
        most_bags, most_values: for which there is memory. If there are more, nothing is sent but how many there are.
        told: int64 [ranks, 2]: a memory, and the byte of two words there: how many values this rank has, and how many bags.
        addresses: of the ranks' memory, which begins with their values, and that of messages to other hosts.
    """
    epoch = begin(channel, 0, fingerprint)
    are_ready = wait_until_all_ready(channel, epoch, fingerprint)
    if (tl.program_id(0) == 0) & are_ready:
        for peer in range(channel.world):
            words = peer_pointer(addresses, tl.load(told + 2 * peer), tl.load(told + 2 * peer + 1), tl.int64)
            tl.store(words, count.to(tl.int64))
            tl.store(words + 1, bags.to(tl.int64))
    has_room = are_ready & (bags <= most_bags) & (count <= most_values)
    for item in range(tl.program_id(0), routes_count * blocks, tl.num_programs(0)):
        fields = routes + item // blocks * _FIELDS
        peer, feature = tl.load(fields), tl.load(fields + 1)
        bag = item % blocks * BAGS + tl.arange(0, BAGS)
        inside = (bag < bags) & has_room
        there = peer_pointer(addresses, peer, tl.load(fields + 2), lengths.dtype.element_ty)
        tl.store(there + bag, tl.load(lengths + feature * bags + bag, mask=inside, other=0), mask=inside)
        if (item % blocks == 0) & has_room:
            first = tl.load(offsets + feature * bags).to(tl.int64)
            words = peer_pointer(addresses, peer, tl.load(fields + 3), tl.int64)
            tl.store(words, tl.load(offsets + (feature + 1) * bags) - first)
            tl.store(words + 1, first)
    if has_room:
        own = peer_pointer(addresses, channel.rank, 0, values.dtype.element_ty)
        _copy(values, own, count, tl.program_id(0), tl.num_programs(0), ELEMENTS)
    finish(channel, epoch)


@triton.jit(do_not_specialize=["runs"])
def fetch_kernel(
    words, runs, addresses, from_hosts, values, WORLD: tl.constexpr, RUNS: tl.constexpr, HOSTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Bring the values of all ranks here, by feature and then by rank. Program (r, p) has every P-th block of run r.

    Args:
        words: int64 [runs, 2] of the runs, by feature and rank: how many values, and where they begin at the rank.
        addresses: of the ranks' memory, which begins with their values; 0 for a rank of another host.
        from_hosts: values that have come from ranks of other hosts, those of the first rank first, by feature.
        RUNS: a power of two, at least ``runs``.
        HOSTS: whether there are several.
    """
    run = tl.program_id(0)
    rank = run % WORLD
    others = tl.arange(0, RUNS)
    counts = tl.load(words + 2 * others, mask=others < runs, other=0)
    before = tl.sum(tl.where(others < run, counts, 0), axis=0)
    count, first = tl.load(words + 2 * run), tl.load(words + 2 * run + 1)
    memory = tl.load(addresses + rank)
    if HOSTS:  # noqa: SIM102 - known at compile time
        if memory == 0:
            ranks = others % WORLD
            is_message = tl.load(addresses + ranks) == 0
            is_before = is_message & ((ranks < rank) | ((ranks == rank) & (others < run)))
            # An address, since Triton's compiler for AMD's GPUs takes no choice between two pointers.
            memory, first = from_hosts.to(tl.int64), tl.sum(tl.where(is_before, counts, 0), axis=0)
    source = memory.to(tl.pointer_type(values.dtype.element_ty)) + first
    _copy(source, values + before, count, tl.program_id(1), tl.num_programs(1), ELEMENTS)
