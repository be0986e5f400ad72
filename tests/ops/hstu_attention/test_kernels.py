"""The kernels of HSTU's attention against plain torch in float64, under Triton's interpreter.

tests/gpu/test_hstu_attention_cuda.py has the cases on a GPU, and larger ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.hstu_attention import BUCKETS, RelativeBias, backward, hstu_attention, reference, time_buckets
from dlrm_fused.ops.hstu_attention import op as operator
from dlrm_fused.ops.hstu_attention.bias_gradient import Sums
from dlrm_fused.ops.hstu_attention.kernel import bucket_of
from tests.ops.hstu_attention.batches import Case

pytestmark = pytest.mark.interpreted

NUMBERS = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}
SINGLE, HALF, BRAIN = NUMBERS
# Tiles are of 32 rows in float32, of 64 and 128 in 16 bits.
CASES = {
    "bounds of tiles": Case((0, 1, 31, 32, 33, 64, 65), heads=1),
    "without biases": Case((40, 0, 65), d=20, biases=()),
    "distances": Case((70, 3), biases=("distance",)),
    "times": Case((70, 3), biases=("time",)),
    "values of another width": Case((33, 5), d=16, d_v=40),
    "eight heads": Case((9, 2), heads=8, d=33),
    "fp16": Case((129, 64, 1), heads=1, d=64, dtype=HALF),
    "bf16": Case((0, 127, 65), heads=1, d=128, dtype=BRAIN),
    "candidates": Case((70, 40, 3, 33), heads=1, targets=(5, 40, 0, 1)),
    "candidates in another tile than their history's end": Case((100,), heads=1, targets=(50,)),
    "candidates of 16 bits": Case((200,), heads=1, targets=(20,), dtype=HALF),
    "last queries": Case((70, 3, 0, 33), queries=(40, 1, 0, 33)),
    "candidates alone": Case((70, 3, 0, 33), queries=(1, 1, 0, 1), targets=(1, 1, 0, 1), dtype=HALF),
    "candidates alone, several": Case((70, 33), heads=1, queries=(20, 3), targets=(20, 3)),
    "no samples": Case(()),
    "empty samples": Case((0, 0)),
    "no queries": Case((4, 2), queries=(0, 0)),
}


def check(case: Case) -> None:
    for found, exact in zip(case.run(hstu_attention), case.run(reference, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), exact, **NUMBERS[case.dtype])


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_plain_torch(name: str) -> None:
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("targets", [None, (64, 1, 0, 300)], ids=["", "candidates"])
def test_histories_of_a_few_hundred(targets: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    check(Case((300, 257, 96, 301), heads=3, d=48, dtype=dtype, targets=targets))


@pytest.mark.exhaustive
def test_a_long_history() -> None:
    check(Case((4096, 700), heads=1, d=16, dtype=HALF, targets=(10, 3)))


def test_views_of_one_tensor_are_as_copies() -> None:
    case = Case((40, 7), heads=2, d=20)
    *_, gradient = case.tensors()
    projected = torch.randn(47, 2, 4, 20, generator=torch.Generator().manual_seed(3))

    def run(split: Callable[[Tensor], Any]) -> list[Tensor]:
        rows = projected.clone().requires_grad_()
        queries, keys, values, _ = split(rows)
        # The gradient is a view, too.
        result = hstu_attention(queries, keys, values, case.batch(), **case.numbers(), bias=None)
        of_rows = torch.autograd.grad(result, rows, gradient.transpose(1, 2).contiguous().transpose(1, 2))
        return [result, *of_rows]

    views = run(lambda rows: rows.unbind(2))
    copies = run(lambda rows: [part.contiguous() for part in rows.unbind(2)])
    assert all(map(torch.equal, views, copies))


def test_two_runs_have_the_same_bits() -> None:
    case = Case((40, 0, 33), targets=(3, 0, 1))
    assert all(map(torch.equal, case.run(hstu_attention), case.run(hstu_attention)))


@pytest.mark.parametrize("programs", [1, 5])
def test_programs_add_up_biases_of_several_samples(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "gpu_of", lambda device: replace(gpu_of(device), multiprocessors=programs))
    check(Case((3, 0, 40, 1, 34), heads=2, queries=(1, 0, 37, 1, 34), targets=(0, 0, 5, 1, 34)))


def test_nothing_is_stored_beside_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sample is the longest, and has no candidates: none of its pairs has a distance as large as it has keys."""
    guards, new = [], Sums.new

    def guarded(*given: Any) -> Sums:
        sums = new(*given)
        memory = torch.full((sums.distances.numel() + 64,), -0.0)
        memory[:-64] = 0
        guards.append(memory[-64:])
        distances = memory[:-64].view_as(sums.distances)
        return sums._replace(distances=distances, of_targets=distances[-1])

    monkeypatch.setattr(Sums, "new", guarded)
    check(Case((5, 32), heads=1, targets=(1, 0)))
    (guard,) = guards
    assert guard.signbit().all()


