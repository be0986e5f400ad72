"""The order of an epoch: a permutation that any position of is reached directly."""

import numpy as np
import pytest
import torch

from dlrm_fused.datasets.order import SampleOrder, permute

SHAPES = [
    (1, 10),
    (2, 1),
    (97, 97),
    (1000, 1000),
    (1000, 2000),
    (1000, 64),
    (1001, 200),
    (1000, 7),
    (65, 64),
    (10_007, 640),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 4096, 10_007])
def test_permute_reaches_every_number_once(size: int) -> None:
    assert sorted(permute(np.arange(size), size, key=5)) == list(range(size))


@pytest.mark.parametrize(("samples", "window_rows"), SHAPES)
def test_an_epoch_holds_every_row_once(samples: int, window_rows: int) -> None:
    rows = SampleOrder(samples, window_rows, seed=3).rows(2, 0, samples)
    assert torch.equal(rows.sort().values, torch.arange(samples))


@pytest.mark.parametrize(("samples", "window_rows"), SHAPES)
def test_any_slice_is_reached_without_what_comes_before(samples: int, window_rows: int) -> None:
    order = SampleOrder(samples, window_rows, seed=3)
    epoch = order.rows(1, 0, samples)
    for start, stop in [
        (0, 0),
        (0, samples),
        (samples // 3, samples // 2),
        (samples // 2, samples),
        (samples - 1, samples),
    ]:
        assert torch.equal(order.rows(1, start, stop), epoch[start:stop])


@pytest.mark.parametrize("window_rows", [1000, 200])
def test_epochs_and_seeds_differ_and_are_reproducible(window_rows: int) -> None:
    orders = [SampleOrder(1000, window_rows, seed).rows(epoch, 0, 1000) for seed in (1, 2) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).float().mean() < 0.05
    assert torch.equal(orders[0], SampleOrder(1000, window_rows, 1).rows(0, 0, 1000))


def test_a_window_of_zero_keeps_the_order_of_the_files() -> None:
    assert torch.equal(SampleOrder(100, 0, seed=1).rows(4, 10, 20), torch.arange(10, 20))


def test_a_window_bounds_how_much_of_the_file_is_read_at_a_time() -> None:
    """While a window lasts, only its 64 blocks of contiguous rows are touched."""
    window, block = 640, 10
    rows = SampleOrder(100_000, window, seed=1).rows(0, 3 * window, 4 * window)
    # The split is turned by a number of rows that need not be a whole number of blocks: runs of rows show the blocks.
    ordered = rows.sort().values
    runs = 1 + int((ordered.diff() != 1).sum())
    assert rows.unique().numel() == window
    assert runs <= window // block


def test_a_full_permutation_has_no_structure_left() -> None:
    """Correlation of row and position, and of neighbours, is that of chance (standard error 0.01)."""
    rows = SampleOrder(10_000, 10_000, seed=1).rows(0, 0, 10_000).double()
    positions = torch.arange(10_000).double()
    assert abs(torch.corrcoef(torch.stack([rows, positions]))[0, 1]) < 0.05
    assert abs(torch.corrcoef(torch.stack([rows[1:], rows[:-1]]))[0, 1]) < 0.05


def test_positions_outside_of_the_epoch_are_refused() -> None:
    with pytest.raises(IndexError, match=r"\[90, 101\) of an epoch of 100"):
        SampleOrder(100, 100, seed=1).rows(0, 90, 101)
