"""The order in which an epoch visits row groups: complete, the same for any number of ranks, and each rank in its own."""

import pytest
import torch

from dlrm_fused.datasets.row_group_order import RowGroupOrder


def _epoch(order: RowGroupOrder, rows: int, epoch: int = 0) -> list[int]:
    return order.rows(epoch, 0, rows).tolist()


def _groups(rows: torch.Tensor, group_rows: int) -> set[int]:
    return set((rows // group_rows).tolist())


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_without_a_window_the_order_is_that_of_the_files(batch_size: int) -> None:
    order = RowGroupOrder([10, 1, 30, 23], batch_size, window_rows=0, seed=1)
    assert order.lanes == 1
    assert _epoch(order, 63 // batch_size * batch_size, epoch=3) == list(range(63 // batch_size * batch_size))


@pytest.mark.parametrize("batch_size", [64, 100, 1000])
@pytest.mark.parametrize("window_rows", [1, 200, 1_000_000])
def test_an_epoch_visits_no_row_twice_and_the_next_one_in_another_order(batch_size: int, window_rows: int) -> None:
    sizes = [100, 37, 100, 1, 100, 99, 100, 100, 100, 100, 100, 100, 63]
    order = RowGroupOrder(sizes, batch_size, window_rows, seed=1)
    rows = sum(sizes) // batch_size * batch_size
    first, second = _epoch(order, rows), _epoch(order, rows, epoch=1)
    assert len(set(first)) == len(set(second)) == rows
    assert set(first) | set(second) <= set(range(sum(sizes)))
    assert first != second
    assert first != _epoch(RowGroupOrder(sizes, batch_size, window_rows, seed=2), rows)


def test_any_part_of_an_epoch_is_found_without_what_comes_before() -> None:
    order = RowGroupOrder([50] * 20, batch_size=256, window_rows=200, seed=1)
    whole = _epoch(order, 768)
    afresh = RowGroupOrder([50] * 20, batch_size=256, window_rows=200, seed=1)
    assert all(afresh.rows(0, start, start + 5).tolist() == whole[start : start + 5] for start in range(0, 763))


@pytest.mark.parametrize(
    ("batch_size", "window_rows", "lanes"),
    [
        (8192, 0, 1),
        (8192, 99, 1),
        (8192, 100, 1),
        (8192, 400, 4),
        (8192, 799, 4),
        (8192, 10**9, 16),
        (256, 10**9, 4),
        (9, 999, 1),
    ],
)
def test_lanes_are_as_many_row_groups_as_the_window_and_the_batch_allow(batch_size: int, window_rows: int, lanes: int) -> None:
    assert RowGroupOrder([100] * 20, batch_size, window_rows, seed=1).lanes == lanes


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_needs_row_groups_of_its_own(world_size: int) -> None:
    """Of 64 row groups in 4 lanes, a rank shares none but those at the ends of its lanes."""
    batch_size, group_rows = 256, 100
    order = RowGroupOrder([group_rows] * 64, batch_size, window_rows=4 * group_rows, seed=1)
    share = batch_size // world_size
    needed = [
        set().union(
            *(_groups(order.rows(0, b * batch_size + r * share, b * batch_size + (r + 1) * share), 100) for b in range(25))
        )
        for r in range(world_size)
    ]
    assert sum(map(len, needed)) <= 64 + world_size - 1


def test_a_batch_mixes_rows_of_every_lane_and_reads_one_or_two_row_groups_of_each() -> None:
    order = RowGroupOrder([1000] * 64, batch_size=512, window_rows=8000, seed=1)
    assert order.lanes == 8
    assert all(8 <= len(_groups(order.rows(0, b * 512, (b + 1) * 512), 1000)) <= 16 for b in range(125))


def test_positions_beyond_the_last_whole_batch_are_refused() -> None:
    with pytest.raises(IndexError, match=r"positions \[100, 101\) of an epoch of 10 batches of 10 samples"):
        RowGroupOrder([50, 55], batch_size=10, window_rows=0, seed=1).rows(0, 100, 101)
