"""The GEMM kernel by itself, on one GPU: right for every way to divide a product, and the same bits in every launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles, override

pytestmark = pytest.mark.gpu(1)

LAUNCHES = 100
TILES = [
    *(Tiles(128, 128, 64, band=8, warps=4, stages=3, programs=1, splits=splits) for splits in (1, 2, 4, 8)),
    Tiles(128, 256, 64, band=8, warps=8, stages=3, programs=1, splits=4),
    Tiles(64, 128, 64, band=8, warps=4, stages=4, programs=2, splits=2),
    Tiles(64, 128, 128, band=4, warps=4, stages=4, programs=1),
]


@pytest.fixture(autouse=True)
def _no_override() -> Iterator[None]:
    yield
    override(None)


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1024, 1024, 4096), (1000, 520, 1096), (2048, 4096, 1024)])
def test_product(tiles: Tiles, rows: int, columns: int, depth: int) -> None:
    override(tiles)
    generator = torch.Generator("cuda").manual_seed(rows)
    x, weight = (torch.randn(size, depth, device="cuda", generator=generator).bfloat16() for size in (rows, columns))
    expected, arrivals = x.double() @ weight.double().T, Arrivals(x.device)
    first = torch.full((rows, columns), torch.nan, device="cuda", dtype=x.dtype)
    gemm(x, weight, first, arrivals=arrivals)
    torch.testing.assert_close(first.double(), expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())
    for _ in range(LAUNCHES):
        again = torch.full_like(first, torch.nan)
        gemm(x, weight, again, arrivals=arrivals)
        assert torch.equal(again, first)