@pytest.mark.parametrize("number", [1, 2], ids=["keys", "values"])
def test_what_no_query_sees_is_in_no_sum_over_queries(number: int) -> None:
    """Queries at places 1 and 2 of ten, of which a later one is NaN."""
    case = Case((10,), heads=1)
    *inputs, gradient = (one.clone() for one in case.tensors())
    inputs[0], gradient = inputs[0][:2], gradient[:2]
    inputs[number][5] = torch.nan
    inputs = [one.requires_grad_() for one in inputs]
    batch = case.batch(query_bounds=torch.tensor([0, 2]), first_places=torch.tensor([1]), most_queries=2)
    result = hstu_attention(*inputs[:3], batch, **case.numbers(), bias=case.bias(inputs[3:]))
    of_keys_values_and_biases = torch.autograd.grad(result, inputs, gradient)[1:]
    assert all(found.isfinite().all() for found in of_keys_values_and_biases)


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("queries_and_biases_gradients", "keys_and_values_gradients"):
        run = getattr(operator, name)
        monkeypatch.setattr(operator, name, lambda *args, run=run, name=name: (called.append(name), run(*args))[1])
    case = Case((5,), heads=1)
    *inputs, gradient = case.tensors()
    of_biases = "queries_and_biases_gradients"
    for number, name in ((0, of_biases), (2, "keys_and_values_gradients"), (3, of_biases), (4, of_biases)):
        for one in inputs:
            one.requires_grad_(False)
        inputs[number].requires_grad_()
        call = {**case.numbers(), "bias": case.bias(inputs[3:])}
        hstu_attention(*inputs[:3], case.batch(), **call).backward(gradient)
        assert called == [name]
        called.clear()
        with torch.inference_mode():
            assert not hstu_attention(*inputs[:3], case.batch(), **call).requires_grad


def test_the_operator_is_as_pytorch_wants_it() -> None:
    """Its schema, what it says of results without computing them, and its node of autograd's graph, also when it is traced."""
    case = Case((5, 2), heads=1, targets=(1, 1))
    *inputs, _ = case.tensors()
    inputs = [one.requires_grad_() for one in inputs]
    batch, bias = case.batch(), case.bias(inputs[3:])
    assert bias is not None
    bounds = batch.key_bounds, batch.query_bounds, batch.first_places, batch.targets_from
    arguments = *inputs[:3], *bias, *bounds, batch.longest, batch.most, 0.25, 50.0
    torch.library.opcheck(torch.ops.dlrm_fused.hstu_attention.default, arguments)


def test_nan_is_passed_on_and_does_not_leave_its_sample() -> None:
    case = Case((5, 4, 6), heads=1)
    *inputs, gradient = case.tensors()
    with torch.no_grad():
        inputs[2][7] = torch.nan  # a value of the second sample's third place
    inputs = [one.requires_grad_() for one in inputs]
    result = hstu_attention(*inputs[:3], case.batch(), **case.numbers(), bias=case.bias(inputs[3:]))
    of_queries, of_keys, of_distances = torch.autograd.grad(result, [inputs[0], inputs[1], inputs[3]], gradient)
    assert result[7:9].isnan().all()
    for one in (result, of_queries, of_keys):
        assert not one[:5].isnan().any()
        assert not one[9:].isnan().any()
    assert of_queries[8].isnan().all()
    assert of_distances.isnan().any()


