"""Preparing MovieLens: every release gives the same features, splits are distinct, nothing is learned from the test split."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.datasets.preparation.movielens import MovieLensOptions, SplitBy, prepare_movielens
from dlrm_fused.datasets.preparation.movielens_releases import GENRES_100K
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.errors import DataError

SPLITS = ("train", "validation", "test")
# id: (age, gender, occupation), and id: (title, year, genres); movie 4 has no year and no genre.
USERS = {1: (24, "M", "writer"), 2: (56, "F", "artist"), 7: (17, "F", "writer")}
MOVIES = {
    1: ("Toy Story", 1995, ["Animation", "Children's", "Comedy"]),
    2: ("Léon, the Professional", 1994, ["Crime", "Drama"]),
    4: ("unknown", None, []),
    9: ("Alien", 1979, ["Sci-Fi"]),
}
# user, movie, rating, timestamp: the later, the larger the row.
RATINGS = [(list(USERS)[k % 3], list(MOVIES)[k // 3 % 4], 1 + k % 5, 880_000_000 + 1000 * k) for k in range(40)]


def write_100k(folder: Path) -> None:
    def movie(number: int) -> str:
        title, year, genres = MOVIES[number]
        flags = [str(int(g in genres or (not genres and g == "unknown"))) for g in GENRES_100K]
        return "|".join([str(number), f"{title} ({year})", f"01-Jan-{year}" if year else "", "", "", *flags])

    write(folder / "u.user", [f"{u}|{age}|{gender}|{job}|12345" for u, (age, gender, job) in USERS.items()])
    write(folder / "u.item", [movie(number) for number in MOVIES], encoding="latin-1")
    write(folder / "u.data", ["\t".join(map(str, rating)) for rating in RATINGS])


def write_1m(folder: Path) -> None:
    write(folder / "users.dat", [f"{u}::{gender}::{age}::{job}::12345" for u, (age, gender, job) in USERS.items()])
    write(folder / "movies.dat", [f"{m}::{titled(m)}::{genres(m)}" for m in MOVIES], encoding="latin-1")
    write(folder / "ratings.dat", ["::".join(map(str, rating)) for rating in RATINGS])


def write_25m(folder: Path) -> None:
    write(folder / "movies.csv", ["movieId,title,genres", *(f'{m},"{titled(m)}",{genres(m)}' for m in MOVIES)])
    write(folder / "ratings.csv", ["userId,movieId,rating,timestamp", *(",".join(map(str, r)) for r in RATINGS)])


def write_recbole(folder: Path) -> None:
    def movie(number: int) -> str:
        title, year, genres = MOVIES[number]
        return "\t".join([str(number), title, str(year or ""), " ".join(genres)])

    users = [f"{u}\t{age}\t{gender}\t{job}\t12345" for u, (age, gender, job) in USERS.items()]
    write(folder / "ml.user", ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users])
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
    write(folder / "ml.item", [header, *map(movie, MOVIES)])
    ratings = ["\t".join(map(str, rating)) for rating in RATINGS]
    write(folder / "ml.inter", ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings])


RELEASES = {"100k": write_100k, "1m": write_1m, "25m": write_25m, "recbole": write_recbole}


def titled(number: int) -> str:
    title, year, _ = MOVIES[number]
    return f"{title} ({year})" if year else title


def genres(number: int) -> str:
    return "|".join(MOVIES[number][2]) or "(no genres listed)"


def write(path: Path, lines: list[str], encoding: str = "utf-8") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding=encoding)


def prepare(source: Path, output: Path, **options: object) -> tuple[PreparedInfo, dict[str, dict[str, np.ndarray]]]:
    info = prepare_movielens(replace(MovieLensOptions(str(source), output), **options))
    assert PreparedInfo.load(output) == info
    return info, {s: {path.stem: np.load(path) for path in (output / s).glob("*.npy")} for s in SPLITS}


def genre_lists(split: dict[str, np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in np.split(split["genres.values"], split["genres.offsets"][1:-1])]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_100k(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("release", RELEASES)
def test_features_and_labels_are_those_of_the_rating(tmp_path: Path, release: str) -> None:
    RELEASES[release](tmp_path / "source")
    info, splits = prepare(tmp_path / "source", tmp_path / "out", split=SplitBy.time)
    names = [feature.name for feature in info.schema.sparse_features]
    users_known = release != "25m"
    assert names == ["user", "item", *(["age", "gender", "occupation"] if users_known else []), "genres"]
    assert info.samples == {"train": 32, "validation": 4, "test": 4}
    times = np.concatenate([np.load(tmp_path / "out" / split / "times.npy") for split in SPLITS])
    assert (times == np.sort(times)).all()
    assert times[0] >= 1_000_000 * 365 * 86_400, "microseconds"

    ids = np.concatenate([splits[s]["single"] for s in SPLITS])
    labels = np.concatenate([splits[s]["labels"] for s in SPLITS])
    lists = functools.reduce(operator.iadd, (genre_lists(splits[s]) for s in SPLITS), [])
    genre_names = ["", *sorted({g for _, _, of_movie in MOVIES.values() for g in of_movie})]
    age_groups, genders, jobs = {24: 2, 56: 7, 17: 1}, ["", "F", "M"], ["", "artist", "writer"]
    for row, (user, movie, rating, _) in enumerate(RATINGS):
        assert labels[row] == (rating >= 4)
        expected = [1 + list(USERS).index(user), 1 + list(MOVIES).index(movie)]
        if users_known:
            age, gender, job = USERS[user]
            expected += [age_groups[age], genders.index(gender), jobs.index(job)]
        assert ids[row].tolist() == expected
        assert sorted(lists[row]) == sorted(genre_names.index(g) for g in MOVIES[movie][2] or [""])


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_scaled_dense_features(tmp_path: Path, release: str) -> None:
    RELEASES[release](tmp_path / "source")
    info, splits = prepare(tmp_path / "source", tmp_path / "out")
    names = ["release_year", "years_since_release", "user_activity", "item_popularity"]
    assert list(info.schema.dense_features) == names + (["user_age"] if release != "25m" else [])
    known = splits["train"]["single"][:, 1] != 3  # movie 4, whose year is not known: 0, the mean
    dense = splits["train"]["dense"]
    np.testing.assert_allclose(dense[known].mean(0)[:2], 0, atol=1e-5)
    np.testing.assert_allclose(dense[known].std(0)[:2], 1, atol=1e-5)
    assert (dense[~known][:, :2] == 0).all()


def test_random_splits_are_distinct_and_follow_the_seed(tmp_path: Path, source: Path) -> None:
    def rows(seed: int) -> list[tuple[float, ...]]:
        _, splits = prepare(source, tmp_path / f"{seed}", seed=seed, overwrite=True)
        # Ratings differ in their time, so in these two features.
        return [tuple(row) for s in SPLITS for row in splits[s]["single"].tolist()]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    everything = [tuple(row) for row in rows(1)]
    assert sorted(everything) == sorted(rows(2))  # each rating is in exactly one split, whatever the seed


def test_an_id_unseen_in_training_is_unknown(tmp_path: Path, source: Path) -> None:
    with (source / "u.data").open("a") as file:
        file.writelines(f"{user}\t99\t5\t{990_000_000 + user}\n" for user in (1, 50))
    info, splits = prepare(source, tmp_path / "out", split=SplitBy.time)
    assert splits["test"]["single"][-2:, :2].tolist() == [[1, 0], [0, 0]]
    assert genre_lists(splits["test"])[-2:] == [[0], [0]]
    assert [feature.rows for feature in info.schema.sparse_features[:2]] == [1 + len(USERS), 1 + len(MOVIES)]


def test_the_rating_that_counts_as_liking_is_an_option(tmp_path: Path, source: Path) -> None:
    _, splits = prepare(source, tmp_path / "out", like_rating=2, split=SplitBy.time)
    assert splits["train"]["labels"].tolist() == [rating >= 2 for _, _, rating, _ in RATINGS[:32]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1\t2\t3", "3 columns, expected 4"),
        ("1\t2\t3\t880000000\t5", "5 columns, expected 4"),
        ("", "1 columns, expected 4"),
        ("x\t2\t3\t880000000", "user id is not an integer"),
        ("1\t-2\t3\t880000000", "movie id is not an integer of 0 to"),
        ("1\t2\t6\t880000000", "rating is not a number of 0 to 5"),
        ("1\t2\tgood\t880000000", "rating is not a number of 0 to 5"),
        ("1\t2\t3\tyesterday", "timestamp is not a number"),
    ],
)
def test_malformed_ratings_are_left_out_and_told(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], line: str, reason: str
) -> None:
    text = (source / "u.data").read_text().splitlines()
    write(source / "u.data", [*text[:5], line, *text[5:]])
    info, _ = prepare(source, tmp_path / "out", max_malformed=0.05)
    assert sum(info.samples.values()) == len(RATINGS)
    assert f"u.data:6: {reason}" in capsys.readouterr().err
    with pytest.raises(DataError, match=f"(?s)1 of 48 lines are malformed.*u.data:6: {reason}"):
        prepare(source, tmp_path / "strict", max_malformed=0.01)


def test_malformed_users_and_movies_are_told(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(source / "u.user", ["1|24|M|writer|12345", "two|56|F|artist|12345", "7|17|F|writer"])
    prepare(source, tmp_path / "out", max_malformed=0.1)
    told = capsys.readouterr().err
    assert "u.user:2: invalid literal for int() with base 10: 'two'" in told
    assert "u.user:3: 4 columns, expected 5" in told


def test_sources_that_are_no_release_are_refused(tmp_path: Path, source: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            prepare(folder, tmp_path / "out")

    refused(tmp_path / "nowhere", "--source .*nowhere: no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"no MovieLens release: none of u.data, ratings.dat, ratings.csv, \*.inter")
    (source / "u.item").unlink()
    refused(source, r"u\.item: no such file")
    (source / "u.item").touch()
    refused(source, r"u\.item: the file is empty")


def test_recbole_headers_must_name_the_columns(tmp_path: Path) -> None:
    write_recbole(tmp_path / "source")
    write(tmp_path / "source/ml.inter", ["user_id:token\titem_id:token\trating:float", "1\t1\t5"])
    with pytest.raises(DataError, match=r"ml.inter:1: no column timestamp; the header names user_id, item_id, rating"):
        prepare(tmp_path / "source", tmp_path / "out")


def test_too_few_ratings_are_refused(tmp_path: Path, source: Path) -> None:
    write(source / "u.data", ["1\t1\t5\t880000000"])
    with pytest.raises(DataError, match="1 ratings, too few"):
        prepare(source, tmp_path / "out")
