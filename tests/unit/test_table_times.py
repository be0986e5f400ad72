"""Columns of times: what a value says is read as that time, or one line says which option tells it; nothing is guessed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.table.files import Block, open_file
from dlrm_fused.datasets.preparation.table.splits import TimeSplit
from dlrm_fused.datasets.preparation.table.times import TimeSurvey
from dlrm_fused.datasets.table_format import TableFormat
from dlrm_fused.errors import DataError
from tests.unit.tables import prepare, random_table, write_table
from tests.unit.test_prepare_table_errors import assert_fits

NOVEMBER = "2023-11-14T22:13:20"  # 1,700,000,000 seconds since 1970


def found(values: pa.Array, time_format: str) -> tuple[list[str], str]:
    """Times as ISO 8601 in UTC, and what is said of them."""
    survey = TimeSurvey("time", "--split-by-time", time_format)
    read = survey.read(Block(Path("t.csv"), 0, 0, pa.RecordBatch.from_arrays([values], ["time"])))
    return [np.datetime64(int(time), "us").item().isoformat() for time in read], survey.finish()


@dataclass(frozen=True)
class Times:
    """
    Attributes:
        values: of the column.
        wanted: the time of the first one; or what the error says, with … for any text.
        read_as: how the times were read, for people; empty where they are refused.
        time_format: of ``--time-format``.
    """

    values: list[Any] | pa.Array
    wanted: str
    read_as: str = ""
    time_format: str = ""


ACCEPTED = {
    "seconds": Times([1_700_000_000, 1_700_000_060], NOVEMBER, "s since 1970"),
    "seconds as text": Times(["1700000000", " 1700000060 "], NOVEMBER, "s since 1970"),
    "parts of seconds": Times([1_700_000_000.25, 1_700_000_060.0], f"{NOVEMBER}.250000", "s since 1970"),
    "parts of seconds as text": Times(["1700000000.25", "1700000060"], f"{NOVEMBER}.250000", "s since 1970"),
    "decimals": Times([Decimal("1700000000.25"), Decimal(1)], f"{NOVEMBER}.250000", "s since 1970"),
    "unsigned numbers": Times(pa.array([1_700_000_000, 7], pa.uint64()), NOVEMBER, "s since 1970"),
    "before 1970": Times([-1, 7], "1969-12-31T23:59:59", "s since 1970"),
    "seconds since a beginning": Times([0, 20231114, 99999999], "1970-01-01T00:00:00", "s since 1970"),
    "a day of seconds that once look like a date": Times([1411142213, 1411142299], "2014-09-19T15:56:53", "s since 1970"),
    "seconds that look like dates, as said": Times([20231114], "1970-08-23T03:45:14", "s since 1970", "s"),
    "milliseconds": Times([1_700_000_000_123], f"{NOVEMBER}.123000", "ms since 1970", "ms"),
    "milliseconds as text": Times(["1700000000123"], f"{NOVEMBER}.123000", "ms since 1970", "ms"),
    "microseconds": Times([1_700_000_000_123_456], f"{NOVEMBER}.123456", "us since 1970", "us"),
    "nanoseconds": Times([1_700_000_000_123_456_789], f"{NOVEMBER}.123456", "ns since 1970", "ns"),
    "milliseconds that pandas made floating": Times([1.7e12, 1.7e12], NOVEMBER, "ms since 1970", "ms"),
    "a blank": Times(["2023-11-14 22:13:20"], NOVEMBER, "ISO 8601"),
    "a T": Times(["2023-11-14T22:13:20.5"], f"{NOVEMBER}.500000", "ISO 8601"),
    "a day": Times(["2023-11-14"], "2023-11-14T00:00:00", "ISO 8601"),
    "Z": Times(["2023-11-14T22:13:20.123Z"], f"{NOVEMBER}.123000", "ISO 8601"),
    "an offset": Times(["2023-11-15T06:13:20+08:00"], NOVEMBER, "ISO 8601"),
    "an offset to the west": Times(["2023-11-14 18:43:20-0330"], NOVEMBER, "ISO 8601"),
    "zones beside none": Times(["2023-11-15T06:13:20+08", "2023-11-14T22:13:20"], NOVEMBER, "ISO 8601"),
    "nanoseconds of ISO 8601": Times(["2023-11-14T22:13:20.123456789Z"], f"{NOVEMBER}.123456", "ISO 8601"),
    "Avazu": Times(["23111422", "23111500"], "2023-11-14T22:00:00", "%y%m%d%H", "%y%m%d%H"),
    "Avazu's numbers, whose zeros are gone": Times([9_111_422], "2009-11-14T22:00:00", "%y%m%d%H", "%y%m%d%H"),
    "days": Times([20231114], "2023-11-14T00:00:00", "%Y%m%d", "%Y%m%d"),
    "days that pandas made floating": Times([20231114.0], "2023-11-14T00:00:00", "%Y%m%d", "%Y%m%d"),
    "iPinYou": Times(["20231114221320123"], f"{NOVEMBER}.123000", "%Y%m%d%H%M%S%f", "%Y%m%d%H%M%S%f"),
    "slashes": Times(["14/11/2023 22:13"], "2023-11-14T22:13:00", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M"),
    "a web server's log": Times(["15/Nov/2023:06:13:20 +0800"], NOVEMBER, "%d/%b/%Y:%H:%M:%S %z", "%d/%b/%Y:%H:%M:%S %z"),
    "timestamps": Times([datetime(2023, 11, 14, 22, 13, 20)], NOVEMBER, "timestamp[us]"),
    "timestamps of a zone": Times(
        pa.array([datetime(2023, 11, 15, 6, 13, 20, tzinfo=timezone(timedelta(hours=8)))], pa.timestamp("ms", "+08:00")),
        NOVEMBER,
        "timestamp[ms, tz=+08:00]",
    ),
    "dates": Times([date(2023, 11, 14)], "2023-11-14T00:00:00", "date32[day]"),
    "timestamps beside a format": Times([datetime(2023, 11, 14, 22, 13, 20)], NOVEMBER, "timestamp[us]", "ms"),
    "texts of a dictionary": Times(pa.array([NOVEMBER]).dictionary_encode(), NOVEMBER, "ISO 8601"),
}  # fmt: skip
ASKS = "--split-by-time time: {} in t.csv, row {}; allowed: {}"
DATES = "seconds since 1970; the whole column looks like dates: give --time-format '{}', or --time-format s if they are seconds"
FUTURE = "times up to now, numbers in seconds since 1970; try --time-format {}"
EVERY_ROW = "a time in every row; leave such rows out"
KNOWN = "seconds since 1970, or times such as 2024-05-31T12:00:00"
OTHER = f"{KNOWN}; --time-format tells another format"
REFUSED = {
    "days": Times([20231114, 20231115], ASKS.format(20231114, 1, DATES.format("%Y%m%d"))),
    "days as text": Times(["20231114", "20231115"], ASKS.format("'20231114'", 1, DATES.format("%Y%m%d"))),
    "days that pandas made floating": Times([20231114.0], ASKS.format(20231114.0, 1, DATES.format("%Y%m%d"))),
    "Avazu": Times(["14102100"], ASKS.format("'14102100'", 1, DATES.format("%y%m%d%H"))),
    "Avazu with minutes": Times([1410210059], ASKS.format(1410210059, 1, DATES.format("%y%m%d%H%M"))),
    "months": Times([202311, 202312], ASKS.format(202311, 1, DATES.format("%Y%m"))),
    "short days": Times([231114, 231201], ASKS.format(231114, 1, DATES.format("%y%m%d"))),
    "years": Times([1999, 2023], ASKS.format(1999, 1, DATES.format("%Y"))),
    "hours": Times([2023111422], ASKS.format(2023111422, 1, FUTURE.format("'%Y%m%d%H'"))),
    "minutes": Times(["202311142213"], ASKS.format("'202311142213'", 1, FUTURE.format("'%Y%m%d%H%M'"))),
    "seconds of days": Times([20231114221320], ASKS.format(20231114221320, 1, FUTURE.format("'%Y%m%d%H%M%S'"))),
    "iPinYou": Times([20231114221320123], ASKS.format(20231114221320123, 1, FUTURE.format("'%Y%m%d%H%M%S%f'"))),
    "milliseconds": Times([1, 1_700_000_000_000], ASKS.format(1_700_000_000_000, 2, FUTURE.format("ms"))),
    "microseconds": Times([1_700_000_000_000_000], ASKS.format(1_700_000_000_000_000, 1, FUTURE.format("us"))),
    "nanoseconds": Times(["1700000000000000000"], ASKS.format("'1700000000000000000'", 1, FUTURE.format("ns"))),
    "slashes": Times(["14/11/2023 22:13"], ASKS.format("'14/11/2023 22:13'", 1, OTHER)),
    "one that is none": Times(["1700000000", "soon"], ASKS.format("'soon'", 2, OTHER)),
    "a missing time": Times([1_700_000_000, None], ASKS.format("a missing value", 2, EVERY_ROW)),
    "a blank for a time": Times([NOVEMBER, " "], ASKS.format("' '", 2, EVERY_ROW)),
    "not a number": Times([1.7e9, float("nan")], ASKS.format("nan", 2, EVERY_ROW)),
    "digits missing": Times(
        ["20231114", "2023111"], ASKS.format("'2023111'", 2, "what --time-format %Y%m%d says…"), time_format="%Y%m%d"
    ),
    "another format": Times([NOVEMBER], ASKS.format(repr(NOVEMBER), 1, "what --time-format ms says"), time_format="ms"),
    "no such day": Times(
        ["31/02/2023"], ASKS.format("'31/02/2023'", 1, "what --time-format %d/%m/%Y says"), time_format="%d/%m/%Y"
    ),
    "lists": Times([[1]], ASKS.format("[1]", 1, f"{KNOWN}; the column is of type list<item: int64>")),
    "times of a day": Times(
        pa.array([5], pa.time32("s")), ASKS.format("00:00:05", 1, f"{KNOWN}; the column is of type time32[s]")
    ),
    "bool": Times([True], ASKS.format("True", 1, f"{KNOWN}; the column is of type bool")),
}  # fmt: skip


@pytest.mark.parametrize("times", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_times_are_read(times: Times) -> None:
    values = times.values if isinstance(times.values, pa.Array) else pa.array(times.values)
    read, said = found(values, times.time_format)
    assert read[0] == times.wanted
    assert said == f"{min(read)} to {max(read)} UTC, read as {times.read_as}"


@pytest.mark.parametrize("times", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_one_time_is_read_as_a_column_of_it(times: Times) -> None:
    """A service has them one by one."""
    value = times.values[0].as_py() if isinstance(times.values, pa.Array) else times.values[0]
    assert TableFormat(time=times.time_format).microseconds(value) == np.datetime64(times.wanted, "us").astype(int)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.float64, np.float32])
def test_one_time_may_be_a_number_of_numpy(kind: type[np.number]) -> None:
    found = TableFormat().microseconds(kind(1_700_000_000))
    assert found == int(kind(1_700_000_000)) * 1_000_000
    assert type(found) is int


@pytest.mark.parametrize(
    "name", ["slashes", "one that is none", "digits missing", "another format", "no such day", "lists", "bool"]
)
def test_one_value_that_is_no_time_is_refused(name: str) -> None:
    times = REFUSED[name]
    with pytest.raises(ValueError, match=r"\S"):
        TableFormat(time=times.time_format).microseconds(times.values[-1])


@pytest.mark.parametrize("text", ["1e9999999999999999999", "1e-9999999999999999999", "1" * 309 + ".5"])
def test_one_number_beyond_those_of_decimals_and_floats_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        TableFormat().microseconds(text)


@pytest.mark.parametrize("text", ["1e10000000", "1e-10000000", "0e10000000", "0." + "1" * 10**6, "1/2", "1_000", "٣"])
def test_one_number_that_no_column_has_is_refused_at_once(text: str) -> None:
    """A service would compute the powers of ten for hours, in one request."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r"\S"):
        TableFormat().microseconds(text)
    if "e" in text:
        with pytest.raises(ValueError, match=r"\S"):
            TableFormat().microseconds(Decimal(text))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("times", REFUSED.values(), ids=REFUSED.keys())
