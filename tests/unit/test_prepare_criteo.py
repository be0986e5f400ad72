"""Preparing Criteo: splits, ids, dense values, malformed lines, and equality with TorchRec's own utilities."""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dlrm_fused.datasets.preparation import blocks, criteo, value_counts
from dlrm_fused.datasets.preparation.criteo import CriteoOptions, prepare_criteo
from dlrm_fused.datasets.preparation.criteo_lines import malformed_reason, parse_lines
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.errors import DataError

SPLITS = ("train", "validation", "test")
SAMPLE = Path(__file__).parents[3] / "shared/data/criteo_kaggle_sample.tsv"
LINE = "\t".join(["1", *["5"] * 13, *["0000002a"] * 26])


def lines(rows: int, seed: int = 0) -> list[str]:
    """Well-formed lines; int_0 is the number of the line, so that rows can be told apart."""
    rng = np.random.default_rng(seed)
    text = []
    for row in range(rows):
        dense = ["" if rng.random() < 0.2 else str(value) for value in rng.integers(-3, 10**6, 12)]
        ids = ["" if rng.random() < 0.2 else f"{hash(int(value)) * 2654435761 % 2**32:08x}" for value in rng.zipf(1.5, 26)]
        text.append("\t".join([str(rng.integers(0, 2)), str(row), *dense, *ids]))
    return text


def write(path: Path, text: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in text).encode())
    return path


def prepare(source: Path, output: Path, **options: object) -> dict[str, dict[str, np.ndarray]]:
    """Prepare ``source`` and read what was written."""
    info = prepare_criteo(replace(CriteoOptions(source, output), **options))
    arrays = {s: {n: np.load(output / s / f"{n}.npy") for n in ("labels", "dense", "single")} for s in SPLITS}
    assert PreparedInfo.load(output) == info
    assert info.samples == {split: len(arrays[split]["labels"]) for split in SPLITS}
    return arrays


def row_numbers(split: dict[str, np.ndarray]) -> list[int]:
    return np.rint(np.expm1(split["dense"][:, 0].astype(np.float64))).astype(int).tolist()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2000)


def test_a_single_file_is_cut_by_position_into_distinct_splits(tmp_path: Path, small_blocks: None) -> None:
    splits = prepare(write(tmp_path / "train.txt", lines(141)), tmp_path / "out", hash_rows=100)
    assert row_numbers(splits["train"]) == list(range(121))
    assert row_numbers(splits["validation"]) == list(range(121, 131))
    assert row_numbers(splits["test"]) == list(range(131, 141))


def test_of_days_the_last_is_halved(tmp_path: Path, small_blocks: None) -> None:
    all_lines = lines(100)
    for day, (start, stop) in enumerate([(0, 40), (40, 79), (79, 100)]):
        write(tmp_path / f"day_{day}", all_lines[start:stop])
    splits = prepare(tmp_path, tmp_path / "out", hash_rows=100)
    assert row_numbers(splits["train"]) == list(range(79))
    assert row_numbers(splits["validation"]) == list(range(79, 90))
    assert row_numbers(splits["test"]) == list(range(90, 100))


def test_days_follow_their_numbers_not_their_names(tmp_path: Path) -> None:
    for day in (10, 9):
        (tmp_path / f"day_{day}").touch()
    assert [path.name for path in criteo.find_files(tmp_path)] == ["day_9", "day_10"]


@pytest.mark.parametrize(
    "mode", [{"hash_rows": 50}, pytest.param({"min_frequency": 2}, marks=pytest.mark.slow), {"torchrec": True}]
)
def test_threads_gzip_line_ends_and_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, object]
) -> None:
    text = lines(300)
    expected = prepare(write(tmp_path / "train.txt", text), tmp_path / "plain", **mode)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(value_counts, "ENTRIES_IN_MEMORY", 500)
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress("\n".join(text).encode()))
    variants = {
        "crlf": prepare(write(tmp_path / "crlf.txt", text, end="\r\n"), tmp_path / "crlf", **mode),
        "gzip": prepare(tmp_path / "train.txt.gz", tmp_path / "gzip", **mode),
        "threads": prepare(tmp_path / "train.txt", tmp_path / "threads", workers=2, **mode),
    }
    for name, splits in variants.items():
        for split in SPLITS:
            for array in expected[split]:
                np.testing.assert_array_equal(splits[split][array], expected[split][array], f"{name} {split} {array}")


