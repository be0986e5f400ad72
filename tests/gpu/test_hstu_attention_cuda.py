"""HSTU's attention on a GPU against plain torch in float64: the cases of the interpreter's tests, and larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlrm_fused.ops.hstu_attention import hstu_attention, reference
from tests.ops.hstu_attention.batches import Case
from tests.ops.hstu_attention.test_kernels import BRAIN, CASES, HALF, NUMBERS, SINGLE

pytestmark = pytest.mark.gpu(1)


def check(case: Case) -> None:
    """Compare the result and all gradients. Sums of many terms are off by their largest ones' rounding."""
    case = replace(case, device="cuda")
    rtol, atol = NUMBERS[case.dtype].values()
    for found, exact in zip(case.run(hstu_attention), case.run(reference, torch.float64), strict=True):
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol * max(1.0, largest))


@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_interpreter(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("targets", [None, (0, 1, 64, 200)], ids=["", "candidates"])
def test_eight_heads(d: int, dtype: torch.dtype, targets: tuple[int, ...] | None) -> None:
    check(Case((0, 1, 700, 257), heads=8, d=d, dtype=dtype, targets=targets))


@pytest.mark.parametrize(("dtype", "d"), [(SINGLE, 16), (SINGLE, 64), (HALF, 64), (BRAIN, 64), (BRAIN, 128)], ids=str)
@pytest.mark.parametrize("biases", [(), ("distance", "time")], ids=["", "biases"])
def test_histories_of_4096(dtype: torch.dtype, d: int, biases: tuple[str, ...]) -> None:
    check(Case((4096, 0, 4095), heads=2, d=d, dtype=dtype, biases=biases))


def test_a_graph_replays_it() -> None:
    """With other numbers and other lengths than were captured, up to the longest."""
    captured, replayed = (Case(lengths, heads=4, d=64, dtype=BRAIN, seed=seed, device="cuda") for lengths, seed in (
        ((300, 100, 200), 1), ((10, 290, 300), 2),
    ))  # fmt: skip
    expected = replayed.run(hstu_attention)
    *inputs, gradient = (one.clone() for one in captured.tensors())
    inputs = [one.requires_grad_() for one in inputs]
    batch, bias = captured.batch(), captured.bias(inputs[3:])
    assert bias is not None
    assert bias.times is not None

    def call() -> list[torch.Tensor]:
        result = hstu_attention(*inputs[:3], batch, **captured.numbers(), bias=bias)
        return [result, *torch.autograd.grad(result, inputs, gradient)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    of_batch = [(one, other) for one, other in zip(batch, replayed.batch(), strict=True) if isinstance(one, torch.Tensor)]
    with torch.no_grad():
        for target, source in [*zip([*inputs, gradient], replayed.tensors(), strict=True), *of_batch]:
            target.copy_(source)
        bias.times.copy_(replayed.times())
    graph.replay()
    assert all(map(torch.equal, results, expected))
