"""The steps around exchanges between hosts: kernels under Triton's interpreter make what plain torch makes, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.moe.crossing_steps import HostCrossing, KernelCrossing, words

pytestmark = pytest.mark.interpreted

# Experts 0 to 4 are on host 0, 5 to 7 on this host, and so on; rows of another host's tokens come in the order 2, 0, 3.
HOST_OF_EXPERT = torch.tensor([0] * 5 + [1] * 3 + [2] * 6 + [3] * 2)
CROSSINGS = [kind(HOST_OF_EXPERT, 1, [2, 0, 3], 4, names_elsewhere=False) for kind in (HostCrossing, KernelCrossing)]


class Tokens(NamedTuple):
    x: Tensor
    experts: Tensor
    gates: Tensor


def draw(tokens: int, width: int, dtype: torch.dtype, top_k: int = 3) -> Tokens:
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, len(HOST_OF_EXPERT), generator=generator).argsort(1)[:, :top_k].contiguous()
    experts[torch.rand(experts.shape, generator=generator) < 0.3] = -1
    return Tokens(
        torch.randn(tokens, width, generator=generator).to(dtype), experts, torch.rand(tokens, top_k, generator=generator)
    )


@pytest.mark.parametrize("tokens", [0, 1, 700])
def test_a_token_has_a_place_for_each_other_host_of_its_experts(tokens: int) -> None:
    experts = draw(tokens, 8, torch.float32).experts
    slots = [int((experts == expert).sum()) for expert in range(len(HOST_OF_EXPERT))]
    for places, numbers in (crossing.find_places(experts) for crossing in CROSSINGS):
        assert len(numbers) == 3 + 1 + 4
        assert numbers[4:].eq(0).all()
        for host, told in zip((2, 0, 3, 1), numbers, strict=False):
            assert told[1:].tolist() == [0 if HOST_OF_EXPERT[e] == host else slots[e] for e in range(len(slots))]
        assert numbers[3, 0] == 0
        for host, own, told in zip((2, 0, 3), places, numbers, strict=False):
            visitors = [
                t for t, chosen in enumerate(experts.tolist()) if any(e >= 0 and HOST_OF_EXPERT[e] == host for e in chosen)
            ]
            assert own[0] == told[0] == len(visitors)
            assert [t for t in range(tokens) if own[1 + t] >= 0] == visitors
            assert own[1:][visitors].tolist() == list(range(len(visitors)))


def test_ids_that_are_no_experts_and_repeated_ones_count_as_none() -> None:
    wrong = torch.tensor([[16, 0, 2**32], [3, 3, 6 - 2**32], [-1, 9, 9]])
    right = torch.tensor([[-1, 0, -1], [3, -1, -1], [-1, 9, -1]])
    for found, expected in zip(CROSSINGS[1].find_places(wrong), CROSSINGS[0].find_places(right), strict=True):
        assert torch.equal(found, expected)


def test_ids_that_are_no_experts_are_none_elsewhere_too() -> None:
    x, gates, wrong = torch.zeros(1, 8), torch.zeros(1, 3), torch.tensor([[6, 6 - 2**32, 2**32 + 7]])
    kernels = CROSSINGS[1]
    _, experts, _ = kernels.unpack(kernels.pack(1, None, x, wrong, gates), x, wrong, gates, 1)
    assert experts.tolist() == [[6, -1, -1], [6, -1, -1]]


@pytest.mark.parametrize(("width", "dtype", "top_k"), [(8, torch.float32, 3), (2056, torch.float16, 1), (12, torch.float32, 5)])
def test_tokens_go_to_a_host_and_come_back(width: int, dtype: torch.dtype, top_k: int) -> None:
    tokens = draw(41, width, dtype, top_k)
    seen = []
    for crossing in CROSSINGS:
        places, _ = crossing.find_places(tokens.experts)
        leaving = int(places[:, 0].sum())
        packed = crossing.pack(leaving, places, *tokens)
        # As if this rank were sent what it sends: its own host's experts alone are left.
        everything = crossing.unpack(packed, *tokens, 3 * 41)
        rows = everything[0] * 3
        back = crossing.pack(leaving, None, rows[41:], gates=everything[2][41 : len(rows)])
        without_gates = crossing.add(crossing.pack(leaving, places, tokens.x), places, rows)[0]
        x, experts, gates = everything
        seen.append([x, experts, gates[: len(x)], without_gates, *crossing.add(back, places, rows, gates[: len(x)])])
        chosen = torch.cat([tokens.experts, *(tokens.experts[own >= 0] for own in places[:, 1:])])
        assert torch.equal(experts[: len(chosen)], chosen.where((chosen >= 5) & (chosen < 8), -1))
        assert experts[len(chosen) :].eq(-1).all()
    for own, expected in zip(*reversed(seen), strict=True):
        assert own is not None
        assert torch.equal(own, expected)
    total, total_gates = seen[0][-2:]
    visits = (places[:, 1:] >= 0).sum(0)[:, None]
    torch.testing.assert_close(total, (3 * tokens.x.float() * (1 + visits)).to(dtype))
    torch.testing.assert_close(total_gates, tokens.gates * (1 + visits))


def test_all_tokens_cross_and_what_is_left_of_a_message_has_no_experts() -> None:
    most, tokens = 9, draw(7, 8, torch.float32)
    places = torch.tensor([most, *range(7)], dtype=torch.int32).expand(3, -1).contiguous()
    seen = []
    for kind in (HostCrossing, KernelCrossing):
        crossing = kind(HOST_OF_EXPERT, 1, [2, 0, 3], 4, names_elsewhere=True)
        every_x, experts, gates = crossing.unpack(crossing.pack(3 * most, places, *tokens), *tokens, 4 * most)
        is_real = torch.cat([torch.ones(7), *[torch.tensor([1.0] * 7 + [0.0] * 2)] * 3]).bool()
        seen.append([every_x[is_real], gates[: len(is_real)][is_real], experts])
        seen[-1] += [*crossing.add(crossing.pack(3 * most, places, tokens.x, gates=tokens.gates), places, every_x, gates)]
        named = tokens.experts.where((tokens.experts < 0) | (HOST_OF_EXPERT[tokens.experts] == 1), -2 - tokens.experts)
        assert torch.equal(experts[: len(is_real)][is_real], named.repeat(4, 1))
        assert experts[: len(is_real)][~is_real].eq(-1).all()
        assert experts[len(is_real) :].eq(-1).all()
    for own, expected in zip(*reversed(seen), strict=True):
        assert torch.equal(own, expected)
    torch.testing.assert_close(seen[0][-2], 4 * tokens.x)


def test_rows_alone_travel_as_they_are() -> None:
    x = draw(5, 8, torch.float32).x
    for crossing in CROSSINGS:
        assert torch.equal(crossing.pack(5, None, x), words(x))
