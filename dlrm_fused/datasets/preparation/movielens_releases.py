"""Reading the releases of MovieLens, whose files differ in every respect, into the same three tables.

Releases: https://grouplens.org/datasets/movielens/ and the atomic files of https://recbole.io.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
Entity = TypeVar("Entity")


@dataclass(frozen=True)
class User:
    """A user as a release describes them; ``None`` or ``""`` stand for facts that it does not give."""

    age: int | None
    gender: str
    occupation: str


@dataclass(frozen=True)
class Movie:
    year: int | None
    genres: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """The three tables of a release.

    Attributes:
        ratings: columns user, movie (int64), rating (float32), timestamp (int64, seconds since 1970), in file order.
        users: empty where the release says nothing about users.
    """

    name: str
    ratings: pl.DataFrame
    users: dict[int, User]
    movies: dict[int, Movie]


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
    def user(fields: Sequence[str]) -> tuple[int, User]:
        return _id(fields[0]), User(_age(fields[1]), fields[2], fields[3])

    def movie(fields: Sequence[str]) -> tuple[int, Movie]:
        flags = fields[5:]
        genres = [genre for genre, flag in zip(GENRES_100K, flags, strict=True) if flag == "1"]
        return _id(fields[0]), Movie(_year(fields[2][-4:]), _known(genres))

    users = _read_entities(_delimited(folder / "u.user", "|"), 5, user, malformed)
    movies = _read_entities(_delimited(folder / "u.item", "|"), 5 + len(GENRES_100K), movie, malformed)
    ratings = _read_ratings(folder / "u.data", "\t", ["user", "movie", "rating", "timestamp"], False, malformed)
    return Release("100k", ratings, users, movies)


def _read_dat(folder: Path, malformed: MalformedLines) -> Release:
    """Return the 1M release; the 10M one is the same without users.dat."""

    def user(fields: Sequence[str]) -> tuple[int, User]:
        return _id(fields[0]), User(_age(fields[2]), fields[1], fields[3])

    users_file = folder / "users.dat"
    users = _read_entities(_delimited(users_file, "::"), 5, user, malformed) if users_file.exists() else {}
    movies = _read_entities(_delimited(folder / "movies.dat", "::"), 3, _movie_of_title, malformed)
    ratings = _read_ratings(folder / "ratings.dat", "::", ["user", "movie", "rating", "timestamp"], False, malformed)
    return Release("dat", ratings, users, movies)


def _read_csv(folder: Path, malformed: MalformedLines) -> Release:
    movies = _read_entities(_quoted_csv(folder / "movies.csv"), 3, _movie_of_title, malformed)
    ratings = _read_ratings(folder / "ratings.csv", ",", ["user", "movie", "rating", "timestamp"], True, malformed)
    return Release("csv", ratings, {}, movies)


def _read_recbole(folder: Path, malformed: MalformedLines) -> Release:
    found = sorted(folder.glob("*.inter"))
    if len(found) > 1:
        raise DataError(f"--source {folder}: more than one .inter file: {', '.join(path.name for path in found)}")
    inter, users_file, movies_file = found[0], found[0].with_suffix(".user"), found[0].with_suffix(".item")

    def field(fields: Sequence[str], columns: list[str], name: str) -> str:
        return fields[columns.index(name)] if name in columns else ""

    users: dict[int, User] = {}
    if users_file.exists():
        user_columns = _recbole_columns(users_file, ["user_id"])

        def user(fields: Sequence[str]) -> tuple[int, User]:
            of = [field(fields, user_columns, name) for name in ("user_id", "age", "gender", "occupation")]
            return _id(of[0]), User(_age(of[1]), of[2], of[3])

        users = _read_entities(_delimited(users_file, "\t", header=True), len(user_columns), user, malformed)

    movie_columns = _recbole_columns(movies_file, ["item_id"])

    def movie(fields: Sequence[str]) -> tuple[int, Movie]:
        of = [field(fields, movie_columns, name) for name in ("item_id", "release_year", "class", "genre")]
        return _id(of[0]), Movie(_year(of[1]), _known((of[2] or of[3]).split(" ")))

    movies = _read_entities(_delimited(movies_file, "\t", header=True), len(movie_columns), movie, malformed)
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
    fields = pl.col("line").str.strip_suffix("\r").str.split(separator)
    table = pl.DataFrame({"line": lines}, schema={"line": pl.String}).select(fields=fields)
    types = {"user": pl.Int64, "movie": pl.Int64, "rating": pl.Float32, "timestamp": pl.Int64}

    def column(name: str, kind: type[pl.DataType]) -> pl.Expr:
        text = pl.col("fields").list.get(columns.index(name), null_on_oob=True)
        return (
            text.cast(pl.Float64, strict=False).cast(kind, strict=False)
            if name == "timestamp"
            else text.cast(kind, strict=False)
        )

    table = table.select(
        pl.col("fields").list.len().alias("columns"), *(column(name, kind).alias(name) for name, kind in types.items())
    )
    reason = (
        pl.when(pl.col("columns") != len(columns))
        .then(pl.format(f"{{}} columns, expected {len(columns)}", "columns"))
        .when(pl.col("user").is_between(0, MAX_ID).not_().fill_null(True))
        .then(pl.lit("user id is not an integer of 0 to 2147483647"))
        .when(pl.col("movie").is_between(0, MAX_ID).not_().fill_null(True))
        .then(pl.lit("movie id is not an integer of 0 to 2147483647"))
        .when(pl.col("rating").is_between(0, 5).not_().fill_null(True))
        .then(pl.lit("rating is not a number of 0 to 5"))
        .when(pl.col("timestamp").is_null())
        .then(pl.lit("timestamp is not a number"))
    )
    reasons = table.select(reason.alias("reason"))["reason"]
    for row in reasons.is_not_null().arg_true().to_list():
        malformed.add(path, first_line + row, reasons[row])
    return table.filter(reasons.is_null()).select(list(types))


def _read_entities(
    lines: Iterator[tuple[Path, int, list[str]]],
    columns: int,
    parse: Callable[[Sequence[str]], tuple[int, Entity]],
    malformed: MalformedLines,
) -> dict[int, Entity]:
    """Read a small table into a dictionary by id; a later line for the same id replaces the earlier one."""
    entities: dict[int, Entity] = {}
    for path, number, fields in lines:
        malformed.seen(1)
        if len(fields) != columns:
            malformed.add(path, number, f"{len(fields)} columns, expected {columns}")
            continue
        try:
            key, entity = parse(fields)
        except ValueError as error:
            malformed.add(path, number, str(error))
            continue
        entities[key] = entity
    return entities


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


def _movie_of_title(fields: Sequence[str]) -> tuple[int, Movie]:
    year = re.search(r"\((\d{4})\)\s*$", fields[1])
    return _id(fields[0]), Movie(int(year[1]) if year else None, _known(fields[2].split("|")))


def _known(genres: Sequence[str]) -> tuple[str, ...]:
    return tuple(genre for genre in genres if genre not in NO_GENRE)


def _id(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_ID:
        raise ValueError(f"id {text} is out of range")
    return value


def _age(text: str) -> int | None:
    return int(text) if text else None


def _year(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{4}", text) else None
