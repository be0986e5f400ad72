"""Histories: what came strictly before, stored once, read as tokens; and never the label of the candidate or of the future."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.config import Config, DataSource, ModelKind, Split
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.loader import EvaluationLoader
from dlrm_fused.datasets.preparation import cli, movielens
from dlrm_fused.datasets.preparation.histories import Histories, count_earlier, find_histories
from dlrm_fused.datasets.preparation.movielens import MovieLensOptions, SplitBy, prepare_movielens
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.errors import DataError

LENGTH = 5
USERS, MOVIES = 4, 12
FEATURES = ["token_item", "token_response", "token_gap", "token_genres"]
# user, movie, rating, time; many ratings of a user have the same time. The order of the file is not that of time.
RATINGS = [
    (1 + user, 1 + movie, (1, 2, 4, 5)[(user + 3 * movie) % 4], 1000 + 60 * ((7 * movie + user) % 8))
    for user in range(USERS)
    for movie in range(MOVIES)
]


# Of a sample: dense features, sample features, tokens, number of past interactions.
Bags = dict[str, list[list[int]]]
Inputs = tuple[list[float], Bags, Bags, int]


def write_release(folder: Path, ratings: list[tuple[int, int, int, int]]) -> Path:
    folder.mkdir()
    genres = {movie: "Comedy|Drama" if movie % 3 else "(no genres listed)" for movie in range(1, MOVIES + 1)}
    lines = {
        "movies.dat": [f"{movie}::Film (1990)::{genre}" for movie, genre in genres.items()],
        "ratings.dat": ["::".join(map(str, rating)) for rating in ratings],
    }
    for name, content in lines.items():
        (folder / name).write_text("".join(line + "\n" for line in content))
    return folder


def prepare(source: Path, output: Path) -> PreparedInfo:
    return prepare_movielens(MovieLensOptions(str(source), output, split=SplitBy.time, history=LENGTH))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    source, output = write_release(tmp_path / "source", RATINGS), tmp_path / "set"
    assert cli.main(["movielens", "--source", str(source), "--output", str(output), "--split", "time", "--history", "5"]) == 0
    (output / CHECKSUMS_FILE).unlink()  # tests write into it what a preparation would not
    return output


def by_time() -> list[tuple[int, int, int, int]]:
    """The ratings in the order of train, validation and test samples."""
    return sorted(RATINGS, key=lambda rating: rating[3])


def history_of(rating: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """The definition: the last ratings of the same user at earlier times."""
    user, _, _, time = rating
    earlier = [other for other in RATINGS if other[0] == user and other[3] < time]
    return sorted(earlier, key=lambda other: (other[3], other[1]))[-LENGTH:]


def gap_of(rating: tuple[int, int, int, int]) -> int:
    """Bucket of the time since the user's last earlier rating."""
    earlier = [other[3] for other in RATINGS if other[0] == rating[0] and other[3] < rating[3]]
    return (rating[3] - max(earlier)).bit_length() if earlier else 0


def bags(features: KeyedJaggedTensor, samples: int) -> list[Bags]:
    """Of each sample, by feature, the ids of each of its bags."""
    by_feature = {key: [bag.int().tolist() for bag in jagged.to_dense()] for key, jagged in features.to_dict().items()}
    each = features.stride() // samples
    return [{key: ids[i * each : (i + 1) * each] for key, ids in by_feature.items()} for i in range(samples)]


def read_all(folder: Path) -> tuple[list[Inputs], list[int]]:
    """Everything that a model sees of each sample, and the labels: of train, validation and test."""
    dataset = PreparedDataset(folder)
    inputs: list[Inputs] = []
    labels: list[int] = []
    for split in Split:
        samples = dataset.read(split, torch.arange(dataset.samples(split)))
        assert samples.tokens is not None
        assert samples.history_lengths is not None
        count = samples.labels.numel()
        columns = (
            samples.dense.tolist(),
            bags(samples.sparse, count),
            bags(samples.tokens, count),
            samples.history_lengths.tolist(),
        )
        inputs += zip(*columns, strict=True)
        labels += samples.labels.int().tolist()
    return inputs, labels