def test_gradients_of_gradients_are_refused() -> None:
    case = Case((3,), heads=1)
    *inputs, gradient = case.tensors()
    result = hstu_attention(inputs[0].requires_grad_(), *inputs[1:3], case.batch(), **case.numbers())
    (first,) = torch.autograd.grad(result, inputs[0], gradient, create_graph=True)
    with pytest.raises(UsageError, match="no second derivative"):
        first.sum().backward()


def test_bf16_in_autocast_with_biases_of_float32() -> None:
    case = Case((20, 3), heads=1, dtype=BRAIN)

    def in_autocast(*inputs: Any, **numbers: Any) -> Tensor:
        with torch.autocast("cpu", BRAIN):
            return hstu_attention(*inputs, **numbers)

    found = case.run(in_autocast)
    assert [one.dtype for one in found] == [BRAIN] * 4 + [SINGLE] * 2
    assert all(map(torch.equal, found, case.run(hstu_attention)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_biases_of_other_dtypes_have_gradients_in_theirs(dtype: torch.dtype) -> None:
    case = Case((20, 3), heads=1)
    *inputs, gradient = case.tensors()
    tables = [one.to(dtype).requires_grad_() for one in inputs[3:]]
    found = hstu_attention(*inputs[:3], case.batch(), **case.numbers(), bias=case.bias(tables))
    exact = reference(*inputs[:3], case.batch(), **case.numbers(), bias=case.bias(tables))
    torch.testing.assert_close(found, exact, **NUMBERS[SINGLE])
    for one, other in zip(
        torch.autograd.grad(found, tables, gradient), torch.autograd.grad(exact, tables, gradient), strict=True
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, **NUMBERS[BRAIN])


def test_a_table_may_be_longer_than_the_longest_sample_and_a_view() -> None:
    case = Case((7, 3), heads=2, biases=("distance",))
    *inputs, gradient = case.tensors()
    wide = torch.randn(100, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = [
        torch.autograd.grad(function(*inputs[:3], case.batch(), **case.numbers(), bias=RelativeBias(wide.T)), wide, gradient)[0]
        for function in (hstu_attention, reference)
    ]
    torch.testing.assert_close(*found, **NUMBERS[SINGLE])
    assert found[0].shape == (100, 2)
    assert not found[0][7:].any()


@pytest.mark.parametrize("keys", [1, 65, 70])
def test_nothing_is_read_beside_a_table(keys: int) -> None:
    """Numbers beside it would overflow fp16, and the interpreter warns of that, also where nobody reads what comes of it."""
    case = Case((keys,), heads=1, dtype=HALF, biases=("distance",))
    *inputs, gradient = case.tensors()
    wide = torch.full((1, 3 * keys + 600), 1e30)
    wide[:, 300 : 300 + keys] = inputs[3][:, :keys]
    table = wide[:, 300 : 300 + keys].requires_grad_()
    inputs = [one.requires_grad_() for one in inputs[:3]]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="overflow|invalid")
        result = hstu_attention(*inputs, case.batch(), **case.numbers(), bias=RelativeBias(table))
        found = torch.autograd.grad(result, [*inputs, table], gradient)
    assert all(one.isfinite().all() for one in found)


@triton.jit
def bucket_kernel(seconds, result, count: tl.constexpr):
    place = tl.arange(0, count)
    tl.store(result + place, bucket_of(tl.load(seconds + place)))


def test_kernels_have_the_buckets_of_torch() -> None:
    powers = torch.tensor([2**e + k for e in range(31) for k in (-1, 0, 1)])
    halves = torch.tensor([3 * 2**e + k for e in range(29) for k in (-1, 0, 1)])
    seconds = torch.cat([torch.tensor([-(2**31), -1, 0, 2**31 - 1]), powers, halves])
    seconds = torch.nn.functional.pad(seconds, (0, 256 - len(seconds))).int()
    result = torch.empty_like(seconds)
    bucket_kernel[(1,)](seconds, result, count=256)
    assert torch.equal(result, time_buckets(seconds))
    assert result.max() < BUCKETS
