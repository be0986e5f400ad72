"""Preparing MovieLens: will this user rate this movie 4 or higher?

Ids: 0 stands for unknown in every sparse feature: a user or a movie that the training split does not hold, or something
that the release does not tell. Dense features are scaled to mean 0 and standard deviation 1 over the training split.

With histories, what is counted is counted up to the time of the rating, so that no input depends on what comes later.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.histories import (
    GAP_ROWS,
    Histories,
    count_earlier,
    find_histories,
    mean_bag,
    write_interactions,
)
from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.datasets.preparation.movielens_releases import Movie, Release, User, read_release
from dlrm_fused.datasets.preparation.writer import SPLITS, SplitFiles, claim_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.errors import DataError

RECBOLE = "recbole==1.2.1"
RECBOLE_FOLDER = "recbole/dataset_example/ml-100k/"
SECONDS_PER_YEAR = 365.2425 * 24 * 3600
# The age groups of the 1M release begin at these ages; id 1 is the first group.
AGE_GROUPS = np.array([18, 25, 35, 45, 50, 56])
RESPONSE_ROWS = 11  # ratings of 0 to 5 in halves

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class SplitBy(Enum):
    random = "random"  # 80% / 10% / 10%, drawn by the seed
    time = "time"  # the oldest 80%, the next 10%, the newest 10%


@dataclass(frozen=True)
class MovieLensOptions:
    """The options of ``data/prepare.py movielens``, whose help says what each means."""

    source: str
    output: Path
    like_rating: float = 4.0
    split: SplitBy = SplitBy.random
    seed: int = 1
    max_malformed: float = 0.001
    overwrite: bool = False
    history: int = 0


@dataclass(frozen=True)
class Features:
    """Model inputs of ratings: dense ``[n, D]``, ids ``[n, S]``, and for each rating its row in the genre lists."""

    dense: Float
    ids: Int
    genre_row: Int


def prepare_movielens(options: MovieLensOptions) -> PreparedInfo:
    """Write the prepared set to ``options.output``.

    Raises:
        DataError: if the source is not a release, has too many malformed lines or too few ratings, or if the output is
            taken, or if histories are asked for together with a random split.
    """
    if options.history < 0 or (options.history and options.split is SplitBy.random):
        raise DataError(
            f"--history {options.history}: allowed: 0, or 1 or more together with --split time: at random, ratings of the "
            "training split would come after those of the test split, and their histories tell the labels"
        )
    claim_output(options.output, options.overwrite)
    malformed = MalformedLines(options.max_malformed)
    release = read_source(options.source, malformed)
    malformed.finish()
    return _write(release, options, malformed)


def read_source(source: str, malformed: MalformedLines) -> Release:
    """Return the release in a folder, or, for ``recbole``, the 100K one, downloaded.

    Raises:
        DataError: if it cannot be downloaded, is not a release, or has too many malformed lines.
    """
    if source != "recbole":
        return read_release(Path(source), malformed)
    with tempfile.TemporaryDirectory() as folder:
        return read_release(download_recbole(Path(folder)), malformed)


def download_recbole(folder: Path) -> Path:
    """Fetch the MovieLens-100K files that the recbole package carries; returns the folder that they are in.

    Raises:
        DataError: if pip cannot download the package.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", RECBOLE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise DataError(f"--source recbole: pip cannot download {RECBOLE}: {reason}; give a folder of MovieLens files instead")
    wheel = next(folder.glob("recbole-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for suffix in ("inter", "item", "user"):
            (folder / f"ml-100k.{suffix}").write_bytes(archive.read(f"{RECBOLE_FOLDER}ml-100k.{suffix}"))
    return folder


def _write(release: Release, options: MovieLensOptions, malformed: MalformedLines) -> PreparedInfo:
    rows = _split_rows(release.ratings, options)
    histories = _histories(release.ratings, options.history) if options.history else None
    ratings = _with_counts(release.ratings, rows["train"], histories)
    encoder = _Encoder(release, ratings[rows["train"]])
    schema = replace(encoder.schema(), history_length=options.history)
    if histories:
        schema = replace(schema, token_features=_token_features(encoder, ratings, histories, rows["train"], options.history))
        _write_tokens(options.output, schema, encoder, ratings, histories)
    for split in SPLITS:
        part = ratings[rows[split]]
        features = encoder.encode(part)
        labels, genres = part["rating"].to_numpy() >= options.like_rating, encoder.genres.take(features.genre_row)
        windows = histories.windows[rows[split]] if histories else None
        with ExitStack() as stack:
            files = SplitFiles(options.output / split, schema, stack)
            files.append(labels, features.dense, features.ids, {"genres": genres}, windows=windows)
    origin = {**asdict(options), "data_set": "movielens", "release": release.name, **malformed.summary()}
    origin.update(output=str(options.output), split=options.split.name)
    samples = {split: len(rows[split]) for split in SPLITS}
    info = PreparedInfo(schema, samples, origin, interactions=len(ratings) if histories else 0)
    info.save(options.output)
    if malformed.count:
        print(malformed.report(), file=sys.stderr)
    return info


def _histories(ratings: pl.DataFrame, length: int) -> Histories:
    users, movies, times = (ratings[name].to_numpy() for name in ("user", "movie", "timestamp"))
    return find_histories(users, movies, times, length)


def _with_counts(ratings: pl.DataFrame, train: Int, histories: Histories | None) -> pl.DataFrame:
    """Add the columns user_activity and item_popularity: numbers of ratings, in the training split or, for histories, before
    this rating."""
    users, movies, times = (ratings[name].to_numpy() for name in ("user", "movie", "timestamp"))
    if histories:
        activity, popularity = histories.earlier, count_earlier(movies, times)
    else:
        activity, popularity = _count_in(users, train), _count_in(movies, train)
    return ratings.with_columns(user_activity=activity, item_popularity=popularity)


def _count_in(keys: Int, rows: Int) -> Int:
    """Return, for each rating, how often its key occurs among the ratings ``rows``."""
    distinct, number = np.unique(keys, return_inverse=True)
    return np.bincount(number[rows], minlength=len(distinct))[number]


def _write_tokens(output: Path, schema: DatasetSchema, encoder: _Encoder, ratings: pl.DataFrame, histories: Histories) -> None:
    """Write the interactions; single token features come in the order of :func:`_token_features`."""
    in_order = ratings[histories.order]
    movie = encoder.movie_row(in_order)
    response = np.rint(2 * in_order["rating"].to_numpy())
    single = np.stack([encoder.item_id(movie), response, histories.gap[histories.order]], axis=1)
    write_interactions(output, schema.token_features, single, {"token_genres": encoder.genres.take(movie)})


def _token_features(
    encoder: _Encoder, ratings: pl.DataFrame, histories: Histories, train: Int, length: int
) -> tuple[SparseFeature, ...]:
    """Return the token features, with the average sizes of bags in the samples ``train``."""
    genres = encoder.genres.lengths[encoder.movie_row(ratings[histories.order])]

    def feature(name: str, rows: int, ids: Int | None = None, history_only: bool = False) -> SparseFeature:
        pooling_factor = mean_bag(histories.windows[train], length, ids, history_only)
        return SparseFeature(name, rows, pooling_factor, ids is not None, history_only)

    return (
        feature("token_item", encoder.rows["item"]),
        feature("token_response", RESPONSE_ROWS, history_only=True),
        feature("token_gap", GAP_ROWS),
        feature("token_genres", encoder.rows["genres"], ids=genres),
    )


def _split_rows(ratings: pl.DataFrame, options: MovieLensOptions) -> dict[str, Int]:
    n = len(ratings)
    if n < 10:
        raise DataError(f"--source {options.source}: {n} ratings, too few for three splits; at least 10 are needed")
    if options.split is SplitBy.time:
        order = np.argsort(ratings["timestamp"].to_numpy(), kind="stable")
    else:
        order = np.random.default_rng(options.seed).permutation(n)
    return dict(zip(SPLITS, np.split(order, [n * 8 // 10, n * 9 // 10]), strict=True))


class _Lists:
    """Lists of ids, row after row."""

    def __init__(self, rows: Iterable[list[int]]) -> None:
        lists = list(rows)
        self.lengths = np.array([len(row) for row in lists], np.int64)
        self.values = np.fromiter((value for row in lists for value in row), np.int64)

    def take(self, rows: Int) -> tuple[Int, Int]:
        """Return the values of the lists of ``rows``, one after the other, and how many each has."""
        starts, lengths = (self.lengths.cumsum() - self.lengths)[rows], self.lengths[rows]
        return self.values[ranges(starts, lengths)], lengths


class _Encoder:
    """Turns ratings into model inputs; whatever is learned from data is learned from the training split."""

    def __init__(self, release: Release, train: pl.DataFrame) -> None:
        self._users = _Table(train["user"], release.users, User(None, "", ""))
        self._movies = _Table(train["movie"], release.movies, Movie(None, ()))
        self._has_users = bool(release.users)

        users, movies = self._users.entities, self._movies.entities
        genre_ids = _vocabulary(genre for movie in movies for genre in movie.genres)
        self.rows = {"user": self._users.rows, "item": self._movies.rows, "genres": len(genre_ids) + 1}
        self.genres = _Lists([genre_ids[genre] for genre in movie.genres] or [0] for movie in movies)
        self._year = _or_nan(movie.year for movie in movies)
        self._age = _or_nan(user.age for user in users)
        age_group = np.where(np.isnan(self._age), 0, 1 + np.searchsorted(AGE_GROUPS, self._age, side="right"))
        self._user_ids = np.zeros((len(users), 0), np.int64)
        if self._has_users:
            gender, occupation = _vocabulary(u.gender for u in users), _vocabulary(u.occupation for u in users)
            genders = np.array([gender.get(u.gender, 0) for u in users])
            occupations = np.array([occupation.get(u.occupation, 0) for u in users])
            self._user_ids = np.stack([age_group, genders, occupations], axis=1)
            self.rows.update(age=len(AGE_GROUPS) + 2, gender=len(gender) + 1, occupation=len(occupation) + 1)

        dense = self._raw_dense(train)
        # Something that is never known, or always the same, becomes 0.
        known = ~np.isnan(dense)
        self._mean = np.where(known, dense, 0).sum(0) / np.maximum(known.sum(0), 1)
        spread = np.sqrt((np.where(known, dense - self._mean, 0) ** 2).sum(0) / np.maximum(known.sum(0), 1))
        self._spread = np.where(spread > 0, spread, 1)
        self._pooling = float(self.genres.lengths[self.movie_row(train)].mean())

    def schema(self) -> DatasetSchema:
        dense = ["release_year", "years_since_release", "user_activity", "item_popularity"]
        single = ["user", "item"] + (["age", "gender", "occupation"] if self._has_users else [])
        genres = SparseFeature("genres", self.rows["genres"], round(self._pooling, 4), jagged=True)
        features = [SparseFeature(name, self.rows[name]) for name in single]
        return DatasetSchema(tuple(dense + (["user_age"] if self._has_users else [])), (*features, genres))

    def movie_row(self, ratings: pl.DataFrame) -> Int:
        """Row of each rating's movie in :attr:`genres` and :attr:`genre_count`."""
        return self._movies.row(ratings["movie"])

    def item_id(self, movie_row: Int) -> Int:
        return self._movies.ids[movie_row]

    def encode(self, ratings: pl.DataFrame) -> Features:
        user, movie = self._users.row(ratings["user"]), self.movie_row(ratings)
        ids = np.concatenate([self._users.ids[user, None], self.item_id(movie)[:, None], self._user_ids[user]], axis=1)
        dense = (self._raw_dense(ratings) - self._mean) / self._spread
        return Features(np.nan_to_num(dense, nan=0.0), ids, movie)

    def _raw_dense(self, ratings: pl.DataFrame) -> Float:
        """``[n, D]`` in natural units, NaN where not known."""
        user, movie = self._users.row(ratings["user"]), self.movie_row(ratings)
        rated_in = 1970 + ratings["timestamp"].to_numpy() / SECONDS_PER_YEAR
        columns = [
            self._year[movie],
            rated_in - self._year[movie],
            np.log1p(ratings["user_activity"].to_numpy()),
            np.log1p(ratings["item_popularity"].to_numpy()),
        ]
        return np.stack(columns + ([self._age[user]] if self._has_users else []), axis=1)


class _Table:
    """Users or movies by row; row 0 is one that nothing is known about.

    Attributes:
        ids: ``[rows of the table]`` id of each in its embedding table: 1, 2, ... in order of the release's ids for
            those in the training split, 0 for others.
    """

    def __init__(self, train: pl.Series, entities: dict[int, Any], unknown: Any) -> None:
        seen = np.unique(train.to_numpy())
        self._keys = np.union1d(seen, np.fromiter(entities, np.int64, len(entities)))
        self.entities = [unknown, *(entities.get(int(key), unknown) for key in self._keys)]
        self.ids = np.zeros(len(self.entities), np.int64)
        self.ids[1 + np.searchsorted(self._keys, seen)] = 1 + np.arange(len(seen))
        self.rows = len(seen) + 1

    def row(self, keys: pl.Series) -> Int:
        """Row in this table of each key, 0 for one that it does not hold."""
        wanted = keys.to_numpy()
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where(self._keys[at] == wanted, at + 1, 0)


def _vocabulary(names: Iterable[str]) -> dict[str, int]:
    """Ids 1, 2, ... in order of the names; the empty name, unknown, has none."""
    return {name: i for i, name in enumerate(sorted(set(names) - {""}), start=1)}


def _or_nan(values: Iterable[int | None]) -> Float:
    return np.array([np.nan if value is None else value for value in values], np.float64)
