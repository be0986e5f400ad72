"""HSTU's attention in plain torch: its formula pair by pair, its gradients by finite differences, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.hstu_attention import (
    BUCKETS,
    JaggedQueries,
    RelativeBias,
    hstu_attention,
    reference,
    time_buckets,
)
from tests.ops.hstu_attention.batches import Case, bounds_of, bucket, pair_by_pair

LENGTHS = (3, 0, 7, 1, 5, 12)  # in more groups than one
CASES = {
    "all": Case(LENGTHS, biases=()),
    "distances": Case(LENGTHS, biases=("distance",)),
    "times": Case(LENGTHS, biases=("time",)),
    "candidates": Case(LENGTHS, targets=(1, 0, 4, 1, 0, 12)),
    "last queries": Case(LENGTHS, queries=(1, 0, 3, 1, 5, 2), d_v=5),
    "a candidate each": Case(LENGTHS, queries=(1, 0, 1, 1, 1, 1), targets=(1, 0, 1, 1, 1, 1)),
    "no samples": Case(()),
    "empty samples": Case((0, 0)),
    "a single sample": Case((9,), targets=(3,), heads=1),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_formula_pair_by_pair(name: str) -> None:
    case = CASES[name]
    *inputs, _ = case.tensors(torch.float64)
    call: dict[str, Any] = {**case.numbers(), "bias": case.bias(inputs[3:])}
    result = reference(*inputs[:3], case.batch(), **call)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, pair_by_pair(*inputs[:3], case.batch(), **call), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 0, 5, 1), d=3, d_v=2, targets=(1, 0, 2, 1)),
        Case((3, 0, 2, 4, 1, 2), d=2, queries=(1, 0, 2, 3, 1, 1)),
    ],
    ids=["candidates", "last queries, in groups"],
)
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    *inputs, _ = case.tensors(torch.float64)

    def attention(*inputs: Tensor) -> Tensor:
        return reference(*inputs[:3], case.batch(), **case.numbers(), bias=case.bias(inputs[3:]))

    assert torch.autograd.gradcheck(attention, [one.requires_grad_() for one in inputs])


def test_what_a_place_gets_does_not_depend_on_what_follows() -> None:
    long, short = Case((9,)), Case((6,))
    *inputs, _ = long.tensors(torch.float64)
    bias, numbers = long.bias(inputs[3:]), long.numbers()
    assert bias is not None
    assert bias.times is not None
    whole = reference(*inputs[:3], long.batch(), **numbers, bias=bias)
    begin = reference(*(x[:6] for x in inputs[:3]), short.batch(), **numbers, bias=bias._replace(times=bias.times[:6]))
    torch.testing.assert_close(whole[:6], begin, rtol=1e-12, atol=1e-12)


def test_buckets_of_times_are_two_an_octave() -> None:
    seconds = torch.tensor([-5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 3600, 86_400, 2**24 - 1, 2**30, 2**31 - 1])
    found = time_buckets(seconds)
    # A float32 has 24 bits: the last number of an octave above is rounded up to the next one.
    assert found.tolist()[:-1] == [bucket(one) for one in seconds.tolist()[:-1]]
    assert found[-1] == 62
    assert int(time_buckets(torch.tensor(2**62))) == BUCKETS - 1
    assert torch.equal(time_buckets(seconds.int()), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_those_of_float32(dtype: torch.dtype) -> None:
    case = Case(LENGTHS, dtype=dtype)
    for found, exact in zip(case.run(hstu_attention), case.run(reference, torch.float64), strict=True):
        assert found.dtype in (dtype, torch.float32)
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-3)


def test_autocast_changes_nothing() -> None:
    def in_autocast(*inputs: Any, **numbers: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return hstu_attention(*inputs, **numbers)

    case = Case(LENGTHS)
    assert all(map(torch.equal, case.run(in_autocast), case.run(hstu_attention)))


def test_gradients_of_gradients_are_there_without_kernels() -> None:
    case = Case((3, 2), d=2, d_v=2)
    *inputs, gradient = case.tensors()
    result = hstu_attention(inputs[0].requires_grad_(), *inputs[1:3], case.batch(), **case.numbers(), bias=None)
    (first,) = torch.autograd.grad(result, inputs[0], gradient, create_graph=True)
    first.square().sum().backward()
    assert inputs[0].grad is not None


def test_a_compiler_sees_all_of_it() -> None:
    case = Case(LENGTHS, targets=(1, 0, 4, 1, 0, 12))
    compiled = torch.compile(hstu_attention, fullgraph=True, backend="eager")
    for found, wanted in zip(case.run(compiled), case.run(hstu_attention), strict=True):
        torch.testing.assert_close(found, wanted)


ROWS = torch.zeros(5, 2, 16)
BATCH = JaggedQueries.among_all(bounds_of((2, 3)), 3)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"queries": ROWS[0]}, "queries has shape [2, 16]; needed is [rows, heads, columns]"),
    "dtype": (
        {"values": ROWS.double()},
        "values has dtype torch.float64; allowed: torch.float32, torch.bfloat16, torch.float16",
    ),
    "dtypes": (
        {"keys": ROWS.half()},
        "keys: torch.float16 on cpu; needed are dtype and device of queries, torch.float32 on cpu",
    ),
    "heads": ({"keys": ROWS[:, :1]}, "keys has shape [5, 1, 16]; needed are heads and columns of queries, [5, 2, 16]"),
    "rows": ({"values": ROWS[:4]}, "values has shape [4, 2, 16]; needed are rows and heads of keys, [5, 2, 16]"),
    "bounds": (
        {"batch": BATCH._replace(key_bounds=torch.zeros(4).long())},
        "batch.key_bounds has shape [4]; needed is [3], with 2 samples by first_places",
    ),
    "dtype of bounds": (
        {"batch": BATCH._replace(query_bounds=torch.zeros(3))},
        "batch.query_bounds: torch.float32 on cpu; needed is int32 or int64 on cpu",
    ),
    "longest": (
        {"batch": BATCH._replace(longest=-1)},
        "batch.longest=-1, most_queries=None; needed are numbers of rows",
    ),
    "divisor": ({"divisor": 0.0}, "divisor=0.0; it must be above 0, for example the longest sample's keys"),
    "distances": (
        {"bias": RelativeBias(torch.zeros(2, 2))},
        "bias.by_distance has shape [2, 2]; needed is [heads, P], here 2 heads, and P at least the longest sample, 3",
    ),
    "dtype of a bias": (
        {"bias": RelativeBias(torch.zeros(2, 9).long())},
        "bias.by_distance: torch.int64 on cpu; needed is a floating dtype on cpu",
    ),
    "buckets": (
        {"bias": RelativeBias(None, torch.zeros(2, 63), torch.zeros(5).long())},
        "bias.by_time has shape [2, 63]; needed is [heads, BUCKETS], here [2, 64]",
    ),
    "no times": (
        {"bias": RelativeBias(None, torch.zeros(2, BUCKETS))},
        "bias.by_time is given without bias.times; give both, or neither",
    ),
    "times alone": (
        {"bias": RelativeBias(None, None, torch.zeros(5).long())},
        "bias.times is given without bias.by_time; give both, or neither",
    ),
    "times of other rows": (
        {"bias": RelativeBias(None, torch.zeros(2, BUCKETS), torch.zeros(4).long())},
        "bias.times: torch.int64 [4] on cpu; needed are seconds of each row of keys, torch.int64 [5] on cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_name_the_argument_and_what_is_needed(name: str) -> None:
    changes, message = WRONG[name]
    inputs = {"queries": ROWS, "keys": ROWS, "values": ROWS, "batch": BATCH, "scale": 1.0, "divisor": 3.0, **changes}
    with pytest.raises(UsageError, match="^" + re.escape(f"hstu_attention: {message}") + "$"):
        hstu_attention(**inputs)
