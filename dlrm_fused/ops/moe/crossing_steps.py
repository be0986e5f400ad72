"""The computation on one rank around the exchanges of :mod:`~dlrm_fused.ops.moe.between_hosts`.

Rows of int32 words travel: those of a token, then its experts and its gates where they go with it, filled up to a multiple of
16 bytes. Rows for one other host follow those for the one before, in the order of ``Hosts.others``, and in that of the tokens.

T is the number of a rank's own tokens, k that of the experts of each, H that of other hosts, d a token's width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, launch_again, next_power_of_2

_WORDS_OF_16_BYTES = 4
# Tokens that a program looks at in a step, and rows and words that it moves.
_TOKENS = 512
_ROWS, _WORDS = 4, 1024


def words(rows: Tensor) -> Tensor:
    """Return rows, whose bytes are a multiple of 4, as int32."""
    return rows.view(torch.int32)


def _words_of_row(width: int, choices: int) -> int:
    return ceil_div(width + choices, _WORDS_OF_16_BYTES) * _WORDS_OF_16_BYTES


class HostCrossing:
    """Between processes on the CPU, in plain torch."""

    def __init__(
        self, host_of_expert: Tensor, own_host: int, others: Sequence[int], served: int, *, names_elsewhere: bool
    ) -> None:
        """
        Args:
            host_of_expert: int64 [experts].
            others: numbers of other hosts, in the order in which their rows lie.
            served: ranks of other hosts that send this rank tokens.
            names_elsewhere: whether :meth:`unpack` says of experts of other hosts which they are.
        """
        self.host_of_expert, self.own_host, self.served = host_of_expert, own_host, served
        self.names_elsewhere = names_elsewhere
        self.hosts = torch.tensor([*others, own_host]).to(host_of_expert)

    def find_places(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Find the tokens that go to each other host.

        Args:
            experts: int64 [T, k], contiguous; ids that are no experts count as none.

        Returns:
            int32 [H, 1 + T], :attr:`~dlrm_fused.ops.moe.between_hosts.Crossings.places`; and int32 [H + 1 + served,
            1 + experts], :attr:`~dlrm_fused.ops.moe.between_hosts.Crossings.counts` and how many tokens have each expert: in
            a row for another host those that are not there, in the row of this host those that are not here. The rows of
            served ranks are zeros, for what these will tell.
        """
        count = len(self.host_of_expert)
        is_expert = (experts >= 0) & (experts < count)
        hosts = self.host_of_expert[experts.where(is_expert, 0)].where(is_expert, -1)
        visits = (hosts == self.hosts[:-1, None, None]).any(2)
        places = torch.cat([visits.sum(1)[:, None], visits.cumsum(1).where(visits, 0) - 1], 1).int()
        numbers = places.new_zeros(len(self.hosts) + self.served, 1 + count)
        numbers[: len(places), 0] = places[:, 0]
        slots = torch.bincount(experts[is_expert], minlength=count)
        numbers[: len(self.hosts), 1:] = slots * (self.host_of_expert != self.hosts[:, None])
        return places, numbers

    def pack(
        self,
        count: int,
        places: Tensor | None,
        rows: Tensor,
        experts: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        """Return int32 [count, W]: the tokens that leave, side by side with their experts and gates if these are given.

        Args:
            count: of rows, as ``places`` says. Those for a host that no token takes are filled with -1: they have no experts.
            places: of :meth:`find_places`; None for all tokens as they are.
            rows: [T, d].
        """
        parts = [words(rows), *(part for part in (experts, gates) if part is not None)]
        parts = [words(part) if part.dtype == torch.float32 else part.int() for part in parts]
        padding = _words_of_row(parts[0].shape[1], sum(part.shape[1] for part in parts[1:])) - sum(p.shape[1] for p in parts)
        packed = torch.nn.functional.pad(torch.cat(parts, 1), (0, padding))
        if places is None:
            return packed
        of_hosts = packed.new_full((count, packed.shape[1]), -1).split(places[:, 0].tolist())
        for of_host, place in zip(of_hosts, places[:, 1:], strict=True):
            of_host[place[place >= 0]] = packed[place >= 0]
        return torch.cat(of_hosts)

    def unpack(
        self, arrived: Tensor, x: Tensor, experts: Tensor, gates: Tensor, most_guests: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return own tokens and guests, [T + guests, d]; their experts, [T + most guests, k]; and their gates, [T + most
        guests, k]. What is beyond the guests has no experts, and gates that mean nothing. Experts of other hosts are -1, or
        where they are named -2 - id.
        """
        width, top_k = words(x).shape[1], experts.shape[1]
        of_rows, of_experts, of_gates, _ = arrived.split([width, top_k, top_k, arrived.shape[1] - width - 2 * top_k], 1)
        rest = most_guests - len(arrived)
        every = torch.cat([experts, of_experts.long(), experts.new_full((rest, top_k), -1)])
        is_expert = (every >= 0) & (every < len(self.host_of_expert))
        is_here = is_expert & (self.host_of_expert[every.where(is_expert, 0)] == self.own_host)
        every_x = torch.cat([x, of_rows.contiguous().view(x.dtype)])
        every_gates = torch.cat([gates, of_gates.view(torch.float32), gates.new_zeros(rest, top_k)])
        not_here = -2 - every if self.names_elsewhere else torch.full_like(every, -1)
        return every_x, every.where(is_here, not_here.where(is_expert, -1)), every_gates

    def add(self, arrived: Tensor, places: Tensor, rows: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Add what came back for own tokens, in fp32 and in the order of the hosts, to the first T of ``rows`` and ``gates``.

        Args:
            arrived: int32 [leaving, W], as :meth:`pack` makes them of rows, and gates if these are given.
            places: of :meth:`find_places`.
            rows: [T + guests, d].
            gates: fp32 [T + guests, k].

        Returns:
            [T, d], rounded once, and fp32 [T, k].
        """
        own, width = places.shape[1] - 1, words(rows).shape[1]
        total = rows[:own].float().clone()
        total_gates = None if gates is None else gates[:own].clone()
        of_hosts = arrived.split(places[:, 0].tolist())
        for place, of_host in zip(places[:, 1:], of_hosts, strict=True):
            part = of_host[place[place >= 0]]
            total[place >= 0] += part[:, :width].contiguous().view(rows.dtype).float()
            if total_gates is not None:
                total_gates[place >= 0] += part[:, width : width + total_gates.shape[1]].view(torch.float32)
        return total.to(rows.dtype), total_gates


class KernelCrossing(HostCrossing):
    """Kernels do so on GPUs, and under Triton's interpreter. Nothing waits for the device."""

    def find_places(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        (tokens, top_k), count, others = experts.shape, len(self.host_of_expert), len(self.hosts) - 1
        places = torch.empty(others, 1 + tokens, dtype=torch.int32, device=experts.device)
        numbers = places.new_zeros(others + 1 + self.served, 1 + count)
        launch_again(
            (kinds_of(experts), top_k, count, others), find_places_kernel, (others + ceil_div(tokens, _TOKENS),),
            experts, self.host_of_expert, self.hosts, places, numbers, tokens, count, others,
            TOP_K=top_k, CHOICES=next_power_of_2(top_k), BINS=next_power_of_2(count + 1), TOKENS=_TOKENS, num_warps=8,
        )  # fmt: skip
        return places, numbers

    def pack(
        self,
        count: int,
        places: Tensor | None,
        rows: Tensor,
        experts: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        count_of_experts = len(self.host_of_expert)
        source, choices = words(rows), [part for part in (experts, gates) if part is not None]
        (tokens, width), top_k = source.shape, choices[0].shape[1] if choices else 1
        shape = count, _words_of_row(width, top_k * len(choices))
        are_all_taken = places is None or count <= len(places) * tokens
        packed = source.new_empty(shape) if are_all_taken else source.new_full(shape, -1)
        if count and tokens:
            launch_again(
                (kinds_of(source, experts, gates, places), width, top_k, count_of_experts), pack_kernel,
                (ceil_div(tokens, _ROWS), 1 if places is None else len(places)),
                source, *(source if part is None else part for part in (experts, gates, places)), packed, tokens,
                count_of_experts, width, packed.shape[1],
                TOP_K=top_k, CHOICES=next_power_of_2(top_k), WITH_EXPERTS=experts is not None, WITH_GATES=gates is not None,
                PLACED=places is not None, ROWS=_ROWS, WORDS=min(_WORDS, next_power_of_2(width)), num_warps=4,
            )  # fmt: skip
        return packed

    def unpack(
        self, arrived: Tensor, x: Tensor, experts: Tensor, gates: Tensor, most_guests: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, top_k), width, guests = experts.shape, words(x).shape[1], len(arrived)
        rows, count = tokens + most_guests, len(self.host_of_expert)
        every_x = x.new_empty(tokens + guests, x.shape[1])
        every_experts, every_gates = experts.new_empty(rows, top_k), gates.new_empty(rows, top_k)
        if rows:
            launch_again(
                (kinds_of(x, experts, gates), width, top_k, count, self.own_host, self.names_elsewhere),
                unpack_kernel, (ceil_div(rows, _ROWS),),
                words(x), experts, gates, arrived, self.host_of_expert, words(every_x), every_experts, every_gates,
                tokens, guests, rows, count, self.own_host, width, arrived.shape[1],
                TOP_K=top_k, CHOICES=next_power_of_2(top_k), NAMES_ELSEWHERE=self.names_elsewhere, ROWS=_ROWS,
                WORDS=min(_WORDS, next_power_of_2(width)), num_warps=4,
            )  # fmt: skip
        return every_x, every_experts, every_gates

    def add(self, arrived: Tensor, places: Tensor, rows: Tensor, gates: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        (hosts, tokens), width = places.shape, rows.shape[1]
        tokens, top_k = tokens - 1, 1 if gates is None else gates.shape[1]
        total, total_gates = rows.new_empty(tokens, width), None if gates is None else gates.new_empty(tokens, top_k)
        if tokens:
            columns = min(_WORDS, next_power_of_2(width))
            launch_again(
                (kinds_of(rows, gates), width, top_k, hosts), add_kernel, (tokens, ceil_div(width, columns)),
                rows, rows if gates is None else gates, arrived.view(rows.dtype), arrived.view(torch.float32), places,
                total, total if total_gates is None else total_gates, tokens, hosts, width, words(rows).shape[1],
                arrived.shape[1],
                TOP_K=top_k, CHOICES=next_power_of_2(top_k), WITH_GATES=gates is not None, DTYPE=TRITON_DTYPES[rows.dtype],
                COLUMNS=columns, num_warps=4,
            )  # fmt: skip
        return total, total_gates


@triton.jit(do_not_specialize=["tokens"])
def find_places_kernel(
    ids, host_of_expert, hosts, places, numbers, tokens, experts, others,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """See :meth:`HostCrossing.find_places`. Each of the first programs finds the places for a host; the others count experts.

    Args:
        hosts: int64 [H + 1]: the other ones, then this one.
        numbers: zeros.
        others: H.
        CHOICES, BINS: powers of two, at least TOP_K and experts + 1.
    """
    lane, choice = tl.arange(0, TOKENS), tl.arange(0, CHOICES)[None, :]
    if tl.program_id(0) < others:
        of_host = places + tl.program_id(0) * (1 + tokens.to(tl.int64))
        host, number = tl.load(hosts + tl.program_id(0)), tl.zeros((), tl.int32)
        for first in range(0, tokens, TOKENS):
            token = first + lane
            there = (token < tokens)[:, None] & (choice < TOP_K)
            id_ = _load_ids(ids + token.to(tl.int64)[:, None] * TOP_K + choice, there, experts)
            visits = tl.max((tl.load(host_of_expert + id_, mask=id_ < experts, other=-1) == host).to(tl.int32), axis=1)
            place = tl.where(visits > 0, number + tl.cumsum(visits, axis=0) - 1, -1)
            tl.store(of_host + 1 + token, place, mask=token < tokens)
            number += tl.sum(visits, axis=0)
        tl.store(of_host, number)
        tl.store(numbers + tl.program_id(0) * (1 + experts.to(tl.int64)), number)
    else:
        token = (tl.program_id(0) - others) * TOKENS + lane
        slot, there = ids + token.to(tl.int64)[:, None] * TOP_K + choice, (token < tokens)[:, None] & (choice < TOP_K)
        id_ = _load_ids(slot, there, experts)
        for back in range(1, TOP_K):
            id_ = tl.where(_load_ids(slot - back, there & (choice >= back), experts) == id_, experts, id_)
        slots, bins = tl.histogram(tl.reshape(id_, (TOKENS * CHOICES,)), BINS), tl.arange(0, BINS)
        host_of_bin = tl.load(host_of_expert + bins, mask=bins < experts, other=0)
        for row in range(others + 1):
            is_told = (bins < experts) & (host_of_bin != tl.load(hosts + row))
            tl.atomic_add(numbers + row * (1 + experts.to(tl.int64)) + 1 + bins, slots, mask=is_told, sem="relaxed")


@triton.jit
def _load_ids(slot, there, experts):
    """Return the experts of slots, int32: ``experts`` for what is none."""
    id_ = tl.load(slot, mask=there, other=-1)
    return tl.where((id_ >= 0) & (id_ < experts), id_, experts).to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def pack_kernel(
    source, ids, gates, places, packed, tokens, experts, width, packed_width,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, WITH_EXPERTS: tl.constexpr, WITH_GATES: tl.constexpr, PLACED: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """See :meth:`HostCrossing.pack`; widths are in words. Program (p, h): some tokens, for the h-th other host."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_sent, row = token < tokens, token
    if PLACED:
        host_places = 1 + tokens.to(tl.int64)
        place = tl.load(places + tl.program_id(1) * host_places + 1 + token, mask=is_sent, other=-1)
        is_sent = place >= 0
        row = place
        for host in range(tl.program_id(1)):
            row += tl.load(places + host * host_places)
    to = packed + row.to(tl.int64) * tl.multiple_of(packed_width, 4)
    _move_words(source + token.to(tl.int64) * tl.multiple_of(width, 4), to, is_sent, width, ROWS, WORDS)
    choice = tl.arange(0, CHOICES)[None, :]
    slot, is_choice = token.to(tl.int64)[:, None] * TOP_K + choice, is_sent[:, None] & (choice < TOP_K)
    to = to[:, None] + width + choice
    if WITH_EXPERTS:
        id_ = tl.load(ids + slot, mask=is_choice, other=-1)
        tl.store(to, tl.where((id_ >= 0) & (id_ < experts), id_, -1).to(tl.int32), mask=is_choice)
        to += TOP_K
    if WITH_GATES:
        gate = tl.load(gates + slot, mask=is_choice, other=0.0)
        tl.store(to.to(tl.pointer_type(tl.float32)), gate, mask=is_choice)


@triton.jit(do_not_specialize=["tokens", "guests", "rows"])
def unpack_kernel(
    x, ids, gates, arrived, host_of_expert, every_x, every_id, every_gate, tokens, guests, rows, experts, own_host, width,
    packed_width,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, NAMES_ELSEWHERE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """See :meth:`HostCrossing.unpack`; widths are in words, and x and every_x words."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_own, is_guest = row < tokens, (row >= tokens) & (row < tokens + guests)
    to = every_x + row.to(tl.int64) * tl.multiple_of(width, 4)
    guest = arrived + (row - tokens).to(tl.int64) * tl.multiple_of(packed_width, 4)
    _move_words(x + row.to(tl.int64) * tl.multiple_of(width, 4), to, is_own, width, ROWS, WORDS)
    _move_words(guest, to, is_guest, width, ROWS, WORDS)
    choice = tl.arange(0, CHOICES)[None, :]
    slot, is_choice = row.to(tl.int64)[:, None] * TOP_K + choice, choice < TOP_K
    is_own, is_guest = is_own[:, None] & is_choice, is_guest[:, None] & is_choice
    of_guest = guest[:, None] + width + choice
    id_ = tl.load(ids + slot, mask=is_own, other=-1)
    id_ = tl.where(is_guest, tl.load(of_guest, mask=is_guest, other=-1).to(tl.int64), id_)
    is_expert = (id_ >= 0) & (id_ < experts)
    is_here = tl.load(host_of_expert + tl.where(is_expert, id_, 0), mask=is_expert, other=-1) == own_host
    gate = tl.load(gates + slot, mask=is_own, other=0.0)
    gate += tl.load((of_guest + TOP_K).to(tl.pointer_type(tl.float32)), mask=is_guest, other=0.0)
    is_stored = (row < rows)[:, None] & is_choice
    if NAMES_ELSEWHERE:
        is_here |= ~is_expert
        id_ = tl.where(is_here, tl.where(is_expert, id_, -1), -2 - id_)
    else:
        id_ = tl.where(is_here, id_, -1)
    tl.store(every_id + slot, id_, mask=is_stored)
    tl.store(every_gate + slot, gate, mask=is_stored)


@triton.jit
def _move_words(source, to, is_moved, width, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Copy ROWS rows of ``width`` words, each from its place and to its place."""
    source, to, width = tl.multiple_of(source, 16), tl.multiple_of(to, 16), tl.multiple_of(width, 4)
    for first in range(0, width, WORDS):
        column = first + tl.arange(0, WORDS)
        inside = is_moved[:, None] & (column < width)[None, :]
        tl.store(to[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def add_kernel(
    rows, gates, arrived, arrived_gates, places, total, total_gates, tokens, hosts, width, width_in_words, packed_width,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, WITH_GATES: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :meth:`HostCrossing.add`. Program (t, p): some columns of a token.

    Args:
        arrived: DTYPE; the same memory as ``arrived_gates``, fp32.
        packed_width: of a row that has arrived, in words.
    """
    token, host_places = tl.program_id(0).to(tl.int64), 1 + tokens.to(tl.int64)
    column, choice = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHOICES)
    width = tl.multiple_of(width, 4)
    element_words: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    inside, is_choice = column < width, choice < TOP_K
    sum_ = tl.load(rows + token * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.zeros((CHOICES,), tl.float32)
    if WITH_GATES:
        gate += tl.load(gates + token * TOP_K + choice, mask=is_choice, other=0.0)
    first = tl.zeros((), tl.int64)
    for host in range(hosts):
        of_host = places + host * host_places
        place = tl.load(of_host + 1 + token)
        row = (first + place) * tl.multiple_of(packed_width, 4)
        has_come = place >= 0
        part = tl.load(arrived + row * element_words + column, mask=inside & has_come, other=0.0)
        sum_ += part.to(tl.float32)
        if WITH_GATES:
            gate += tl.load(arrived_gates + row + width_in_words + choice, mask=is_choice & has_come, other=0.0)
        first += tl.load(of_host)
    tl.store(total + token * width + column, sum_.to(DTYPE), mask=inside)
    if WITH_GATES:
        tl.store(total_gates + token * TOP_K + choice, gate, mask=is_choice & (tl.program_id(1) == 0))
