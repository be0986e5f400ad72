"""Records in JSON files: what is not as it should be is told by file and field."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlrm_fused.errors import CheckpointError
from dlrm_fused.records import read_json, read_record, replace_text, write_record


@dataclass(frozen=True)
class Place:
    file: str
    begin: int


@dataclass(frozen=True)
class Example:
    step: int
    loss: float
    auc: float | None
    settings: dict[str, object]
    places: dict[str, Place]
    labels: Sequence[str] = ("label",)
    sizes: Sequence[int] = field(default_factory=tuple)
    is_last: bool = False


RECORD = Example(3, 0.5, None, {"a": [1, {"b": 2}]}, {"x": Place("f", 7)}, ("c", "d"), (1, 2), True)
CONTENT: dict[str, Any] = {"step": 3, "loss": 0.5, "auc": None, "settings": {}, "places": {}}


def read(folder: Path, content: str | bytes) -> Example:
    path = folder / "record.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_record(path, Example, CheckpointError, "write it again")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", RECORD)
    assert read_record(tmp_path / "record.json", Example, CheckpointError, "") == RECORD


def test_fields_that_are_missing_have_their_defaults_and_a_number_needs_no_point(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(CONTENT | {"loss": 1})) == Example(3, 1.0, None, {}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "3"}, 'step is "3", expected a whole number'),
        ({"step": True}, "step is true, expected a whole number"),
        ({"step": 3.0}, "step is 3.0, expected a whole number"),
        ({"step": None}, "step is null, expected a whole number"),
        ({"loss": "x"}, 'loss is "x", expected a number'),
        ({"auc": []}, r"auc is \[\], expected a number"),
        ({"settings": []}, r"settings is \[\], expected an object"),
        ({"labels": "label"}, 'labels is "label", expected a list'),
        ({"labels": ["a", 1]}, r"labels\[1\] is 1, expected text"),
        ({"is_last": 1}, "is_last is 1, expected true or false"),
        ({"places": {"x": 1}}, r"places\['x'\] is 1, expected an object"),
        ({"places": {"x": {"file": "f"}}}, r"places\['x'\].begin is missing"),
        ({"other": 1}, "other is unknown"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"record.json: damaged: {message}; write it again$"):
        read(tmp_path, json.dumps(CONTENT | change))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"record.json: damaged: step is missing; write it again$"):
        read(tmp_path, json.dumps({key: value for key, value in CONTENT.items() if key != "step"}))


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[]", "null", b"\xff\xfe", b"\0\0\0", "1", '"text"'])
def test_what_is_no_object_is_damaged(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(CheckpointError, match=r"record.json: damaged.*; write it again$"):
        read(tmp_path, content)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.json: missing; write it again"):
        read_json(tmp_path / "nowhere.json", CheckpointError, "write it again")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\); write it again"):
        read_json(tmp_path, CheckpointError, "write it again")


def test_a_full_disk_leaves_the_file_before_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_text(tmp_path / "file", "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "file", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_another_format_version_is_told(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"format_version": 9}')
    with pytest.raises(CheckpointError, match=r"record.json: format version 9, this release reads 1; write it again"):
        read_record(tmp_path / "record.json", Example, CheckpointError, "write it again", version=1)