def test_tokens_are_the_ratings_before_oldest_first_then_the_candidate_without_its_response(prepared: Path) -> None:
    inputs, labels = read_all(prepared)
    assert PreparedInfo.load(prepared).interactions == len(RATINGS)
    for rating, (_, _, tokens, length), label in zip(by_time(), inputs, labels, strict=True):
        history = history_of(rating)
        assert (length, label) == (len(history), rating[2] >= 4)
        padding: list[list[int]] = [[]] * (LENGTH - length)
        known = [*history, rating]
        assert tokens["token_item"] == [[other[1]] for other in known] + padding
        assert tokens["token_gap"] == [[gap_of(other)] for other in known] + padding
        assert tokens["token_genres"] == [[1, 2] if other[1] % 3 else [0] for other in known] + padding
        assert tokens["token_response"] == [[2 * other[2]] for other in history] + [[]] + padding


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_has_the_time_of_its_rating(prepared: Path, ranks: int) -> None:
    """Behind the candidate its own is repeated. Of the last batches of 3 samples on 2 ranks one share is padded, by zeros."""
    dataset = PreparedDataset(prepared)
    assert dataset.schema.has_token_times
    times = [[*(other[3] for other in history_of(r)), *[r[3]] * (LENGTH + 1 - len(history_of(r)))] for r in by_time()]
    assert (times[0], times[37]) == ([1000] * 6, [1060, 1120, 1180, 1240, 1300, 1360])
    found: dict[int, list[int]] = {}
    first = 0
    for split in Split:
        for rank in range(ranks):
            loader = EvaluationLoader(dataset, split, 3, rank, ranks, torch.device("cpu"), Config())
            for number, batch in enumerate(loader):
                assert batch.token_times is not None
                assert batch.token_times.dtype == torch.int64
                share = int(batch.weights.sum())
                start = first + 3 * number + batch.global_size * rank // ranks
                found |= dict(enumerate(batch.token_times[:share].tolist(), start))
                assert batch.token_times[share:].tolist() == [[0] * (LENGTH + 1)] * (len(batch.weights) - share)
        first += dataset.samples(split)
    assert [found[sample] for sample in range(len(RATINGS))] == times


@pytest.mark.parametrize("kind", ModelKind)
def test_times_are_read_for_a_model_that_reads_them(prepared: Path, kind: ModelKind) -> None:
    config = Config()
    config.data.source, config.data.path, config.model.kind = DataSource.prepared, str(prepared), kind
    samples = open_dataset(config, torch.device("cpu")).read(Split.train, torch.arange(3))
    assert (samples.token_times is not None) == (kind is ModelKind.hstu)


def test_the_schema_tells_the_average_bag_with_padding(prepared: Path) -> None:
    schema = PreparedDataset(prepared).schema
    assert schema.history_length == LENGTH
    assert [feature.name for feature in schema.tables[-4:]] == FEATURES
    inputs, _ = read_all(prepared)
    train = PreparedInfo.load(prepared).samples["train"]
    for feature in schema.token_features:
        of_bags = [len(bag) for _, _, tokens, _ in inputs[:train] for bag in tokens[feature.name]]
        assert feature.pooling_factor == pytest.approx(np.mean(of_bags), abs=1e-3)


def test_counts_are_those_before_the_rating(prepared: Path) -> None:
    """Scaled, so they are compared by their order."""
    info = PreparedInfo.load(prepared)
    columns = [info.schema.dense_features.index(name) for name in ("user_activity", "item_popularity")]
    dense = np.concatenate([np.load(prepared / split / "dense.npy") for split in info.samples])
    for key, column in zip((0, 1), columns, strict=True):
        counts = [sum(other[key] == rating[key] and other[3] < rating[3] for other in RATINGS) for rating in by_time()]
        distinct, number = np.unique(dense[:, column], return_inverse=True)
        assert np.array_equal(np.unique(counts, return_inverse=True)[1], number)
        assert len(distinct) > 3


