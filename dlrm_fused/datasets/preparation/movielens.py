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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.histories import (
    GAP_ROWS,
    Histories,
    count_earlier,
    find_histories,
    write_interactions,
)
from dlrm_fused.datasets.preparation.malformed import MalformedLines
from dlrm_fused.datasets.preparation.movielens_releases import Release, read_release
from dlrm_fused.datasets.preparation.table.times import MICROSECONDS
from dlrm_fused.datasets.preparation.writer import SPLITS, SplitFiles, id_columns, new_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.errors import DataError
from dlrm_fused.paths import user_path

RECBOLE = "recbole==1.2.1"
RECBOLE_FOLDER = "recbole/dataset_example/ml-100k/"
SECONDS_PER_YEAR = 365.2425 * 24 * 3600
# The age groups of the 1M release begin at these ages; id 1 is the first group.
AGE_GROUPS = (18, 25, 35, 45, 50, 56)
TEXTS = ("gender", "occupation")
DENSE_FEATURES = ("release_year", "years_since_release", "user_activity", "item_popularity", "user_age")
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
    malformed = MalformedLines(options.max_malformed)
    with new_output(options.output, options.overwrite) as folder:
        release = read_source(options.source, malformed)
        malformed.finish()
        info = _write(release, options, malformed, folder)
    malformed.print_report()
    return info


def read_source(source: str, malformed: MalformedLines) -> Release:
    """Return the release in a folder, or, for ``recbole``, the 100K one, downloaded.

    Raises:
        DataError: if it cannot be downloaded, is not a release, or has too many malformed lines.
    """
    if source != "recbole":
        return read_release(user_path(source), malformed)
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


def _write(release: Release, options: MovieLensOptions, malformed: MalformedLines, folder: Path) -> PreparedInfo:
    rows = _split_rows(release.ratings, options)
    train = rows["train"]
    histories = _histories(release.ratings, options.history) if options.history else None
    ratings = _with_features(release, train, histories)
    single = ["user_id", "item_id", *(["age_group", "gender_id", "occupation_id"] if len(release.users) else [])]
    dense = _scaled(_raw_dense(ratings, has_users=len(release.users) > 0), train)
    pooling = ratings[train]["genre_ids"].list.len().to_numpy().mean()
    genres = SparseFeature("genres", _genres(release).len() + 1, round(float(pooling), 4), jagged=True)
    names = ("user", "item", "age", "gender", "occupation")
    features = (*(SparseFeature(name, _rows(release, ratings[train], name)) for name in names[: len(single)]), genres)
    has_times = options.split is SplitBy.time
    schema = DatasetSchema(DENSE_FEATURES[: dense.shape[1]], features, history_length=options.history, has_times=has_times)
    if histories:
        token_features = _write_tokens(folder, schema, ratings, histories, train)
        schema = replace(schema, token_features=token_features, has_token_times=True)
    for split in SPLITS:
        part = ratings.select("rating", *single, "genre_ids")[rows[split]]
        with ExitStack() as stack:
            labels = part["rating"].to_numpy() >= options.like_rating
            ids = id_columns(part.select(*single, genres="genre_ids"))
            windows = histories.windows[rows[split]] if histories else None
            times = ratings["timestamp"].to_numpy()[rows[split]] * MICROSECONDS
            SplitFiles(folder / split, schema, stack).append(labels, dense[rows[split]], *ids, windows=windows, times=times)
    origin = {**asdict(options), "data_set": "movielens", "release": release.name, **malformed.summary()}
    origin.update(output=str(options.output), split=options.split.name)
    samples = {split: len(rows[split]) for split in SPLITS}
    info = PreparedInfo(schema, samples, origin, interactions=len(ratings) if histories else 0)
    info.save(folder)
    return info


def _histories(ratings: pl.DataFrame, length: int) -> Histories:
    users, movies, times = (ratings[name].to_numpy() for name in ("user", "movie", "timestamp"))
    return find_histories(users, movies, times, length)


