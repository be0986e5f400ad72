"""The cells of the embedding benchmark, and the lookups that are drawn for them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks.common import harness
from benchmarks.operators.embedding_lookups import (
    BAGS,
    DIMS,
    DISTRIBUTIONS,
    POOLINGS,
    TABLES,
    Cell,
    LookupDrawer,
    full_cells,
    row_wise_cells,
    small_cells,
    table_rows,
    tuned_cells,
)

_CPU = torch.device("cpu")
_CEILINGS = harness.Ceilings(copy=4000.0, peer_stores=300.0, peer_copies=400.0)


def test_the_full_grid_has_every_pair_of_values_and_48_cells():
    cells = full_cells()
    assert len(set(cells)) == 48
    values = {
        "tables": TABLES,
        "bags": BAGS,
        "pooling": POOLINGS,
        "dim": DIMS,
        "dtype": ("fp32", "fp16"),
        "indices": DISTRIBUTIONS,
    }
    for first, second in itertools.combinations(values, 2):
        pairs = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        assert pairs == set(itertools.product(values[first], values[second]))


def test_row_wise_there_are_at_least_12_cells_with_every_value():
    cells = row_wise_cells(full_cells())
    assert len(set(cells)) >= 12
    assert all(cell.row_wise for cell in cells)
    assert {cell.pooling for cell in cells} == set(POOLINGS)
    assert {cell.dim for cell in cells} == set(DIMS)


def test_tables_of_a_rank_stay_below_60_gigabytes():
    widest = Cell(64, 512, 1, 256, "fp32", "uniform")
    assert widest.rows == int(60e9 / (64 * 256 * 4))
    assert {cell.rows for cell in full_cells() if cell.tables < 64} == {1_000_000}


def _drawn(cell: Cell, rank: int = 0, ranks: int = 2):
    return LookupDrawer(cell, rank, ranks, _CPU, seed=3).draw()


def test_bags_have_the_pooling_factor():
    lookup = _drawn(Cell(3, 40, 8, 16, "fp32", "uniform", largest_rows=100))
    assert lookup.offsets.tolist() == list(range(0, 3 * 40 * 8 + 1, 8))
    assert lookup.indices.shape == (3 * 40 * 8,)
    assert int(lookup.indices.min()) >= 0
    assert int(lookup.indices.max()) < 100


def test_jagged_bags_have_0_to_40_rows():
    lengths = _drawn(Cell(4, 2000, "jagged", 16, "fp32", "uniform", largest_rows=100)).offsets.diff()
    assert (int(lengths.min()), int(lengths.max())) == (0, 40)
    assert lengths.double().mean().item() == pytest.approx(20, rel=0.02)


def test_frequencies_follow_zipf_and_frequent_rows_are_scattered():
    rows = 1000
    lookup = _drawn(Cell(1, 20_000, 10, 16, "fp32", "zipf", largest_rows=rows))
    counts, order = torch.bincount(lookup.indices, minlength=rows).double().sort(descending=True)
    expected = torch.arange(1, rows + 1, dtype=torch.float64).pow(-1.05)
    expected *= lookup.indices.numel() / expected.sum()
    assert torch.allclose(counts[:20], expected[:20], rtol=0.1)
    assert order[:20].sort().values.diff().max().item() > 20


def test_tables_have_different_frequent_rows():
    cell = Cell(2, 20_000, 10, 16, "fp32", "zipf", largest_rows=1000)
    first, second = _drawn(cell).indices.view(2, -1)
    assert int(first.mode().values) != int(second.mode().values)


def test_ranks_and_turns_draw_different_lookups():
    cell = Cell(2, 100, 8, 16, "fp32", "uniform", largest_rows=1000)
    drawer = LookupDrawer(cell, 0, 2, _CPU, seed=3)
    first, second = drawer.draw(), drawer.draw()
    assert not torch.equal(first.indices, second.indices)
    assert not torch.equal(first.indices, _drawn(cell, rank=1).indices)


@pytest.mark.parametrize("indices", DISTRIBUTIONS)
@pytest.mark.parametrize("pooling", [5, "jagged"])
def test_row_wise_every_row_of_a_bag_is_looked_up_by_its_owner(indices, pooling):
    ranks = 4
    whole = Cell(2, 30, pooling, 16, "fp32", indices, row_wise=True, largest_rows=400)
    split = Cell(2, 30, pooling, 16, "fp32", indices, row_wise=True, largest_rows=100)
    expected = LookupDrawer(whole, 0, 1, _CPU, seed=3).draw()
    by_rank = [LookupDrawer(split, rank, ranks, _CPU, seed=3).draw() for rank in range(ranks)]
    for bag in range(2 * 30):
        rows = [
            int(index) + rank * split.rows
            for rank, own in enumerate(by_rank)
            for index in own.indices[own.offsets[bag] : own.offsets[bag + 1]]
        ]
        assert sorted(rows) == sorted(expected.indices[expected.offsets[bag] : expected.offsets[bag + 1]].tolist())


def test_distinct_rows_are_counted_by_table():
    cell = Cell(2, 3, 2, 16, "fp32", "uniform", largest_rows=10)
    lookup = _drawn(cell)
    lookup.indices.copy_(torch.tensor([1, 1, 1, 2, 9, 1, 1, 1, 1, 1, 1, 1]))
    assert table_rows(cell, lookup).tolist() == [1, 2, 9, 11]


def test_bytes_and_floor_of_a_cell():
    cell = Cell(16, 8192, 8, 128, "fp32", "uniform")
    lookups, distinct, pooled = 16 * 8192 * 8, 1_000_000, 4 * 8192 * 16 * 128
    indices = 8 * (lookups + 16 * 8192 + 1)
    assert cell.forward_bytes(lookups, distinct) == distinct * 128 * 4 + indices + pooled
    assert cell.backward_bytes(lookups, distinct) == 2 * distinct * (128 * 4 + 4) + indices + pooled
    assert cell.link_bytes(4) == pooled * 3 / 4
    assert _CEILINGS.transfer_microseconds(4e9, 1.0) == pytest.approx(1e3)
    assert _CEILINGS.transfer_microseconds(1.0, 0.4e9) == pytest.approx(1e3)


def test_relative_error_sees_one_wrong_element_and_nan():
    expected = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    assert harness.relative_error(expected.clone(), expected) == 0.0
    wrong = expected.clone()
    wrong[3, 5] += 1.0
    assert harness.relative_error(wrong, expected) > 0.1
    wrong[3, 5] = math.nan
    assert harness.relative_error(wrong, expected) == math.inf


def test_small_cells_are_full_ones_with_tables_that_fit_twice():
    full = full_cells()
    names = {cell.name for cell in [*full, *row_wise_cells(full[::6])]}
    for cell in small_cells():
        assert cell.name in names
        assert cell.rows * cell.tables * cell.dim * cell.torch_dtype.itemsize <= 20e9
    assert len({cell.name for cell in tuned_cells()}) == 64
