"""Reading the releases of MovieLens, whose files differ in every respect, into the same three tables.

Releases: https://grouplens.org/datasets/movielens/ and the atomic files of https://recbole.io.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from dlrm_fused.datasets.preparation.blocks import check_input, read_blocks
from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.errors import DataError

# u.item of the 100K release marks genres by 19 flags, in this order.
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
NO_GENRE = {"unknown", "(no genres listed)", ""}
MAX_ID = 2**31 - 1
RATINGS = ["user", "movie", "rating", "timestamp"]
USERS = {"user": pl.Int64, "age": pl.Int64, "gender": pl.String, "occupation": pl.String}
MOVIES = {"movie": pl.Int64, "year": pl.Int64, "genres": pl.List(pl.String)}
Row = tuple[int, *tuple[Any, ...]]


@dataclass(frozen=True)
class Release:
    """The three tables of a release.

    Attributes:
        ratings: columns user, movie (int64), rating (float32), timestamp (int64, seconds since 1970), in file order.
        users: columns ``USERS``, null or an empty text where a fact is not given; no rows where the release has no users.
        movies: columns ``MOVIES``, likewise.
    """

    name: str
    ratings: pl.DataFrame
    users: pl.DataFrame
    movies: pl.DataFrame


def read_release(folder: Path, malformed: MalformedLines) -> Release:
    """Detect the layout of ``folder`` and read it.

    Raises:
        DataError: if the folder holds no known layout, a file is missing or empty, or too many lines are malformed.
    """
    if not folder.is_dir():
        raise DataError(f"--source {folder}: no such folder; give one of MovieLens files, or 'recbole' to download ml-100k")
    layouts: dict[str, Callable[[Path, MalformedLines], Release]] = {
        "u.data": _read_100k,
        "ratings.dat": _read_dat,
        "ratings.csv": _read_csv,
        "*.inter": _read_recbole,
    }
    for pattern, read in layouts.items():
        if any(folder.glob(pattern)):
            return read(folder, malformed)
    raise DataError(f"--source {folder}: no MovieLens release: none of {', '.join(layouts)} is there")


def _read_100k(folder: Path, malformed: MalformedLines) -> Release:
    def movie(fields: Sequence[str]) -> Row:
        genres = [genre for genre, flag in zip(GENRES_100K, fields[5:], strict=True) if flag == "1"]
        return _id(fields[0]), _year(fields[2][-4:]), _known(genres)

    users = _read_table(_delimited(folder / "u.user", "|"), 5, _user_of([0, 1, 2, 3]), USERS, malformed)
    movies = _read_table(_delimited(folder / "u.item", "|"), 5 + len(GENRES_100K), movie, MOVIES, malformed)
    return Release("100k", _read_ratings(folder / "u.data", "\t", RATINGS, False, malformed), users, movies)


def _read_dat(folder: Path, malformed: MalformedLines) -> Release:
    """Return the 1M release; the 10M one is the same without users.dat."""
    path = folder / "users.dat"
    lines = _delimited(path, "::") if path.exists() else iter(())
    users = _read_table(lines, 5, _user_of([0, 2, 1, 3]), USERS, malformed)
    movies = _read_table(_delimited(folder / "movies.dat", "::"), 3, _movie_of_title, MOVIES, malformed)
    return Release("dat", _read_ratings(folder / "ratings.dat", "::", RATINGS, False, malformed), users, movies)


def _read_csv(folder: Path, malformed: MalformedLines) -> Release:
    movies = _read_table(_quoted_csv(folder / "movies.csv"), 3, _movie_of_title, MOVIES, malformed)
    ratings = _read_ratings(folder / "ratings.csv", ",", RATINGS, True, malformed)
    return Release("csv", ratings, pl.DataFrame(schema=USERS), movies)


def _read_recbole(folder: Path, malformed: MalformedLines) -> Release:
    found = sorted(folder.glob("*.inter"))
    if len(found) > 1:
        raise DataError(f"--source {folder}: more than one .inter file: {', '.join(path.name for path in found)}")
    inter, users_file, movies_file = found[0], found[0].with_suffix(".user"), found[0].with_suffix(".item")

    def positions(columns: list[str], *names: str) -> list[int | None]:
        return [columns.index(name) if name in columns else None for name in names]

    users = pl.DataFrame(schema=USERS)
    if users_file.exists():
        columns = _recbole_columns(users_file, ["user_id"])
        user = _user_of(positions(columns, "user_id", "age", "gender", "occupation"))
        users = _read_table(_delimited(users_file, "\t", header=True), len(columns), user, USERS, malformed)

    columns = _recbole_columns(movies_file, ["item_id"])
    of_movie = positions(columns, "item_id", "release_year", "class", "genre")

    def movie(fields: Sequence[str]) -> Row:
        number, year, of_class, genre = _chosen(fields, of_movie)
        return _id(number), _year(year), _known((of_class or genre).split(" "))

    movies = _read_table(_delimited(movies_file, "\t", header=True), len(columns), movie, MOVIES, malformed)
    needed = {"user_id": "user", "item_id": "movie", "rating": "rating", "timestamp": "timestamp"}
    columns = [needed.get(name, name) for name in _recbole_columns(inter, list(needed))]
    return Release("recbole", _read_ratings(inter, "\t", columns, True, malformed), users, movies)


def _recbole_columns(path: Path, needed: list[str]) -> list[str]:
    """Return names in the header line of an atomic file, which reads ``name:type<tab>name:type``."""
    check_input(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        columns = [column.split(":")[0] for column in file.readline().rstrip("\r\n").split("\t")]
    for name in needed:
        if name not in columns:
            raise DataError(f"{path}:1: no column {name}; the header names {', '.join(columns)}")
    return columns


def _read_ratings(path: Path, separator: str, columns: list[str], header: bool, malformed: MalformedLines) -> pl.DataFrame:
    parts = []
    check_input(path)
    with tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=path.name) as bar:
        for block in read_blocks(path):
            lines = block.data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
            skipped = int(header and block.first == 0)
            parts.append(_parse_ratings(lines[skipped:], block.first + 1 + skipped, path, separator, columns, malformed))
            malformed.seen(len(lines) - skipped)
            bar.update(block.bytes_on_disk)
    ratings = pl.concat(parts)
    if ratings.is_empty():
        raise DataError(f"{path}: no rating that can be used")
    return ratings


def _parse_ratings(
    lines: list[str], first_line: int, path: Path, separator: str, columns: list[str], malformed: MalformedLines
) -> pl.DataFrame:
    fields = pl.DataFrame({"line": lines}, schema={"line": pl.String})["line"].str.strip_suffix("\r").str.split(separator)
    texts = {name: fields.list.get(columns.index(name), null_on_oob=True) for name in RATINGS}
    types = {"user": pl.Int64, "movie": pl.Int64, "rating": pl.Float32, "timestamp": pl.Float64}
    numbers = [texts[name].cast(kind, strict=False).alias(name) for name, kind in types.items()]
    table = pl.DataFrame([*numbers, fields.list.len().alias("columns")]).cast({"timestamp": pl.Int64}, strict=False)

    def is_outside(name: str, highest: int) -> pl.Expr:
        return pl.col(name).is_between(0, highest).not_().fill_null(value=True)

    reason = (
        pl.when(pl.col("columns") != len(columns))
        .then(pl.format(f"{{}} columns, expected {len(columns)}", "columns"))
        .when(is_outside("user", MAX_ID))
        .then(pl.lit(f"user id is not an integer of 0 to {MAX_ID}"))
        .when(is_outside("movie", MAX_ID))
        .then(pl.lit(f"movie id is not an integer of 0 to {MAX_ID}"))
        .when(is_outside("rating", 5))
        .then(pl.lit("rating is not a number of 0 to 5"))
        .when(pl.col("timestamp").is_null())
        .then(pl.lit("timestamp is not a number"))
    )
    reasons = table.select(reason.alias("reason"))["reason"]
    for row in reasons.is_not_null().arg_true().to_list():
        malformed.add(path, first_line + row, reasons[row])
    return table.filter(reasons.is_null()).select(RATINGS)


def _read_table(
    lines: Iterable[tuple[Path, int, list[str]]],
    columns: int,
    parse: Callable[[Sequence[str]], Row],
    schema: Mapping[str, Any],
    malformed: MalformedLines,
) -> pl.DataFrame:
    """Read a small table by its ids, the first column; a later line for the same id replaces the earlier one."""
    rows: dict[int, Row] = {}
    for path, number, fields in lines:
        malformed.seen(1)
        if len(fields) != columns:
            malformed.add(path, number, f"{len(fields)} columns, expected {columns}")
            continue
        try:
            row = parse(fields)
        except ValueError as error:
            malformed.add(path, number, str(error))
            continue
        rows[row[0]] = row
    return pl.DataFrame(list(rows.values()), schema=dict(schema), orient="row")


def _delimited(path: Path, separator: str, header: bool = False) -> Iterator[tuple[Path, int, list[str]]]:
    """(path, line number, fields) of every line."""
    check_input(path)
    encoding = "utf-8" if _is_utf8(path) else "latin-1"
    with path.open(encoding=encoding, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not (header and number == 1):
                yield path, number, line.rstrip("\r\n").split(separator)


def _quoted_csv(path: Path) -> Iterator[tuple[Path, int, list[str]]]:
    check_input(path)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        next(reader)
        for fields in reader:
            yield path, reader.line_num, fields


def _is_utf8(path: Path) -> bool:
    """Older releases are in Latin-1."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _user_of(positions: Sequence[int | None]) -> Callable[[Sequence[str]], Row]:
    """Return what makes a user of the fields at these positions: id, age, gender, occupation."""

    def user(fields: Sequence[str]) -> Row:
        number, age, gender, occupation = _chosen(fields, positions)
        return _id(number), int(age) if age else None, gender, occupation

    return user


def _chosen(fields: Sequence[str], positions: Sequence[int | None]) -> list[str]:
    return ["" if at is None else fields[at] for at in positions]


def _movie_of_title(fields: Sequence[str]) -> Row:
    year = re.search(r"\((\d{4})\)\s*$", fields[1])
    return _id(fields[0]), int(year[1]) if year else None, _known(fields[2].split("|"))


def _known(genres: Sequence[str]) -> list[str]:
    return [genre for genre in genres if genre not in NO_GENRE]


def _id(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_ID:
        raise ValueError(f"id {text} is out of range")
    return value


def _year(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{4}", text) else None