def test_times_that_could_be_meant_otherwise_are_refused(times: Times) -> None:
    values = times.values if isinstance(times.values, pa.Array) else pa.array(times.values)
    with pytest.raises(DataError) as refused:
        found(values, times.time_format)
    assert_fits(str(refused.value), times.wanted)


def test_numbers_are_dates_only_if_all_are(tmp_path: Path) -> None:
    """A block of numbers may look like dates by chance."""
    for name, content in (("a", "20231114\n"), ("b", "20231199\n")):
        (tmp_path / f"{name}.csv").write_text(f"time\n{content * 3}")
    files = [open_file(tmp_path / f"{name}.csv") for name in "ab"]
    assert TimeSplit.of(files, "time", "--split-by-time", "", 0.5).found.endswith("read as s since 1970")


def test_the_summary_says_how_times_were_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = random_table()
    zones = pa.array([f"{time.isoformat()}Z" for time in table["time"].to_pylist()])
    changed = write_table(table.set_column(6, "time", zones), tmp_path / "t.csv")
    arguments = ["table", "--input", str(changed), "--output", str(tmp_path / "out"), "--label", "clicked", "--sparse", "color"]
    assert cli.main([*arguments, "--split-by-time", "time"]) == 0
    last = (datetime(2023, 11, 14, 22, 13, 20) + timedelta(minutes=199)).isoformat()
    assert f"\ntimes: {NOVEMBER} to {last} UTC, read as ISO 8601\n" in capsys.readouterr().out


