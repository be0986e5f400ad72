"""What of captured functions does not need a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dlrm_fused.cuda_graphs import CapturedCall, Captures, Generation, places
from dlrm_fused.models import captured
from dlrm_fused.models.captured import (
    CapturedFunction,
    _as_other_leaves,
    _Capture,
    _Replay,
    buffers_restored,
    modes,
    modules_of,
    tensors_of,
)
from dlrm_fused.symmetric.call_order import CallOrder


def test_other_leaves_share_the_memory_of_the_parameters_which_come_back() -> None:
    shared = nn.Linear(3, 3)
    shared.bias.requires_grad_(False)
    layers = [nn.Sequential(shared, nn.ReLU(), shared), nn.ParameterList([nn.Parameter(torch.zeros(2))])]
    originals = [p for layer in layers for p in layer.parameters()]

    with pytest.raises(ZeroDivisionError), _as_other_leaves(layers) as leaves:
        inside = [p for layer in layers for p in layer.parameters()]
        assert [id(p) for p in inside] == [id(leaf) for leaf in leaves]
        assert not {id(p) for p in inside} & {id(p) for p in originals}
        assert [p.data_ptr() for p in inside] == [p.data_ptr() for p in originals]
        assert [p.requires_grad for p in inside] == [p.requires_grad for p in originals]
        raise ZeroDivisionError

    assert [id(p) for layer in layers for p in layer.parameters()] == [id(p) for p in originals]


def test_runs_before_a_capture_do_not_count_in_buffers() -> None:
    layers, x = [nn.BatchNorm1d(3), nn.Linear(3, 2)], torch.randn(5, 3)
    layers[0](x)
    before = {name: buffer.clone() for name, buffer in layers[0].named_buffers()}
    places_before = [buffer.data_ptr() for buffer in layers[0].buffers()]
    with buffers_restored(layers):
        layers[0](x + 1)
        assert not torch.equal(layers[0].running_mean, before["running_mean"])
    assert [buffer.data_ptr() for buffer in layers[0].buffers()] == places_before
    assert all(torch.equal(buffer, before[name]) for name, buffer in layers[0].named_buffers())


class Taken:
    """Takes gradients, and remembers them."""

    def __init__(self) -> None:
        self.stored: list[Tensor | None] = []
        self.used: list[list[Tensor | None]] = []

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self.stored = list(gradients)

    def use(self) -> None:
        self.used.append(self.stored)


def test_gradients_of_parameters_come_at_once_to_who_takes_them() -> None:
    layer, unused = nn.Linear(3, 2), nn.Linear(1, 1, bias=False)
    function = CapturedFunction(lambda x: (layer(x).square().sum(), layer(x)), lambda: [unused, layer])
    x = torch.randn(4, 3, requires_grad=True)
    taken = Taken()
    function.takes_gradients = taken

    loss, outputs = function(x)
    (2 * loss).backward()

    expected = torch.autograd.grad(2 * layer(x).square().sum(), [x, *layer.parameters()])
    assert torch.equal(outputs, layer(x))
    assert not outputs.requires_grad
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected[0])
    assert taken.used == [taken.stored]
    assert taken.stored[0] is None
    torch.testing.assert_close(taken.stored[1:], list(expected[1:]))
    assert [p.grad for p in function.parameters()] == [None] * 3


def test_without_a_taker_gradients_are_accumulated() -> None:
    layer = nn.Linear(3, 2)
    function = CapturedFunction(lambda x: layer(x).square().sum(), lambda: [layer])
    x = torch.randn(4, 3)
    for _ in range(2):
        function(x).backward()
    expected = torch.autograd.grad(2 * layer(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(expected))


def test_under_no_grad_it_runs_as_it_is() -> None:
    layer = nn.Linear(3, 2)
    function = CapturedFunction(lambda x: layer(x).square().sum(), lambda: [layer])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not function(torch.ones(4, 3)).requires_grad
    function(torch.ones(4, 3)).backward()
    assert layer.weight.grad is not None


class Net(nn.Module):
    """Modules in modules, one of them twice, with a buffer and a parameter that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Dropout()
        self.inner = nn.Sequential(self.linear, self.norm, nn.Sequential(self.linear, self.dropout))


def test_all_modules_and_their_tensors_are_found() -> None:
    net, other = Net(), nn.Linear(1, 1)
    found = modules_of([net, other])
    assert set(found) == {*net.modules(), *other.modules()}
    tensors = [*net.parameters(), *net.buffers(), *other.parameters()]
    assert {id(t) for t in tensors_of(found)} == {id(t) for t in tensors}


def replace_a_parameter(net: Net) -> None:
    net.linear.weight = nn.Parameter(torch.ones(2, 2))


def replace_a_module(net: Net) -> None:
    net.norm = nn.BatchNorm1d(2)


def move_a_parameter(net: Net) -> None:
    net.norm.weight.data = net.norm.weight.data.clone()


