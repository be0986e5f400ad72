"""The cross layers' kernels, under Triton's interpreter: results and gradients of the reference, but for rounding."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm_fused.models.cross_layers import kernel
from dlrm_fused.models.cross_layers.op import cross_layers
from tests.cross_layers import CrossLayers, check

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.float16, torch.float32)  # of the operator's v, w and bias
# Of tiles: none of the sizes below is a multiple of theirs, and each has several.
ROWS, COLUMNS, DEPTH = 16, 32, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS", "DEPTH"):
        monkeypatch.setattr(kernel, name, globals()[name])


@pytest.mark.parametrize(
    ("layers", "batch", "width", "rank"), [(3, 37, 72, 24), (1, 16, 32, 16), (2, 5, 40, 8)], ids=["edges", "one tile", "thin"]
)
def test_results_and_gradients_are_those_of_the_reference(layers: int, batch: int, width: int, rank: int) -> None:
    check(CrossLayers(layers, batch, width, rank, torch.float16, CPU))  # the interpreter's tl.dot has no bf16


def test_the_operator_is_what_a_compiler_needs() -> None:
    x_0, *weights = CrossLayers(3, 37, 72, 24, torch.float16, CPU).inputs()
    v, w, bias = [
        [weight.detach().to(dtype).requires_grad_() for weight in group] for group, dtype in zip(weights, DTYPES, strict=True)
    ]
    torch.library.opcheck(torch.ops.dlrm_fused.cross_layers.default, (x_0, v, w, bias, True))


def test_the_products_are_counted() -> None:
    counts = []
    for dtype in (torch.float16, torch.float32):  # the operator, the reference
        with FlopCounterMode(display=False) as counter:
            cross_layers(*CrossLayers(3, 37, 72, 24, dtype, CPU).inputs()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_without_gradients_the_result_is_the_same() -> None:
    case = CrossLayers(3, 37, 72, 24, torch.float16, CPU)
    with torch.no_grad():
        found = cross_layers(*case.inputs())
    assert torch.equal(found, cross_layers(*case.inputs()).detach())
