"""The embedding benchmark: which cells it has, what it draws for them, what it makes of times, and a run on the CPU."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.common import harness
from benchmarks.embedding_all_to_all import benchmark as embedding_all_to_all
from benchmarks.embedding_all_to_all.cells import (
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
    tiny_cells,
)
from benchmarks.embedding_all_to_all.report import REPORT
from tests.distributed.launch import run_program

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


def test_names_tell_cells_apart():
    cells = full_cells()
    cells += row_wise_cells(cells)
    assert len({cell.name for cell in cells}) == len(cells)


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


def _result(name: str, ratio: float, fused_us: float, *, stage: str = "forward", passed: bool = True) -> dict:
    return {
        "name": name,
        "stage": stage,
        "passed": passed,
        "errors": {"output of fused": 0.5},
        "baseline_us": fused_us / ratio,
        "copy_us": None,
        "fused_us": fused_us,
        "lookup_us": fused_us / 2,
        "ratio": ratio,
        "ratio_to_copy": None,
        "ratio_to_defaults": ratio,
        "floor_us": fused_us / 4,
        "fused_over_floor": 4.0,
        "overlap": fused_us / 200,
        "overlap_of_stores": fused_us / 100,
    }


def test_summary_has_geometric_means_worst_cells_and_failures():
    cells = [
        _result("a", 0.25, 50.0),
        _result("b", 1.0, 200.0),
        _result("c", 0.01, 200.0, passed=False),
        {"name": "d", "stage": "forward", "passed": False, "error": "rank 1: out of memory"},
        _result("e", 0.5, 50.0, stage="row_wise_forward"),
    ]
    summary = REPORT.summarize(cells)
    forward = summary["forward"]
    assert forward["ratio"] == pytest.approx(0.5)
    assert forward["failed"] == ["c", "d"]
    assert forward["worst"][0] == {"name": "b", "ratio": 1.0}
    assert forward["slower_than_baseline"] == 1
    assert (forward["overlap_cells"], forward["overlap"]) == (1, pytest.approx(1.0))
    assert summary["row_wise_forward"]["overlap"] is None
    assert "training" not in summary
    text = REPORT.table({"cells": cells, "not_run": ["f"]})
    assert "FAILED rank 1: out of memory" in text
    assert "not run: f" in text


def _run(folder: Path, *arguments: str, main=embedding_all_to_all.main) -> dict:
    ended = run_program(2, folder, 240.0, main, ["--output", "results.json", "--seconds-per-cell", "0.01", *arguments])
    assert ended.statuses == [0, 0], ended.output
    return json.loads((folder / "results.json").read_text())


def test_tiny_cells_on_the_cpu_pass_and_are_drawn(tmp_path):
    report = _run(tmp_path, "--cells", "tiny", "--commit", "abc")
    names = {cell.name for cell in tiny_cells()}
    for stage in ("forward", "training"):
        assert {cell["name"] for cell in report["cells"] if cell["stage"] == stage} == names
        assert {cell["name"] for cell in report["cells"] if cell["stage"] == f"row_wise_{stage}"} == {
            f"row-wise {name}" for name in names
        }
    for cell in report["cells"]:
        assert cell["passed"]
        assert cell["ratio"] == pytest.approx(cell["fused_us"] / cell["baseline_us"])
        assert cell["fused_over_floor"] > 1
        assert len(cell["by_rank_us"]["fused"]) == 2
    assert report["commit"] == "abc"
    REPORT.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_slices_of_ranks_that_are_hosts_of_their_own_are_measured(tmp_path):
    report = _run(tmp_path, "--cells", "tiny", "--stage", "training", "--slices-by", "messages")
    assert len(report["cells"]) == len(tiny_cells())
    assert all(cell["passed"] for cell in report["cells"])


def _main_with_wrong_results(arguments: list[str]) -> None:
    right = embedding_all_to_all.copied

    def wrong(*candidate):
        forward = right(*candidate)
        return lambda lookup: forward(lookup) * 1.01

    embedding_all_to_all.copied = wrong
    embedding_all_to_all.main(arguments)


@pytest.mark.slow
def test_a_candidate_with_wrong_results_fails_its_cells_visibly(tmp_path):
    report = _run(tmp_path, "--cells", "tiny", "--stage", "training", main=_main_with_wrong_results)
    for cell in report["cells"]:
        assert not cell["passed"]
        assert cell["errors"]["output of fused"] > 1e-3
        assert cell["errors"]["weights of fused"] > 0
    assert report["summary"]["training"]["ratio"] is None
    assert len(report["summary"]["training"]["failed"]) == 2


@pytest.mark.slow
def test_cells_for_which_no_time_is_left_are_named(tmp_path):
    report = _run(tmp_path, "--cells", "tiny", "--stage", "forward", "--seconds-budget", "0")
    assert report["cells"] == []
    assert set(report["not_run"]) == {cell.name for cell in tiny_cells()}


def test_small_cells_are_some_of_the_full_ones():
    assert set(small_cells()) < set(full_cells())