def test_dense_values_are_log_of_one_plus_what_is_positive(tmp_path: Path) -> None:
    text = [LINE.replace("1\t5\t5\t5", "1\t7\t\t-2", 1)] * 20
    splits = prepare(write(tmp_path / "train.txt", text), tmp_path / "out")
    np.testing.assert_array_equal(splits["train"]["dense"][0, :3], np.log1p(np.float32([7, 0, 0])))


def test_frequent_ids_of_training_are_numbered_by_first_appearance(tmp_path: Path) -> None:
    ids = ["a", "", "b", "b", "c", "a", "d", "d", "d", "e", "", "c", "c", "e"]
    text = [LINE.rsplit("\t", 1)[0] + "\t" + value for value in ids]
    splits = prepare(write(tmp_path / "train.txt", text), tmp_path / "out", min_frequency=2, held_out=4 / 14)
    missing, rare, a, b, d = 0, 1, 2, 3, 4  # c and e are seen more than once, but not in training
    assert splits["train"]["single"][:, -1].tolist() == [a, missing, b, b, rare, a, d, d, d, rare]
    assert splits["validation"]["single"][:, -1].tolist() == [missing, rare]
    assert splits["test"]["single"][:, -1].tolist() == [rare, rare]
    assert PreparedInfo.load(tmp_path / "out").schema.sparse_features[-1].rows == 5


# TorchRec


@pytest.fixture
def torchrec_utils(monkeypatch: pytest.MonkeyPatch) -> type:
    """TorchRec's BinaryCriteoUtils, with a stand-in for iopath, by which it opens files, where that is not installed."""
    try:
        import iopath.common.file_io  # noqa: F401
    except ImportError:
        manager = SimpleNamespace(open=open, set_strict_kwargs_checking=lambda _: None)
        file_io = ModuleType("iopath.common.file_io")
        file_io.PathManager = object  # type: ignore[attr-defined]
        file_io.PathManagerFactory = lambda: SimpleNamespace(get=lambda _: manager)  # type: ignore[attr-defined]
        for name in ("iopath", "iopath.common"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "iopath.common.file_io", file_io)
    from torchrec.datasets.criteo import BinaryCriteoUtils

    return BinaryCriteoUtils


def kaggle_file(tmp_path: Path, source: str) -> Path:
    if source == "generated":
        return write(tmp_path / "rows.tsv", lines(500))
    if not SAMPLE.exists():
        pytest.skip("the sample of Criteo's data is not beside this checkout")
    return SAMPLE


