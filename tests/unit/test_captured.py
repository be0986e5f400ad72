"""What of captured functions does not need a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dlrm_fused.models.captured import CapturedFunction, _as_other_leaves


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
