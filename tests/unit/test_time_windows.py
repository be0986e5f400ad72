"""Windows of time: every sample is trained on in its window, which the model has been evaluated on before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from dlrm_fused.config import Config, Split, Windows, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.loader import EvaluationLoader, TrainLoader
from dlrm_fused.datasets.order import SampleOrder
from dlrm_fused.datasets.parquet import ParquetDataset
from dlrm_fused.datasets.parquet_files import open_files, read_times
from dlrm_fused.datasets.preparation.parquet import write_parquet
from dlrm_fused.datasets.row_group_order import RowGroupOrder
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
    return TimeWindows(times, Windows.month, BATCH, lambda _, samples: SampleOrder(samples, rows, seed))


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
    in_order = SampleOrder(len(times), 0, seed=1)
    assert [window.name for window in TimeWindows(times, length, 1, lambda *_: in_order).windows] == begins


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


def parquet(folder: Path, times: dict[str, NDArray[np.int64]], *overrides: str) -> Config:
    """The same, as Parquet files with row groups of 7 rows; 20 samples are shuffled together."""
    config = prepared(folder / "set", times)
    write_parquet(Path(config.data.path), folder / "files", row_group_rows=7)
    for split, of_split in times.items():
        path = folder / "files" / split / "part-00000.parquet"
        column = pa.array(of_split, pa.timestamp("us")).cast(pa.timestamp("ms"))
        pq.write_table(pq.read_table(path).append_column("happened", column), path, row_group_size=7)
    data = ["data.source=parquet", f"data.path={folder / 'files'}", "data.sample_time=happened", "data.shuffle_window_rows=20"]
    return load_config(
        "configs/quickstart.yaml",
        [*data, "data.windows=month", "training.max_steps=10", "training.global_batch_size=4", *overrides],
    )


def times_of_splits() -> dict[str, NDArray[np.int64]]:
    in_june = np.full(6, microseconds("2024-06-01")[0])
    return {"train": np.concatenate([TIMES, TIMES]), "validation": in_june[:5].copy(), "test": in_june}


def sorted_times_of_splits() -> dict[str, NDArray[np.int64]]:
    return {split: np.sort(times) for split, times in times_of_splits().items()}


@pytest.mark.parametrize("is_parquet", [False, True], ids=["prepared", "parquet"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_no_batch_holds_a_sample_of_after_its_window_or_before(tmp_path: Path, world_size: int, is_parquet: bool) -> None:
    of_splits = sorted_times_of_splits() if is_parquet else times_of_splits()
    config = parquet(tmp_path, of_splits) if is_parquet else prepared(tmp_path / "set", of_splits)
    dataset = open_dataset(config, CPU)
    windows = time_windows(config, dataset)
    assert windows is not None
    times = of_splits["train"]
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
    assert seen != sorted(seen)
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


def test_files_of_which_rows_are_not_in_the_order_of_time(tmp_path: Path) -> None:
    times = sorted_times_of_splits()
    times["train"][31] = times["train"][0]
    config = parquet(tmp_path, times)
    with pytest.raises(DataError, match=r"part-00000.parquet, row group 4: row 3 has an earlier happened than the one before"):
        time_windows(config, open_dataset(config, CPU))


def test_a_leak_in_files_is_one_too(tmp_path: Path) -> None:
    times = sorted_times_of_splits()
    times["validation"][1] = microseconds("2024-05-01")[0]
    config = parquet(tmp_path, times)
    with pytest.raises(DataError, match=r"split validation begins at 2024-05-01T00:00:00, and training ends at 2024-05-08"):
        time_windows(config, open_dataset(config, CPU))


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ns", "Asia/Tokyo"), pa.date32(), pa.date64()])
def test_times_and_dates_of_all_kinds_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(microseconds("1969-12-31", "2024-05-08"), pa.timestamp("us")).cast(kind, safe=False)
    pq.write_table(pa.table({"when": column}), tmp_path / "times.parquet", row_group_size=1)
    groups, _ = open_files(tmp_path)
    assert read_times(groups, "when").tolist() == microseconds("1969-12-31", "2024-05-08").tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.sample_time=user"], r"column user is int32, allowed: timestamps or dates"),
        (["data.sample_time=other"], r"column happened is timestamp\[ms\].* set data.sample_time=happened"),
        (["data.sample_time=''", "data.windows=none"], r"column happened is timestamp\[ms\].* set data.sample_time=happened"),
    ],
)
def test_columns_that_are_no_times(tmp_path: Path, settings: list[str], expected: str) -> None:
    config = parquet(tmp_path, sorted_times_of_splits(), *settings)
    with pytest.raises(DataError, match=expected):
        open_dataset(config, CPU)


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
    expected = (
        r"data.windows=day: allowed: none, but with prepared data .*; to evaluate .* on other data, add data.windows=none"
    )
    for others in (["configs/synthetic.yaml"], ["configs/quickstart.yaml", "data.source=parquet", "data.path=files"]):
        with pytest.raises(ConfigError, match=expected):
            load_config(others[0], ["data.windows=day", *others[1:]])


def test_times_and_the_constant_are_no_dense_features(tmp_path: Path) -> None:
    """Files without a dense feature have a constant of 1, also if another column has its name."""
    for split, day in {"train": 1, "validation": 2, "test": 3}.items():
        (tmp_path / split).mkdir()
        columns = {"label": [0, 1], "item": [3, 4], "constant": microseconds(f"2024-01-0{day}", f"2024-01-0{day}")}
        kinds = {"label": pa.uint8(), "item": pa.int32(), "constant": pa.timestamp("us")}
        table = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
        pq.write_table(table, tmp_path / split / "part.parquet")
    data = ["data.source=parquet", f"data.path={tmp_path}", "data.sample_time=constant", "embedding.rows=[10]"]
    dataset = open_dataset(load_config("configs/quickstart.yaml", data), CPU)
    assert isinstance(dataset, ParquetDataset)
    assert not dataset.has_dense
    assert dataset.read(Split.test, torch.arange(2)).dense.tolist() == [[1.0], [1.0]]


def test_files_without_times_are_evaluated_on_without_windows(tmp_path: Path) -> None:
    config = parquet(tmp_path, sorted_times_of_splits(), "data.sample_time=happened", "data.windows=none")
    for path in Path(config.data.path).rglob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns("happened"), path)
    assert open_dataset(config, CPU).samples(Split.test) == SAMPLES["test"]
    config.data.windows = Windows.month
    with pytest.raises(DataError, match=r"column happened, of data.sample_time, is missing; its columns are label, dense_0"):
        time_windows(config, open_dataset(config, CPU))


def test_a_time_beyond_all_that_microseconds_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"when": pa.array([10**13], pa.timestamp("s"))}), tmp_path / "times.parquet")
    groups, _ = open_files(tmp_path)
    with pytest.raises(DataError, match=r"times.parquet, row group 0: column when: .*10000000000000"):
        read_times(groups, "when")


def test_a_row_group_counts_as_a_whole_where_a_window_has_a_part_of_it() -> None:
    assert RowGroupOrder([1000, 1000], 200, 2000, seed=1).lanes == 2
    assert RowGroupOrder([1000, 1000], 200, 2000, seed=1, largest=20_000).lanes == 1


def test_times_are_a_column_of_their_own(tmp_path: Path) -> None:
    for other in ("data.sample_weight=happened", "data.labels=[label,happened]"):
        with pytest.raises(ConfigError, match=r"data.sample_time=happened: allowed: another column than labels and weights"):
            parquet(tmp_path / other.partition("=")[0], sorted_times_of_splits(), other)


def test_prepared_data_state_their_times() -> None:
    with pytest.raises(ConfigError, match=r"data.sample_time=happened: allowed: with data.source=parquet alone"):
        load_config("configs/quickstart.yaml", ["data.sample_time=happened"])