# Labels of the future


def flipped(rating: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    user, movie, value, time = rating
    return user, movie, value - 3 if value >= 4 else value + 3, time


def changed_inputs(tmp_path: Path, time: int, tamper: Callable[[Path], None]) -> list[bool]:
    """Whether each sample's inputs differ once all ratings at ``time`` or later are other ones."""
    read = []
    for name, change in {"as_is": False, "changed": True}.items():
        ratings = [flipped(rating) if change and rating[3] >= time else rating for rating in RATINGS]
        prepare(write_release(tmp_path / f"{name}_source_{time}", ratings), tmp_path / f"{name}_{time}")
        tamper(tmp_path / f"{name}_{time}")
        read.append(read_all(tmp_path / f"{name}_{time}"))
    (inputs, labels), (inputs_changed, labels_changed) = read
    assert [a != b for a, b in zip(labels, labels_changed, strict=True)] == [rating[3] >= time for rating in by_time()]
    return [a != b for a, b in zip(inputs, inputs_changed, strict=True)]


def as_an_earlier_release_wrote_it(folder: Path) -> None:
    """Without times of tokens."""
    (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
    (folder / "interactions/times.npy").unlink()
    path = folder / "dataset.json"
    content = json.loads(path.read_text())
    del content["schema"]["has_token_times"]
    path.write_text(json.dumps(content))


def leaks(tmp_path: Path, time: int, tamper: Callable[[Path], None] = lambda _: None) -> int:
    """Samples up to ``time`` whose inputs depend on a label at ``time`` or later."""
    changed = changed_inputs(tmp_path, time, tamper)
    return sum(differs for rating, differs in zip(by_time(), changed, strict=True) if rating[3] <= time)


TIMES = sorted({rating[3] for rating in RATINGS})


@pytest.mark.parametrize("time", TIMES)
def test_no_label_reaches_an_input_of_its_own_time_or_before(tmp_path: Path, time: int) -> None:
    assert leaks(tmp_path, time) == 0


def test_labels_of_the_past_do_reach_the_inputs(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    changed = changed_inputs(tmp_path, TIMES[0], lambda _: None)
    assert changed == [bool(history_of(rating)) for rating in by_time()]


def test_a_history_that_holds_equal_times_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def up_to_the_candidate(*args: object) -> Histories:
        right = find_histories(*args)  # type: ignore[arg-type]
        first, _, candidate = right.windows.T
        return replace(right, windows=np.stack([np.maximum(first, candidate - LENGTH), candidate, candidate], axis=1))

    monkeypatch.setattr(movielens, "find_histories", up_to_the_candidate)
    with pytest.raises(DataError, match="expected a time before that of the candidate"):
        leaks(tmp_path, TIMES[3])
    assert leaks(tmp_path, TIMES[2], as_an_earlier_release_wrote_it) > 0


def test_a_candidate_with_its_response_would_be_found(tmp_path: Path) -> None:
    def tell_the_response(folder: Path) -> None:
        (folder / CHECKSUMS_FILE).unlink()
        path = folder / "dataset.json"
        path.write_text(path.read_text().replace('"history_only": true', '"history_only": false'))

    assert leaks(tmp_path, TIMES[3], tell_the_response) > 0


# Windows


def test_equal_times_are_ordered_by_item_whatever_the_order_of_the_file() -> None:
    users, items, times = (np.array(column) for column in zip(*[(r[0], r[1], r[3]) for r in RATINGS], strict=True))
    shuffle = np.random.default_rng(0).permutation(len(users))
    for order in (np.arange(len(users)), shuffle):
        found = find_histories(users[order], items[order], times[order], LENGTH)
        on_disk = order[found.order]
        assert np.array_equal(on_disk, np.lexsort((items, times, users)))
    assert count_earlier(np.array([7, 8, 7, 7]), np.array([5, 1, 3, 5])).tolist() == [1, 0, 0, 1]


def test_gaps_are_in_buckets_that_double() -> None:
    times = np.cumsum([0, 1, 2, 3, 4, 2**40])
    found = find_histories(np.zeros(6, np.int64), np.arange(6), times, 3)
    assert found.gap.tolist() == [0, 1, 2, 2, 3, 31]
    assert found.windows.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 3, 3], [1, 4, 4], [2, 5, 5]]


def test_histories_need_the_split_by_time(tmp_path: Path) -> None:
    source = write_release(tmp_path / "source", RATINGS)
    with pytest.raises(DataError, match=r"--history 5: allowed: 0, or 1 or more together with --split time"):
        prepare_movielens(MovieLensOptions(str(source), tmp_path / "out", history=5))


# Reading


@pytest.mark.parametrize("window", [[-1, 0, 0], [3, 2, 4], [2, 5, 4], [0, 6, 6], [0, 0, len(RATINGS)]])
def test_a_window_that_cannot_be_is_refused(prepared: Path, window: list[int]) -> None:
    path = prepared / "test/history.npy"
    windows = np.load(path)
    windows[2] = window
    np.save(path, windows)
    dataset = PreparedDataset(prepared)
    dataset.read(Split.test, torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"test/history.npy: row 2 holds .*expected first <= stop <= candidate"):
        dataset.read(Split.test, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    "name",
    [
        "train/history.npy",
        "interactions/single.npy",
        "interactions/token_genres.values.npy",
        "interactions/times.npy",
        "test/history.npy",
    ],
)
def test_a_missing_file_is_named_when_the_set_is_opened(prepared: Path, name: str) -> None:
    (prepared / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        PreparedDataset(prepared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interactions": 0}, "interactions is 0, expected 1 or more with token features"),
        ({"interactions": 7}, r"interactions/single.npy: holds int32 of shape \[48, 3\], expected int32 of shape \[7, 3\]"),
        ({"schema": {"history_length": 0}}, "history_length is 0, expected 1 or more with token features"),
        ({"schema": {"token_features": []}}, "history_length is 5, expected 0 without token features"),
        (
            {"schema": {"token_features": [], "history_length": 0}, "interactions": 0},
            "has_token_times is true, expected false without token features",
        ),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(prepared: Path, change: dict[str, object], message: str) -> None:
    path = prepared / "dataset.json"
    content = json.loads(path.read_text())
    schema = content["schema"] | change.pop("schema", {})  # type: ignore[operator]
    path.write_text(json.dumps(content | change | {"schema": schema}))
    with pytest.raises(DataError, match=message):
        PreparedDataset(prepared)


def change_times(folder: Path, rows: list[int], times: list[int]) -> None:
    path = folder / "interactions/times.npy"
    changed = np.load(path)
    changed[rows] = times
    np.save(path, changed)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (np.zeros(47, np.int64), r"holds int64 of shape \[47\], expected int64 of shape \[48\]"),
        (np.zeros(48, np.float32), r"holds float32 of shape \[48\], expected int64"),
    ],
)
def test_times_of_another_shape_or_type_are_refused(prepared: Path, times: np.ndarray, message: str) -> None:
    np.save(prepared / "interactions/times.npy", times)
    with pytest.raises(DataError, match=f"interactions/times.npy: {message}"):
        PreparedDataset(prepared)


def test_a_history_whose_times_decrease_is_refused(prepared: Path) -> None:
    """Of the last test sample, whose history is the positions [first, first + 5)."""
    first = np.load(prepared / "test/history.npy")[-1, 0]
    change_times(prepared, [first + 2, first + 3], [1300, 1240])
    dataset = PreparedDataset(prepared)
    wrong = f"interactions/times.npy: rows {first + 2} and {first + 3}, one after the other in a sample, hold 1300 and 1240"
    with pytest.raises(DataError, match=f"{wrong}, expected times that do not decrease; prepare the set again"):
        dataset.read(Split.test, torch.arange(5))


@pytest.mark.parametrize("later", [0, 60])
def test_a_future_that_leaks_into_a_history_is_refused(prepared: Path, later: int) -> None:
    """The last interaction of the second test sample's history happens at the candidate's time or after it."""
    _, stop, candidate = np.load(prepared / "test/history.npy")[1]
    time = np.load(prepared / "interactions/times.npy")[candidate]
    change_times(prepared, [stop - 1], [time + later])
    dataset = PreparedDataset(prepared)
    wrong = f"times.npy: rows {stop - 1} and {candidate}, one after the other in a sample, hold {time + later} and {time}"
    with pytest.raises(DataError, match=f"{wrong}, expected a time before that of the candidate, the latter; prepare"):
        dataset.read(Split.test, torch.tensor([1]))


def test_a_history_may_hold_equal_times_and_the_next_sample_may_be_of_before(prepared: Path) -> None:
    samples = PreparedDataset(prepared).read(Split.train, torch.arange(38).flip(0))
    assert samples.token_times is not None
    assert samples.token_times[0, 0] > samples.token_times[-1, -1]
    of_full_histories = samples.token_times[samples.history_lengths == LENGTH, :LENGTH]
    assert (of_full_histories.diff() == 0).any()


def test_a_set_of_an_earlier_release_has_no_times_of_tokens(prepared: Path) -> None:
    as_an_earlier_release_wrote_it(prepared)
    dataset = PreparedDataset(prepared)
    assert not dataset.schema.has_token_times
    samples = dataset.read(Split.test, torch.arange(5))
    assert samples.tokens is not None
    assert samples.token_times is None
    (batch,) = EvaluationLoader(dataset, Split.test, 5, 1, 2, torch.device("cpu"), Config())
    assert batch.token_times is None


def test_damaged_times_are_found_by_their_checksums(tmp_path: Path) -> None:
    """The change keeps their order, so that nothing else could tell."""
    prepare(write_release(tmp_path / "source", RATINGS), tmp_path / "set")
    position = np.load(tmp_path / "set/test/history.npy")[0, 2]
    change_times(tmp_path / "set", [position], [np.load(tmp_path / "set/interactions/times.npy")[position] + 1])
    with pytest.raises(DataError, match=r"interactions/times.npy: .*prepare the set again"):
        PreparedDataset(tmp_path / "set").read(Split.test, torch.arange(5))


def test_rows_of_token_tables_follow_those_of_sample_tables(prepared: Path) -> None:
    config = Config()
    config.data.path = str(prepared)
    config.embedding.max_rows = 3
    dataset = open_dataset(config, torch.device("cpu"))
    assert [feature.rows for feature in dataset.schema.tables] == [3] * 7
    tokens = dataset.read(Split.train, torch.arange(30)).tokens
    assert tokens is not None
    full = PreparedDataset(prepared).read(Split.train, torch.arange(30)).tokens
    assert full is not None
    assert torch.equal(tokens["token_item"].values(), full["token_item"].values() % 3)


def test_a_set_of_the_first_format_version_is_read(tmp_path: Path) -> None:
    """It knew no token features."""
    source = write_release(tmp_path / "source", RATINGS)
    prepare_movielens(MovieLensOptions(str(source), tmp_path / "set", split=SplitBy.time))
    (tmp_path / "set" / CHECKSUMS_FILE).unlink()
    path = tmp_path / "set/dataset.json"
    content = json.loads(path.read_text())
    for key in ("token_features", "history_length"):
        del content["schema"][key]
    for feature in content["schema"]["sparse_features"]:
        del feature["history_only"]
    del content["interactions"]
    path.write_text(json.dumps(content | {"format_version": 1}))
    samples = PreparedDataset(tmp_path / "set").read(Split.train, torch.arange(30))
    assert samples.labels.tolist() == [rating[2] >= 4 for rating in by_time()[:30]]
    assert samples.tokens is None
    assert samples.history_lengths is None