def test_histories_and_what_is_applied_later_read_times_alike(tmp_path: Path) -> None:
    """The set of a table with times in milliseconds is that of the table with timestamps."""
    table = random_table()
    milliseconds = pa.array([time.timestamp() * 1000 for time in table["time"].cast(pa.timestamp("s", "UTC")).to_pylist()])
    other = write_table(table.set_column(6, "time", milliseconds.cast(pa.int64())), tmp_path / "other.parquet")
    history = ("--history", "user", "time", "color", "--sparse", "user,color")
    one = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "one", *history)
    two = prepare(other, tmp_path / "two", *history, "--time-format", "ms")
    three = prepare(other, tmp_path / "three", "--transformation", str(tmp_path / "two"), "--held-out", "0.2", command="apply")
    assert two.transformation.table_format == three.transformation.table_format == TableFormat(time="ms")
    for prepared in (two, three):
        for split, arrays in one.splits.items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(prepared.splits[split][name], array)
        for name in ("interactions/single.npy", "interactions/times.npy"):  # gaps, and times in seconds
            np.testing.assert_array_equal(np.load(prepared.folder / name), np.load(one.folder / name))


def test_times_that_do_not_count_from_1970_tell_no_unit() -> None:
    hour, of_2024 = 3600 * 10**6, 1_704_067_200 * 10**6
    in_ms = TableFormat(time="ms")
    assert not in_ms.is_of_another_unit(hour // 2, first=hour)
    assert in_ms.is_of_another_unit(of_2024 // 1000 + hour, first=of_2024)