def _split_rows(ratings: pl.DataFrame, options: MovieLensOptions) -> dict[str, Int]:
    n = len(ratings)
    if n < 10:
        raise DataError(f"--source {options.source}: {n} ratings, too few for three splits; at least 10 are needed")
    if options.split is SplitBy.time:
        order = np.argsort(ratings["timestamp"].to_numpy(), kind="stable")
    else:
        order = np.random.default_rng(options.seed).permutation(n)
    return dict(zip(SPLITS, np.split(order, [n * 8 // 10, n * 9 // 10]), strict=True))


def _with_features(release: Release, train: Int, histories: Histories | None) -> pl.DataFrame:
    """Join ratings with all that is known of their users and movies, as ids and numbers; null where a number is not known.

    The columns user_activity and item_popularity are numbers of ratings, in the training split or, for histories, before this
    rating.
    """
    ratings = release.ratings
    if histories:
        popularity = count_earlier(ratings["movie"].to_numpy(), ratings["timestamp"].to_numpy())
        ratings = ratings.with_columns(user_activity=histories.earlier, item_popularity=popularity)
    for key, number, count in (("user", "user_id", "user_activity"), ("movie", "item_id", "item_popularity")):
        seen = ratings[train].group_by(key).agg(pl.len().alias("in_training")).sort(key).with_row_index(number, offset=1)
        ratings = ratings.join(seen, on=key, how="left", maintain_order="left")
        if not histories:
            ratings = ratings.with_columns(pl.col("in_training").fill_null(0).alias(count))
        ratings = ratings.drop("in_training")
    age_group = sum(((pl.col("age") >= age).cast(pl.Int64) for age in AGE_GROUPS), start=pl.lit(1))
    users = release.users.select(
        "user",
        "age",
        age_group.alias("age_group"),
        *(pl.col(name).replace_strict(_vocabulary(release.users[name]), default=0).alias(f"{name}_id") for name in TEXTS),
    )
    genre_ids = pl.element().replace_strict(_vocabulary(_genres(release)), return_dtype=pl.Int64)
    movies = release.movies.select("movie", "year", genre_ids=pl.col("genres").list.eval(genre_ids).cast(pl.List(pl.Int32)))
    for table, key in ((users, "user"), (movies, "movie")):
        ratings = ratings.join(table, on=key, how="left", maintain_order="left")
    ids = ["user_id", "item_id", "age_group", *(f"{name}_id" for name in TEXTS)]
    has_genres = pl.col("genre_ids").list.len().fill_null(0) > 0
    unknown = pl.lit([0], pl.List(pl.Int32))
    return ratings.with_columns(
        pl.col(ids).fill_null(0).cast(pl.Int32), genre_ids=pl.when(has_genres).then("genre_ids").otherwise(unknown)
    )


def _genres(release: Release) -> pl.Series:
    return release.movies["genres"].explode().drop_nulls().unique()


def _vocabulary(names: pl.Series) -> dict[str, int]:
    """Ids 1, 2, ... in order of the names; the empty name, unknown, has none."""
    return {name: i for i, name in enumerate(sorted(set(names) - {""}), start=1)}


def _rows(release: Release, train: pl.DataFrame, name: str) -> int:
    """Return the rows of a sparse feature's table."""
    if name in ("user", "item"):
        return train["user" if name == "user" else "movie"].n_unique() + 1
    return len(AGE_GROUPS) + 2 if name == "age" else len(_vocabulary(release.users[name])) + 1


def _raw_dense(ratings: pl.DataFrame, has_users: bool) -> Float:
    """``[n, D]`` in natural units, NaN where not known."""
    year, age = (ratings[name].cast(pl.Float64).to_numpy() for name in ("year", "age"))
    rated_in = 1970 + ratings["timestamp"].to_numpy() / SECONDS_PER_YEAR
    counts = [np.log1p(ratings[name].to_numpy()) for name in ("user_activity", "item_popularity")]
    return np.stack([year, rated_in - year, *counts, *([age] if has_users else [])], axis=1)


def _scaled(dense: Float, train: Int) -> Float:
    """Scale to mean 0 and deviation 1 over the rows ``train``. A feature that is never known, or always the same, becomes 0."""
    of_train = dense[train]
    known = ~np.isnan(of_train)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, of_train, 0).sum(0) / count
    spread = np.sqrt((np.where(known, of_train - mean, 0) ** 2).sum(0) / count)
    return np.nan_to_num((dense - mean) / np.where(spread > 0, spread, 1), nan=0.0)


def _write_tokens(
    output: Path, schema: DatasetSchema, ratings: pl.DataFrame, histories: Histories, train: Int
) -> tuple[SparseFeature, ...]:
    """Write the interactions; returns the token features, with the average sizes of bags in the samples ``train``."""
    in_order = ratings.select("item_id", "rating", "genre_ids", "timestamp")[histories.order]
    tokens = in_order.select(
        token_item="item_id",
        token_response=np.rint(2 * in_order["rating"].to_numpy()).astype(np.int64),
        token_gap=histories.gap[histories.order],
        token_genres="genre_ids",
    )
    rows = {f"token_{feature.name}": feature.rows for feature in schema.sparse_features}
    rows |= {"token_response": RESPONSE_ROWS, "token_gap": GAP_ROWS}
    times, windows = in_order["timestamp"].to_numpy(), histories.windows[train]
    return write_interactions(output, tokens, times, rows, "token_response", windows, schema.history_length)
