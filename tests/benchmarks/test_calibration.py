"""What ``python -m dlrm_fused.scaleout`` is calibrated with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.common.harness import open_world
from benchmarks.scaleout import links, tables
from dlrm_fused.config import load_config
from dlrm_fused.errors import ConfigError
from tests.distributed.launch import run_program

SMALL = ["data.synthetic.tables=3", "data.synthetic.rows=[100]", "data.synthetic.pooling=[4]"]


def test_a_fit_finds_the_fixed_time_and_the_rate() -> None:
    work = [1.0, 10.0, 1000.0]
    assert calibrate.fit_line(work, [3e-6 + some / 2e6 for some in work]) == pytest.approx((3e-6, 2e6))


def test_a_fit_has_no_negative_time() -> None:
    assert calibrate.fit_line([10.0, 20.0], [1.0, 3.0])[0] == 0


@pytest.mark.parametrize(("kind", "bytes_of_update"), [("sgd", 2 * 4), ("adagrad", 2 * 4 + 2 * 4)])
def test_lookups_and_updates_of_a_configs_tables_by_their_bytes(kind: str, bytes_of_update: int) -> None:
    config = load_config("configs/synthetic.yaml", [*SMALL, f"embedding.optimizer.kind={kind}"])
    with open_world(on_gpus=False) as world:
        points = tables.measure(world, config, [8, 64])
    elements = [3 * 4 * 16 * samples for samples in (8, 64)]
    assert [work for work, _ in points["lookup"]] == [4 * some for some in elements]
    assert [work for work, _ in points["update"]] == [bytes_of_update * some for some in elements]
    assert all(seconds > 0 for of_kernel in points.values() for _, seconds in of_kernel)


def test_tables_of_16_bits_are_refused() -> None:
    config = load_config("configs/synthetic.yaml", [*SMALL, "embedding.dtype=fp16"])
    with open_world(on_gpus=False) as world, pytest.raises(ConfigError, match=r"embedding\.dtype=fp16"):
        tables.measure(world, config, [8])


def test_a_wrong_config_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate", "--config", "none.yaml", "--output", str(tmp_path / "cpu.json")])
    with pytest.raises(SystemExit, match=r"none\.yaml"):
        calibrate.main()


def _with_few_bytes() -> None:
    time_interleaved = links.time_interleaved
    links.time_interleaved = lambda world, calls, seconds: time_interleaved(world, calls, seconds / 20)
    links.main(["3000", "50000", "--stores"])


def test_any_number_of_ranks_measures_its_links(tmp_path: Path) -> None:
    ended = run_program(4, tmp_path, 120.0, _with_few_bytes)
    assert ended.statuses == [0] * 4, ended.output
    seconds = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    assert {name: len(of_sizes) for name, of_sizes in seconds.items()} == {"all_to_all": 2, "all_reduce": 2, "stores": 2}
