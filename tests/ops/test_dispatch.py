"""Operators go around PyTorch's dispatcher only where nobody looks at their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator

RUN = mock.Mock(side_effect=lambda x, factor: x.detach() * factor)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.factor = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.factor, None


@pytest.fixture(scope="module")
def scaled() -> Operator:
    torch.library.define("dlrm_fused_tests::scaled", "(Tensor x, float factor) -> Tensor")
    torch.library.register_fake("dlrm_fused_tests::scaled", lambda x, factor: torch.empty_like(x))
    return Operator("dlrm_fused_tests::scaled", RUN, _differentiate, _save)


@pytest.fixture
def dispatched(scaled: Operator) -> Iterator[mock.Mock]:
    """Notes the calls that go by the dispatcher."""
    with mock.patch.object(scaled, "_operator", side_effect=scaled._operator) as operator:
        yield operator


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("has_gradient", [False, True])
def test_an_ordinary_call_does_not_need_it(scaled: Operator, dispatched: mock.Mock, has_gradient: bool) -> None:
    x = torch.ones(3, requires_grad=has_gradient)
    out = scaled(x, 3.0)
    assert out.tolist() == [3.0] * 3
    assert out.requires_grad == has_gradient
    if has_gradient:
        assert out.grad_fn.name() == "scaledBackward"
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3.0] * 3
    assert not dispatched.called


def test_what_it_has_differentiated_cannot_be_differentiated_again(scaled: Operator) -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(scaled(x, 2.0).sum(), x, create_graph=True)
    assert gradient.tolist() == [2.0] * 3
    with pytest.raises(UsageError, match="no second derivative"):
        (gradient * x).sum().backward()


def test_without_gradients_none_is_recorded(scaled: Operator, dispatched: mock.Mock) -> None:
    with torch.no_grad():
        assert not scaled(torch.ones(3, requires_grad=True), 2.0).requires_grad
    with torch.inference_mode():
        assert scaled(torch.ones(3), 2.0).is_inference()
    assert not dispatched.called


def test_in_forward_mode_it_says_that_it_has_no_tangent(scaled: Operator) -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match="jvp"):
            scaled(x, 2.0)


def test_a_dispatch_mode_sees_the_operator(scaled: Operator) -> None:
    with Seen() as seen:
        scaled(torch.ones(3, requires_grad=True), 2.0)
    assert "dlrm_fused_tests.scaled.default" in seen.names


def test_tensors_without_memory_are_not_computed_with(scaled: Operator) -> None:
    RUN.reset_mock()
    with FakeTensorMode():
        given = torch.ones(3)
    assert scaled(given, 2.0).shape == (3,)
    assert not RUN.called


def test_a_profiler_is_told_the_name(scaled: Operator, dispatched: mock.Mock) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaled(torch.ones(3), 2.0)
    assert "dlrm_fused_tests::scaled" in {event.key for event in profile.key_averages()}
    assert not dispatched.called


def test_compiled_code_has_the_operator(scaled: Operator) -> None:
    x = torch.ones(3, requires_grad=True)
    out = torch.compile(lambda x: scaled(x, 2.0) + 1, backend="aot_eager", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.tolist() == [3.0] * 3
    assert gradient.tolist() == [2.0] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_it_runs_without_autocast_and_leaves_it_as_it_was(
    scaled: Operator, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(x: Tensor, factor: float) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return x @ x if not fails else x.new_empty(-1)

    monkeypatch.setattr(RUN, "side_effect", run)
    with torch.autocast("cpu", torch.bfloat16):
        if fails:
            with pytest.raises(RuntimeError, match="negative dimension"):
                scaled(torch.ones(2, 2), 1.0)
        else:
            assert scaled(torch.ones(2, 2), 1.0).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
