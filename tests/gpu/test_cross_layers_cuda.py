"""The cross layers' kernels on a GPU, with the tiles of training, and as a part of a compiled graph."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.models.cross_layers.op import cross_layers
from tests.cross_layers import CrossLayers, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "width", "rank"), [(1000, 1000, 200), (512, 3456, 512), (3, 16, 8)])
def test_results_and_gradients_are_those_of_the_reference(batch: int, width: int, rank: int, dtype: torch.dtype) -> None:
    check(CrossLayers(3, batch, width, rank, dtype, CUDA))


def test_within_a_compiled_graph_they_have_the_same_bits() -> None:
    case = CrossLayers(3, 1000, 1000, 200, torch.bfloat16, CUDA)
    compiled = torch.compile(cross_layers, fullgraph=True, dynamic=False)
    results = []
    for function in (cross_layers, compiled):
        inputs = case.inputs()
        result = function(*inputs)
        result.float().square().sum().backward()
        results.append([result, *(tensor.grad for tensor in (inputs[0], *inputs[1], *inputs[2], *inputs[3]))])
    for left, right in zip(*results, strict=True):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)
