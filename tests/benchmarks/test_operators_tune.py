"""Tuning of the operators' kernels: what is tried, and the tables that are printed, also of recorded results."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.common.environment import ROOT
from benchmarks.operators import load
from benchmarks.operators.blocks import TUNABLE, all_gemv_blocks, is_of_use, share_of
from benchmarks.operators.gemm_all_to_all import Product
from benchmarks.operators.gemv_all_reduce import Cell
from benchmarks.operators.tune import choices_of
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks
from tests.distributed.launch import run_program

RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("operator", TUNABLE)
def test_what_is_tuned_begins_with_what_is_used_today(operator: str) -> None:
    tunable = TUNABLE[operator]
    for cell in load(operator).sets[tunable.cells]():
        today, *others = choices_of(tunable, cell, 4)
        assert today == tunable.choices(cell, 4)[0]
        assert len({today, *others}) == 1 + len(others) > 1
        assert choices_of(tunable, cell, 4, most=5) == [today, *others[:4]]


def test_all_blocks_of_a_gemv_are_tried() -> None:
    cell = Cell(16, 2048, 8192)
    assert set(choices_of(TUNABLE["gemv_all_reduce"], cell, 4)) >= set(all_gemv_blocks(cell.m, cell.n, cell.depth(4)))


def test_tiles_that_are_no_use() -> None:
    cell, tiles = Product(1024, 1024, 4096), Tiles(64, 128, 128, band=4, warps=4, stages=4, programs=1)
    assert is_of_use(cell, tiles)
    assert share_of(cell, tiles) == 64 * 128
    assert share_of(cell, replace(tiles, splits=4)) == 4 * 64 * 128 / 4
    for change in ({"rows": 256, "columns": 256}, {"stages": 5}, {"band": 16}, {"splits": 8}):
        assert not is_of_use(cell, replace(tiles, **change)), change
    assert not is_of_use(Product(4096, 4096, 4096), tiles), "there are enough larger ones"


def test_of_tiles_that_are_as_fast_the_largest_are_printed() -> None:
    small, large, slow = (Tiles(rows, 128, 64, 8, 4, 3, 1) for rows in (64, 128, 256))
    times = [
        {"us": us, "contestant": name, "blocks": dict(enumerate(astuple(tiles)))}
        for us, name, tiles in (
            (9.0, "nccl", slow), (10.0, "kernel", small), (10.05, "kernel", large), (10.5, "kernel", slow)
        )
    ]  # fmt: skip
    table = TUNABLE["gemm_all_to_all"].table([{"m": 1, "n": 2, "k": 3, "element_size": 2, "times": times}])
    assert table == "[1, 2, 3, 2, [128, 128, 64, 8, 4, 3, 1, 1]],"


def _rows(printed: str, operator: str) -> list[Any]:
    """The blocks that a printed table has."""
    rows = json.loads(f"[{printed.strip().rstrip(',')}]")
    if operator == "embedding_all_to_all":
        return [blocks for *_, by_length in rows for blocks in by_length]
    kind = {"gemm_all_to_all": Tiles, "gemv_all_reduce": Blocks}[operator]
    return [kind(*fields) for *_, fields in rows]


@pytest.mark.parametrize(
    ("file", "operator", "rows"),
    [
        ("tune_gemm_alone_one_h200", "gemm_all_to_all", 20),
        ("tune_gemv_few_rows_4_h200", "gemv_all_reduce", 1),
        ("tune_lookup_small_fp16", "embedding_all_to_all", 16),
    ],
)
def test_tables_of_recorded_results_are_printed(
    file: str, operator: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(RESULTS / f"{file}.json")]) == 0
    assert len(_rows(capsys.readouterr().out, operator)) >= rows


@pytest.mark.parametrize(
    "operator",
    ["gemv_all_reduce", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemm_all_to_all", "embedding_all_to_all"))],
)
def test_the_fastest_blocks_are_printed(operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["tune", operator, "--cells", "tiny", "--most", "3", "--output", "results.json"]
    ended = run_program(2, tmp_path, 240.0, main, given)
    assert ended.statuses == [0, 0], ended.output
    report = json.loads((tmp_path / "results.json").read_text())
    assert all(cell["timed"] > 1 and cell["chosen_us"] > 0 for cell in report["cells"])
    assert main(["report", str(tmp_path / "results.json")]) == 0
    assert len(_rows(capsys.readouterr().out, operator)) == len(report["cells"]) > 0
