"""Values that stand for missing ones: named by an option, they are missing in the set, in `apply`, in an export and service."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.transformation import MISSING, Transformation
from dlrm_fused.datasets.values import NullMarkers
from tests.unit.test_column_types import Prepared, apply, flat, prepare

MARKERS = [r"\N", "NULL", "NA", "None", "—", "-", "?", "(null)", "nan", "missing"]
COLUMNS = ["--dense", "price", "--sparse", "city,tags", "--separated", "tags=|"]


def table(marker: str) -> dict[str, pa.Array]:
    return {
        "price": pa.array(["1.5", marker, "3"]),
        "city": pa.array(["Oslo", marker, "Windhoek"]),
        "tags": pa.array([f"a|{marker}", "b", marker]),
    }


def assert_is_missing(prepared: Prepared) -> None:
    arrays = prepared.table.splits["train"]
    assert (arrays["dense"][:, 0] == 0).tolist() == [False, True, False] * 2
    assert [row == [MISSING] for row in prepared.table.ids("train", "city")] == [False, True, False] * 2
    tags = [[each == MISSING for each in row] for row in prepared.table.ids("train", "tags")]
    assert tags == [[False, True], [False], [True]] * 2
    sent = prepared.sent(prepared.source)
    assert sent.dense[:, 0].tolist() == prepared.dense()
    for bags, name in zip(sent.bags, ("city", "tags"), strict=True):
        assert bags.ids.tolist() == flat(prepared.table.all_ids(name))
    applied = apply(prepared.table.folder.parent, prepared.source, ".csv")
    assert applied.splits["test"]["dense"][:, 0].tolist() == prepared.dense()
    for name in ("city", "tags"):
        assert flat(applied.ids("test", name)) == flat(prepared.table.all_ids(name))


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_is_named_is_a_missing_value_everywhere(tmp_path: Path, marker: str) -> None:
    assert_is_missing(prepare(tmp_path, table(marker), *COLUMNS, f"--null-values={marker},other", suffix=".csv"))


def test_a_number_is_a_marker_by_its_value(tmp_path: Path) -> None:
    columns = {
        "price": pa.array([1.5, -999.0, 3.0]),
        "user": pa.array([7, -999, 8]),
        "hash": pa.array([7, 2**64 - 1, 8], pa.uint64()),
    }
    options = ["--dense", "price", "--sparse", "user,hash", f"--null-values=-999,{2**64 - 1},NULL"]
    prepared = prepare(tmp_path, columns, *options)
    assert (prepared.table.splits["train"]["dense"][:, 0] == 0).tolist() == [False, True, False] * 2
    for name in ("user", "hash"):
        assert [row == [MISSING] for row in prepared.table.ids("train", name)] == [False, True, False] * 2
    sent = prepared.sent(json.loads(json.dumps(prepared.source.to_pylist())))
    assert sent.dense[:, 0].tolist() == prepared.dense()
    assert [bags.ids.tolist() for bags in sent.bags] == [flat(prepared.table.all_ids(name)) for name in ("user", "hash")]


@pytest.mark.parametrize("marker", [r"\N", "NULL", "NA", "None", "—", "missing"])
def test_a_marker_in_a_dense_column_is_refused_with_the_option_that_names_it(
    tmp_path: Path, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):  # the command fails
        prepare(tmp_path, table(marker), *COLUMNS, suffix=".csv")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"--dense price: {marker!r} in " in line
    assert line.endswith(
        "t.csv, row 2; allowed: numbers, empty where missing; --null-values says which values stand for missing ones"
    )


@pytest.mark.parametrize("marker", [r"\N", "NULL", "NA", "None", "-", "—", "nan"])
def test_a_usual_marker_that_is_a_value_is_told(tmp_path: Path, marker: str, capsys: pytest.CaptureFixture[str]) -> None:
    """NA may be Namibia, so it is not refused."""
    for options in ([], ["--hash-buckets", "city=50"]):
        prepared = prepare(tmp_path, {"city": table(marker)["city"]}, "--sparse", "city", "--overwrite", *options)
        assert MISSING not in prepared.ids()
        warning = (
            f"warning: --sparse city: {marker!r} is a value like others, 2 times in training rows; if it stands for a missing "
            "one, add it to --null-values"
        )
        assert warning in capsys.readouterr().err.splitlines()
    command = ["table", "--input", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "none"), "--label", "label"]
    chosen = ["--sparse", "city", "--min-frequency", "1", "--split-by-column", "fold"]
    assert cli.main([*command, *chosen, "--describe"]) == 0
    assert warning in capsys.readouterr().out.splitlines()
    prepare(tmp_path, {"city": table(marker)["city"]}, "--sparse", "city", "--overwrite", f"--null-values={marker}")
    assert "warning: --sparse" not in capsys.readouterr().err


@pytest.mark.parametrize(("true", "false"), [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("1", "0")])
def test_truths_are_labels_and_numbers(tmp_path: Path, true: str, false: str) -> None:
    prepared = prepare(
        tmp_path,
        {"x": pa.array([true, false, "0.5"]), "id": pa.array(["a", "b", "c"])},
        "--dense",
        "x",
        "--sparse",
        "id",
        suffix=".csv",
    )
    again = tmp_path / "labels.csv"
    again.write_text((tmp_path / "t.csv").read_text().replace(",1,", f",{true},").replace(",0,", f",{false},"))
    command = ["table", "--input", str(again), "--output", str(tmp_path / "again"), "--label", "label", "--dense", "x"]
    assert cli.main([*command, "--sparse", "id", "--min-frequency", "1", "--split-by-column", "fold"]) == 0
    for split, arrays in prepared.table.splits.items():
        assert (np.load(tmp_path / "again" / split / "labels.npy") == arrays["labels"]).all()
        assert (np.load(tmp_path / "again" / split / "dense.npy") == arrays["dense"]).all()


def test_markers_are_kept_and_sets_without_are_those_of_earlier_releases(tmp_path: Path) -> None:
    with_markers = Transformation(("clicked",), (), (), nulls=NullMarkers(("NA", r"\N")))
    with_markers.save(tmp_path / "with")
    assert Transformation.load(tmp_path / "with").nulls == with_markers.nulls
    assert json.loads((tmp_path / "with/transformation.json").read_text())["format_version"] == 3
    for labels, version in ((("clicked",), 1), (("clicked", "bought"), 2)):
        Transformation(labels, (), ()).save(tmp_path / str(version))
        content = json.loads((tmp_path / str(version) / "transformation.json").read_text())
        assert content["format_version"] == version
        assert "null_values" not in content
        assert Transformation.load(tmp_path / str(version)).labels == labels
