"""Blocks of GEMV + AllReduce for shapes that have not been measured."""

from __future__ import annotations

import pytest

from dlrm_fused.ops.common.gpus import H100
from dlrm_fused.ops.gemv_all_reduce.tuning import MIN_COLUMNS, choose_blocks, choose_blocks_of_sum, fitted, needed_memory


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("columns", [1, 8, 31, 32, 33, 4096])
@pytest.mark.parametrize("with_norm", [False, True])
def test_every_shape_has_blocks_of_powers_of_two(rows: int, columns: int, with_norm: bool) -> None:
    blocks = choose_blocks(rows, columns, depth=64, world_size=2, element_size=2, gpu=H100, with_norm=with_norm)
    assert blocks.columns >= MIN_COLUMNS
    assert blocks.columns & (blocks.columns - 1) == 0
    assert blocks.depth & (blocks.depth - 1) == 0
    assert blocks.splits >= 1


@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("columns", [1, 33, 1024, 5120, 8192, 16384])
@pytest.mark.parametrize("with_norm", [False, True])
def test_a_product_that_is_given_is_added_up_by_most_multiprocessors(rows: int, columns: int, with_norm: bool) -> None:
    blocks = choose_blocks_of_sum(rows, columns, world_size=2, gpu=H100, with_norm=with_norm)
    tiles = -(-columns // blocks.columns)
    assert blocks.is_given
    assert blocks.splits == 1
    assert blocks.columns >= MIN_COLUMNS
    assert tiles <= H100.multiprocessors
    assert tiles > H100.multiprocessors // 2 - 1 or blocks.columns == MIN_COLUMNS
    assert blocks.flagged <= blocks.two_shot


@pytest.mark.parametrize("kib", [100, 164, 228], ids=["sm_86, sm_89, sm_120", "sm_80", "sm_90, sm_100"])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("with_norm", [False, True])
def test_blocks_fit_in_shared_memory(kib: int, element_size: int, rows: int, with_norm: bool) -> None:
    """On an H100 or H200 they are as they were chosen."""
    for columns in (16, 1024, 8192, 16384):
        blocks = choose_blocks(
            rows, columns, depth=4096, world_size=2, element_size=element_size, gpu=H100, with_norm=with_norm
        )
        fit = fitted(blocks, rows, element_size, kib << 10)
        assert needed_memory(fit, rows, element_size) <= (kib - 1) << 10
        assert (fit.columns, fit.splits, fit.two_shot) == (blocks.columns, blocks.splits, blocks.two_shot)
        assert kib < 228 or fit == blocks
