"""Blocks of GEMV + AllReduce for shapes that have not been measured."""

from __future__ import annotations

import pytest

from dlrm_fused.ops.common.gpus import H100
from dlrm_fused.ops.gemv_all_reduce.tuning import MIN_COLUMNS, choose_blocks


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("columns", [1, 8, 31, 32, 33, 4096])
@pytest.mark.parametrize("with_norm", [False, True])
def test_every_shape_has_blocks_of_powers_of_two(rows: int, columns: int, with_norm: bool) -> None:
    blocks = choose_blocks(rows, columns, depth=64, world_size=2, element_size=2, gpu=H100, with_norm=with_norm)
    assert blocks.columns >= MIN_COLUMNS
    assert blocks.columns & (blocks.columns - 1) == 0
    assert blocks.depth & (blocks.depth - 1) == 0
    assert blocks.splits >= 1