def tsv_to_npys(utils: type, source: Path, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """TorchRec's dense, sparse and labels."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{source.stem}_{part}.npy" for part in ("dense", "sparse", "labels")]
    utils.tsv_to_npys(str(source), *map(str, paths))  # type: ignore[attr-defined]
    dense, sparse, labels = (np.load(path) for path in paths)
    return dense, sparse, labels


def joined(splits: dict[str, dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([splits[split][name] for split in SPLITS])


@pytest.mark.parametrize("source", ["generated", pytest.param("sample", marks=pytest.mark.slow)])
def test_hashed_tensors_equal_those_of_torchrec(tmp_path: Path, small_blocks: None, torchrec_utils: type, source: str) -> None:
    file = kaggle_file(tmp_path, source)
    splits = prepare(file, tmp_path / "out", hash_rows=1000, torchrec=True)
    dense, sparse, labels = tsv_to_npys(torchrec_utils, file, tmp_path / "torchrec")
    np.testing.assert_array_equal(joined(splits, "dense"), dense)
    np.testing.assert_array_equal(joined(splits, "single"), sparse % 1000)
    np.testing.assert_array_equal(joined(splits, "labels"), labels[:, 0])


@pytest.mark.parametrize("source", ["generated", pytest.param("sample", marks=pytest.mark.slow)])
@pytest.mark.parametrize("threshold", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_frequency_thresholded_ids_equal_those_of_torchrec(
    tmp_path: Path, small_blocks: None, torchrec_utils: type, source: str, threshold: int
) -> None:
    file = kaggle_file(tmp_path, source)
    splits = prepare(file, tmp_path / "out", min_frequency=threshold, torchrec=True)
    tsv_to_npys(torchrec_utils, file, tmp_path / "torchrec")
    torchrec_utils.sparse_to_contiguous(  # type: ignore[attr-defined]
        [str(tmp_path / f"torchrec/{file.stem}_sparse.npy")], str(tmp_path), frequency_threshold=threshold
    )
    np.testing.assert_array_equal(joined(splits, "single"), np.load(tmp_path / f"{file.stem}_sparse_contig_freq.npy"))


def test_the_dense_transform_of_torchrec_is_by_day(tmp_path: Path, torchrec_utils: type) -> None:
    files = [write(tmp_path / f"day_{day}", [line.replace("\t-", f"\t-{day}") for line in lines(60, day)]) for day in (0, 1)]
    splits = prepare(tmp_path, tmp_path / "out", hash_rows=1000, torchrec=True)
    theirs = [tsv_to_npys(torchrec_utils, file, tmp_path / file.name.upper())[0] for file in files]
    np.testing.assert_array_equal(joined(splits, "dense"), np.concatenate(theirs))


# Malformed lines


def with_field(column: int, value: str) -> str:
    fields = LINE.split("\t")
    fields[column] = value
    return "\t".join(fields)


MALFORMED = {
    "": "empty line",
    LINE.rsplit("\t", 1)[0]: "39 columns, expected 40; a test file without labels has 39",
    LINE + "\t": "41 columns, expected 40",
    with_field(0, ""): "label is '', not 0 or 1",
    with_field(0, "2"): "label is '2', not 0 or 1",
    with_field(1, "1.5"): "int_0 is '1.5', not an integer",
    with_field(2, "+5"): "int_1 is '+5', not an integer",
    with_field(2, " 5"): "int_1 is ' 5', not an integer",
    with_field(3, "ff"): "int_2 is 'ff', not an integer",
    with_field(13, "2147483648"): "int_12 is '2147483648', out of the range of int32",
    with_field(14, "xyz"): "cat_0 is 'xyz', not a hexadecimal id",
    with_field(15, "-1"): "cat_1 is '-1', not a hexadecimal id",
    with_field(39, "123456789"): "cat_25 is '123456789', an id of more than 32 bits",
    with_field(39, "\udcff").encode(errors="surrogateescape").decode("latin-1"): "cat_25 is",
}


@pytest.mark.parametrize(("line", "reason"), MALFORMED.items())
def test_a_malformed_line_is_left_out_and_told(line: str, reason: str) -> None:
    rows = parse_lines(f"{LINE}\n{line}\n{LINE}\n".encode())
    assert len(rows.labels) == len(rows.dense) == rows.ids.height == 2
    assert rows.numbers.tolist() == [0, 2]
    [(number, told)] = rows.malformed
    assert number == 1
    assert told.startswith(reason)


@pytest.mark.parametrize(
    "line", [LINE, with_field(1, ""), with_field(1, "-2147483648"), with_field(39, ""), with_field(39, "FFffFFff")]
)
def test_a_well_formed_line_is_accepted_beside_malformed_ones(line: str) -> None:
    assert malformed_reason(line.encode()) is None
    alone, beside = parse_lines(f"{line}\n".encode()), parse_lines(f"bad\n{line}\n".encode())
    assert alone.malformed == []
    np.testing.assert_array_equal(alone.dense, beside.dense)
    assert alone.ids.equals(beside.ids)


@pytest.mark.parametrize("workers", [1, 2])
def test_malformed_lines_are_counted_with_their_line_numbers(
    tmp_path: Path, small_blocks: None, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    text = lines(141)
    for number in range(5, 141, 10):
        text[number] = "bad"
    source = write(tmp_path / "train.txt", text)
    splits = prepare(source, tmp_path / "out", max_malformed=0.1, workers=workers)
    assert row_numbers(splits["train"]) == [row for row in range(121) if row % 10 != 5]
    assert row_numbers(splits["validation"]) == [row for row in range(121, 131) if row % 10 != 5]
    told = capsys.readouterr().err
    assert "14 of 141 lines are malformed and left out" in told
    for number in range(5, 105, 10):  # the first ten
        assert f"{source}:{number + 1}: 1 columns, expected 40" in told
    assert "... and 4 more" in told
    assert PreparedInfo.load(tmp_path / "out").origin["malformed_lines"] == 14


def test_line_numbers_begin_anew_with_each_file(tmp_path: Path, small_blocks: None) -> None:
    for day in range(3):
        text = lines(40)
        text[7 + day] = "bad"
        write(tmp_path / f"day_{day}", text)
    prepare(tmp_path, tmp_path / "out", max_malformed=0.1)
    first = PreparedInfo.load(tmp_path / "out").origin["first_malformed_lines"]
    assert [line.split(" ")[0] for line in first] == [f"{tmp_path}/day_{day}:{8 + day}:" for day in range(3)]


@pytest.mark.parametrize("mode", [{"hash_rows": 50}, {"min_frequency": 2}])
def test_too_many_malformed_lines_stop_the_preparation(tmp_path: Path, mode: dict[str, object]) -> None:
    text = lines(100)
    text[3] = text[50] = "bad"
    write(tmp_path / "train.txt", text)
    with pytest.raises(DataError, match=r"2 of 100 lines are malformed, --max-malformed=0.01 .*\n.*train.txt:4: 1 columns"):
        prepare(tmp_path / "train.txt", tmp_path / "out", max_malformed=0.01, **mode)
    assert not (tmp_path / "out/dataset.json").exists()


# Inputs that cannot be prepared


def test_a_test_file_without_labels_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "test.txt", [line.split("\t", 1)[1] for line in lines(10)])
    with pytest.raises(DataError, match=r"test.txt: 39 columns, so no labels"):
        prepare(tmp_path / "test.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"a,b,c\n1,2,3\n", r":1: 1 tab-separated columns, expected 40"),
        (b"\0" * (2**20 + 1), "no line end in 1048576 bytes"),
        ((LINE + "\n").encode() * 2, "2 lines are too few"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "train.txt", tmp_path / "out")


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join(lines(200)).encode())
    (tmp_path / "train.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged gzip file"):
        prepare(tmp_path / "train.txt.gz", tmp_path / "out")


def test_folders_that_hold_no_one_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        criteo.find_files(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"neither train\.txt"):
        criteo.find_files(tmp_path)
    (tmp_path / "day_0").touch()
    (tmp_path / "day_0.gz").touch()
    with pytest.raises(DataError, match=r"both plain and as \.gz"):
        criteo.find_files(tmp_path)
    (tmp_path / "train.txt").touch()
    with pytest.raises(DataError, match=r"holds both train\.txt and day_0"):
        criteo.find_files(tmp_path)


@pytest.mark.parametrize(("option", "value"), [("hash_rows", -1), ("min_frequency", 0), ("held_out", 1.0), ("workers", 0)])
def test_options_out_of_range_are_named(tmp_path: Path, option: str, value: float) -> None:
    with pytest.raises(DataError, match=f"--{option.replace('_', '-')}={value}: allowed"):
        prepare(tmp_path, tmp_path / "out", **{option: value})


def test_the_generated_ids_are_worth_a_test() -> None:
    """Else the tests above would pass with ids that are all frequent, or all rare."""
    rows = parse_lines("\n".join(lines(300)).encode())
    counts = Counter(rows.ids["cat_0"].drop_nulls().to_list())
    assert min(counts.values()) == 1
    assert max(counts.values()) > 20
    assert rows.ids["cat_0"].null_count() > 20
