"""The cross layers of DCNv2, against TorchRec's."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_fused.models.dlrm import cross_layers


@pytest.fixture
def crossnet() -> LowRankCrossNet:
    torch.manual_seed(0)
    crossnet = LowRankCrossNet(in_features=24, num_layers=3, low_rank=8)
    for bias in crossnet.bias:
        torch.nn.init.normal_(bias)
    return crossnet


def test_in_float32_results_and_gradients_have_the_bits_of_torchrecs(crossnet: LowRankCrossNet) -> None:
    x = torch.randn(5, 24, requires_grad=True)
    found, expected = cross_layers(crossnet, x), crossnet(x)
    assert torch.equal(found, expected)
    wanted = [x, *crossnet.parameters()]
    for left, right in zip(torch.autograd.grad(found.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_results_have_the_dtype_of_the_input(crossnet: LowRankCrossNet, dtype: torch.dtype) -> None:
    x = torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cross_layers(crossnet, x.to(dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.float(), crossnet(x), rtol=0.05, atol=0.1)
    assert not torch.equal(found.float(), crossnet(x))
