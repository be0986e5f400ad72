"""``--trim``: blanks around a field are no part of its value, in the set, in `apply`, in an export and service."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from dlrm_fused.datasets.transformation import MISSING
from tests.unit.test_column_types import apply, flat, prepare

COLUMNS = {
    "city": pa.array(["Oslo", " Oslo", "  ", "\tNULL "]),
    "tags": pa.array([" a|b ", "a|b", " ", " NULL "]),
    "user": pa.array([" 7", "7", "  ", "8 "]),
}
OPTIONS = ["--sparse", "city,tags,user", "--separated", "tags=|", "--null-values=NULL"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_field_with_blanks_is_that_without_everywhere(tmp_path: Path, suffix: str) -> None:
    prepared = prepare(tmp_path, COLUMNS, *OPTIONS, "--trim", suffix=suffix)
    for name in ("city", "user"):
        plain, with_blank, of_blanks, _ = prepared.table.ids("train", name)[:4]
        assert plain == with_blank != [MISSING]
        assert of_blanks == [MISSING]
    tags = prepared.table.ids("train", "tags")[:4]
    assert tags[0] == tags[1]
    assert tags[2:] == [[MISSING]] * 2
    assert prepared.table.ids("train", "city")[3] == [MISSING]
    sent = prepared.sent(prepared.source)
    applied = apply(prepared.table.folder.parent, prepared.source, suffix)
    for bags, name in zip(sent.bags, COLUMNS, strict=True):
        assert bags.ids.tolist() == flat(prepared.table.all_ids(name)) == flat(applied.ids("test", name))


def test_without_the_option_blanks_are_part_of_the_value(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"city": COLUMNS["city"]}, "--sparse", "city", suffix=".csv")
    plain, with_blank, *_ = prepared.table.ids("train", "city")
    assert plain != with_blank
    assert prepared.sent(prepared.source).bags[0].ids.tolist() == prepared.ids()
