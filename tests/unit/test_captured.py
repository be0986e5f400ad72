"""What of captured functions does not need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlrm_fused.models.captured import _as_other_leaves


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
