"""Layers in 8 bits on GPUs, where the library multiplies them: the same as on the CPU, eager, compiled and captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlrm_fused.models.dense_part import CompiledForTraining
from dlrm_fused.models.fp8 import Fp8Products, multiply_in_8_bits
from dlrm_fused.ops.common.gpus import FP8_CAPABILITY

pytestmark = pytest.mark.gpu(1)

ROWS, WIDTH = 16_384, 512


def results_and_gradients(device: str, is_compiled: bool = False) -> list[Tensor]:
    """Return the result of two layers and all gradients, float32 on the CPU, after three calls with the same values."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)).to(device)
    products = Fp8Products().to(device)
    multiply_in_8_bits(layers, products)
    x = torch.randn(ROWS, WIDTH).to(device, torch.bfloat16)
    upstream = torch.randn(ROWS, WIDTH).to(device, torch.bfloat16) / ROWS

    def compute(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return layers(x)

    function = CompiledForTraining(compute, is_compiled, lambda: [layers])
    for _ in range(3):
        leaf, weights = x.clone().requires_grad_(), list(layers.parameters())
        result = function(leaf)
        gradients = torch.autograd.grad(result, [leaf, *weights], upstream)
    assert int(products.cut_off) == 0
    return [t.detach().float().cpu() for t in (result, *gradients)]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "captured"])
def test_products_and_gradients_are_those_of_the_cpu(is_compiled: bool) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU does not multiply in 8 bits")
    for found, expected in zip(results_and_gradients("cuda", is_compiled), results_and_gradients("cpu"), strict=True):
        # Sums are rounded to bf16, and what lies between two numbers of 8 bits may then become the other one.
        assert (found - expected).norm() < 0.02 * expected.norm()
