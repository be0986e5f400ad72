"""Windows of time: every sample is trained on in its window, which the model has been evaluated on before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dlrm_fused.config import Config, Split, Windows, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.loader import EvaluationLoader, TrainLoader
from dlrm_fused.datasets.time_windows import TimeWindows, time_windows
from dlrm_fused.errors import ConfigError, DataError
from tests.unit.prepared_sets import write_prepared_set

CPU = torch.device("cpu")
BATCH = 4
SAMPLES = {"train": 60, "validation": 5, "test": 6}


def microseconds(*times: str) -> NDArray[np.int64]:
    return np.array(times, "datetime64[us]").astype(np.int64)


# 2024: 9 samples in January, 3 in February, fewer than a batch, none in March, 10 in April, 8 in May; not in order.
MONTHS = {"01": 9, "02": 3, "04": 10, "05": 8}
TIMES = np.random.default_rng(0).permutation(
    np.concatenate(
        [microseconds(*(f"2024-{month}-{day:02}" for day in range(1, 1 + count))) for month, count in MONTHS.items()]
    )
)


def windows_of(times: NDArray[np.int64], rows: int = 1000, seed: int = 1) -> TimeWindows:
    return TimeWindows(times, Windows.month, BATCH, rows, seed)


def months_of(times: NDArray[np.int64]) -> set[str]:
    return {str(month) for month in times.astype("datetime64[us]").astype("datetime64[M]")}


@pytest.mark.parametrize(
    ("length", "begins"),
    [
        (Windows.hour, ["1969-12-31T23", "2024-02-29T23", "2024-03-03T10"]),
        (Windows.day, ["1969-12-31", "2024-02-29", "2024-03-03"]),
        (Windows.week, ["1969-12-29", "2024-02-26"]),  # Mondays
        (Windows.month, ["1969-12", "2024-02", "2024-03"]),
    ],
)
def test_a_window_is_named_by_its_begin(length: Windows, begins: list[str]) -> None:
    times = microseconds("1969-12-31T23:59:59.999999", "2024-02-29T23:00", "2024-03-03T10:59")
    assert [window.name for window in TimeWindows(times, length, 1, 0, seed=1).windows] == begins


@pytest.mark.parametrize("times", [TIMES, np.sort(TIMES)], ids=["in any order", "in order of time"])
def test_each_window_has_the_rows_of_its_time(times: NDArray[np.int64]) -> None:
    windows = windows_of(times)
    assert [window.name for window in windows.windows] == ["2024-01", "2024-02", "2024-04", "2024-05"]
    assert [window.samples for window in windows.windows] == list(MONTHS.values())
    of_windows = [times[window.rows(0, 0, window.samples)] for window in windows.windows]
    assert np.concatenate(of_windows).tolist() == np.sort(times).tolist()


def test_steps_go_through_the_windows_in_order_and_mix_none() -> None:
    windows = windows_of(TIMES)
    assert windows.steps == 2 + 0 + 2 + 2
    assert [windows.position(step) for step in range(8)] == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1), (3, 1), (3, 1)]
    for number in (0, 2, 3):
        window = windows.windows[number]
        shuffled = windows.rows(number, 0, window.samples).tolist()
        assert sorted(shuffled) == sorted(window.rows(0, 0, window.samples).tolist())
        assert shuffled != windows_of(TIMES, seed=2).rows(number, 0, window.samples).tolist()
    assert windows_of(TIMES, rows=0).rows(2, 0, 10).tolist() == windows.windows[2].rows(0, 0, 10).tolist()


def test_the_model_is_evaluated_on_what_it_is_trained_on_next() -> None:
    windows = windows_of(TIMES)
    due = {steps: [window.name for window in windows.due(steps)] for steps in range(7)}
    # February, without a whole batch, is evaluated on together with April.
    assert due == {0: ["2024-01"], 1: [], 2: ["2024-02", "2024-04"], 3: [], 4: ["2024-05"], 5: [], 6: []}


def test_small_windows_at_either_end() -> None:
    times = microseconds("2024-01-01", *["2024-02-01"] * BATCH, "2024-03-01")
    windows = windows_of(times)
    assert windows.steps == 1
    assert windows.position(0) == (1, 0)
    assert [window.name for window in windows.due(0)] == ["2024-01", "2024-02"]
    assert [window.name for window in windows.due(1)] == ["2024-03"]


def prepared(folder: Path, times: dict[str, NDArray[np.int64]] | None, *overrides: str) -> Config:
    """A set of 60 training samples of January to May 2024, and some of June."""
    write_prepared_set(folder, SAMPLES, times=times)
    config = ("data.path=" + str(folder), "data.windows=month", "training.max_steps=10", "training.global_batch_size=4")
    return load_config("configs/quickstart.yaml", [*config, *overrides])


def times_of_splits() -> dict[str, NDArray[np.int64]]:
    in_june = np.full(6, microseconds("2024-06-01")[0])
    return {"train": np.concatenate([TIMES, TIMES]), "validation": in_june[:5].copy(), "test": in_june}


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_batch_holds_a_sample_of_after_its_window_or_before(tmp_path: Path, world_size: int) -> None:
    config = prepared(tmp_path / "set", times_of_splits())
    dataset = open_dataset(config, CPU)
    windows = time_windows(config, dataset)
    assert windows is not None
    times = times_of_splits()["train"]
    rows_by_value = {float(row): number for number, row in enumerate(np.load(tmp_path / "set/train/dense.npy")[:, 0])}
    loaders = [TrainLoader(dataset, config, rank, world_size, CPU, windows=windows) for rank in range(world_size)]
    seen: list[int] = []
    for step in range(windows.steps):
        batches = [next(loader) for loader in loaders]
        values = torch.cat([batch.dense[batch.weights > 0, 0] for batch in batches]).tolist()
        rows = [rows_by_value[value] for value in values]
        window = windows.windows[windows.position(step)[0]]
        assert len(rows) == BATCH
        assert months_of(times[rows]) == {window.name}
        assert not set(rows) & set(seen)
        seen += rows
    for loader in loaders:
        loader.close()
    april = windows.windows[2]
    with EvaluationLoader(dataset, Split.train, 7, 0, 1, CPU, config, window=april) as evaluation:
        assert len(evaluation) == 3
        values = torch.cat([batch.dense[batch.weights > 0, 0] for batch in evaluation]).tolist()
    assert months_of(times[[rows_by_value[value] for value in values]]) == {"2024-04"}
    assert len(values) == 20


def test_a_split_of_the_past_is_a_leak(tmp_path: Path) -> None:
    times = times_of_splits()
    times["test"][3] = microseconds("2024-05-07T23:59:59")[0]  # training ends on May 8
    config = prepared(tmp_path / "set", times)
    expected = "split test begins at 2024-05-07T23:59:59, and training ends at 2024-05-08T00:00:00.*--split-by-time"
    with pytest.raises(DataError, match=expected):
        time_windows(config, open_dataset(config, CPU))


def test_a_set_without_times(tmp_path: Path) -> None:
    config = prepared(tmp_path / "set", None)
    with pytest.raises(DataError, match=r"does not say when its samples happened.*--split-by-time"):
        time_windows(config, open_dataset(config, CPU))
    assert time_windows(load_config("configs/quickstart.yaml", []), open_dataset(config, CPU)) is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["training.max_steps=15"],
            "training.max_steps=15: allowed: at most 14, the steps of the 4 windows of data.windows=month",
        ),
        (
            ["training.global_batch_size=21"],
            "training.global_batch_size=21: allowed: at most 20, the most samples of the 4 windows",
        ),
    ],
)
def test_more_than_the_windows_hold(tmp_path: Path, overrides: list[str], expected: str) -> None:
    config = prepared(tmp_path / "set", times_of_splits(), *overrides)
    with pytest.raises(ConfigError, match=expected):
        time_windows(config, open_dataset(config, CPU))


def test_other_data_have_no_times() -> None:
    expected = r"data.windows=day: allowed: none with data.source=synthetic, .*; to evaluate .* add data.windows=none"
    with pytest.raises(ConfigError, match=expected):
        load_config("configs/synthetic.yaml", ["data.windows=day"])