def turn_a_parameter_in_its_memory(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.t()


def replace_a_buffer(net: Net) -> None:
    net.norm.running_mean = torch.zeros(2)


def freeze(net: Net) -> None:
    net.norm.bias.requires_grad_(False)


CHANGES = [replace_a_parameter, replace_a_module, move_a_parameter, turn_a_parameter_in_its_memory, replace_a_buffer, freeze]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_capture_reads_is_known_by_its_place(change: Callable[[Net], None]) -> None:
    net = Net()
    held = tensors_of(modules_of([net]))
    before = places(held)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert places(tensors_of(modules_of([net]))) == before, "other values in the same memory"
    change(net)
    assert places(tensors_of(modules_of([net]))) != before


def test_captures_of_another_generation_are_dropped() -> None:
    net, owner = Net(), object()
    captures: Captures[str] = Captures(2)
    assert not captures.renew(Generation([net.linear.weight], [owner]))
    captures["a"] = "first"
    assert not captures.renew(Generation([net.linear.weight], [owner]))
    assert captures == {"a": "first"}
    assert captures.has_room
    captures["b"] = "second"
    assert not captures.has_room
    assert captures.renew(Generation([net.linear.weight], [object()]))
    assert captures == {}
    replace_a_parameter(net)
    assert captures.generation != Generation([net.linear.weight], [owner])


@contextmanager
def restored(get: Callable[[], object], set_: Callable[[object], None], value: object) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def test_modes_under_which_it_does_otherwise_are_told_apart() -> None:
    net = Net()
    seen = [modes(modules_of([net]), "cpu")]
    assert modes(modules_of([net]), "cpu") == seen[0]
    net.dropout.eval()
    seen.append(modes(modules_of([net]), "cpu"))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            seen.append(modes(modules_of([net]), "cpu"))
    switches = [
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ]
    for get, set_, value in switches:
        with restored(get, set_, value):  # type: ignore[arg-type]
            seen.append(modes(modules_of([net]), "cpu"))
    assert len(set(map(str, seen))) == len(seen)


def captured_product(weight: nn.Parameter, takes_gradients: Taken | None) -> _Capture:
    """A capture of x -> (x * weight).sum(), whose graphs are functions that write to the same memory at each replay."""
    x, result, upstream = torch.zeros(3, requires_grad=True), torch.zeros(()), torch.zeros(())
    gradients = torch.zeros(3), torch.zeros(3)

    def run_backward() -> None:
        for gradient, factor in zip(gradients, (weight, x), strict=True):
            gradient.copy_(upstream * factor.detach())

    capture: Any = _Capture.__new__(_Capture)
    capture.parameters, capture.takes_gradients = [weight], takes_gradients
    capture._memory, capture._needs_gradient = SimpleNamespace(call=0, order=CallOrder(torch.device("cpu"))), [True]
    graphs: Any = CapturedCall.__new__(CapturedCall)
    graphs.copies, graphs._is_copied, graphs._targets = [x.detach()], [True], [x.detach()]
    graphs._results, graphs._upstream, graphs.gradients = [result], upstream, gradients
    graphs._forward = SimpleNamespace(replay=lambda: result.copy_((x * weight).sum().detach()))
    graphs._backward = SimpleNamespace(replay=run_backward)
    capture._graphs = graphs
    return capture  # type: ignore[no-any-return]


@pytest.mark.parametrize("takes_gradients", [None, Taken()], ids=["all to autograd", "of inputs to autograd"])
@pytest.mark.parametrize("has_hook", [False, True], ids=["", "with a hook as of DDP"])
def test_replays_do_not_write_to_gradients_that_autograd_has(takes_gradients: Taken | None, has_hook: bool) -> None:
    weight, x = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), torch.ones(3, requires_grad=True)
    capture = captured_product(weight, takes_gradients)
    leaves = [x] if takes_gradients else [x, weight]
    for leaf in leaves if has_hook else []:
        leaf.expand_as(leaf).grad_fn.next_functions[0][0].register_hook(lambda *_: None)  # type: ignore[union-attr]
    expected = [torch.zeros(3) for _ in leaves]
    for scale in (1.0, 10.0, 100.0):
        with torch.no_grad():
            x.fill_(scale)
        (scale * _Replay.apply(capture, x, weight)[0]).backward()
        for total, own in zip(expected, (scale * weight.detach(), scale * x.detach()), strict=False):
            total += own
        torch.testing.assert_close([leaf.grad for leaf in leaves], expected)


def test_gradients_that_are_asked_for_keep_their_values() -> None:
    weight, x = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), torch.ones(3, requires_grad=True)
    capture = captured_product(weight, None)
    found = [torch.autograd.grad(scale * _Replay.apply(capture, x, weight)[0], [x, weight]) for scale in (1.0, 10.0)]
    for scale, (of_x, of_weight) in zip((1.0, 10.0), found, strict=True):
        torch.testing.assert_close(of_x, scale * weight.detach())
        torch.testing.assert_close(of_weight, scale * x.detach())


def test_where_one_more_capture_finds_no_memory_those_before_give_theirs_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the caller still has the loss of an earlier call, whose backward pass then is too late."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    first = captured_product(weight, None)
    graphs = weakref.ref(first._graphs)
    made = mock.Mock(side_effect=[first, torch.OutOfMemoryError("of 141 GB none is left")])
    monkeypatch.setattr(captured, "_Capture", made)
    monkeypatch.setattr(captured, "_SharedMemory", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer = nn.Module()
    layer.weight = weight
    function = CapturedFunction(lambda x: (x[..., :3] * weight).sum(), lambda: [layer], most_shapes=4)

    def inputs(rows: int) -> Tensor:
        return torch.full((rows, 3), 2.0, requires_grad=True) if rows else torch.full((3,), 2.0, requires_grad=True)

    before = function(inputs(0))
    for rows, expected in ((2, 24.0), (0, 12.0), (2, 24.0)):
        x = inputs(rows)
        loss = function(x)
        assert loss.item() == expected
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, weight.detach().expand_as(x))
    assert made.call_count == 2
    assert graphs() is None
    with pytest.raises(RuntimeError, match="called again before the backward pass"):
        before.backward()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "dlrm_fused"]
    assert "too little memory to capture it: of 141 GB none is left" in warning
