"""Generated samples: reproducible anywhere, distributed as asked for, with a signal of known strength."""

import math

import pytest
import torch
from torch import Tensor

from dlrm_fused.config import Config, DataSource, Split, SyntheticConfig
from dlrm_fused.datasets import open_dataset, synthetic
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.synthetic import SyntheticDataset, auc_with_error
from dlrm_fused.errors import ConfigError

CPU = torch.device("cpu")


def _settings(**changes: object) -> SyntheticConfig:
    settings = SyntheticConfig(tables=3, rows=[50, 1000, 7], pooling=[1, 4, 2], dense_features=3)
    for key, value in changes.items():
        setattr(settings, key, value)
    return settings


def _read(settings: SyntheticConfig, rows: Tensor, seed: int = 1, split: Split = Split.train) -> Samples:
    return SyntheticDataset(settings, seed, CPU).read(split, rows)


def _ids(samples: Samples, table: int) -> list[list[int]]:
    return [sample.int().tolist() for sample in samples.sparse[f"table_{table}"].to_dense()]


@pytest.mark.parametrize("segments", [1, 5])
@pytest.mark.parametrize("jagged", [False, True])
def test_a_sample_is_the_same_in_any_batch(jagged: bool, segments: int) -> None:
    dataset = SyntheticDataset(_settings(jagged=jagged, segments=segments), 1, CPU)
    whole = dataset.read(Split.train, torch.arange(100))
    rows = torch.tensor([99, 3, 50, 3])
    some = dataset.read(Split.train, rows)
    assert torch.equal(some.dense, whole.dense[rows])
    assert torch.equal(some.labels, whole.labels[rows])
    for table in range(3):
        assert _ids(some, table) == [_ids(whole, table)[row] for row in rows]


def test_seeds_and_splits_differ() -> None:
    rows = torch.arange(1000)
    drawn = [_read(_settings(), rows, seed, split) for seed in (1, 2) for split in Split]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not torch.equal(one.dense, other.dense)
            assert (one.sparse.values() == other.sparse.values()).float().mean() < 0.3


def test_ids_and_lengths_of_fixed_pooling() -> None:
    samples = _read(_settings(), torch.arange(500))
    assert samples.sparse.keys() == ["table_0", "table_1", "table_2"]
    assert samples.sparse.lengths().tolist() == [1] * 500 + [4] * 500 + [2] * 500
    assert samples.sparse.length_per_key() == [500, 2000, 1000]
    for table, rows in enumerate([50, 1000, 7]):
        ids = samples.sparse[f"table_{table}"].values()
        assert 0 <= ids.min() < ids.max() < rows
    assert (samples.sparse.values().dtype, samples.sparse.lengths().dtype) == (torch.int32, torch.int32)


def test_a_batch_size_first_used_in_inference_mode_can_be_trained_on() -> None:
    dataset = SyntheticDataset(_settings(), 1, CPU)
    with torch.inference_mode():
        dataset.read(Split.test, torch.arange(8))
    sparse = dataset.read(Split.train, torch.arange(8)).sparse
    assert not sparse.values().is_inference()
    assert not sparse.lengths().is_inference()


def test_jagged_lengths_are_uniform_from_one_to_the_pooling_factor() -> None:
    dataset = SyntheticDataset(_settings(jagged=True), 1, CPU)
    samples = dataset.read(Split.train, torch.arange(20_000))
    lengths = samples.sparse.lengths().view(3, -1)
    for table, pooling in enumerate([1, 4, 2]):
        counts = lengths[table].bincount(minlength=pooling + 1)
        assert counts[0] == 0
        assert torch.allclose(counts[1:] / 20_000, torch.tensor(1 / pooling), atol=0.02)
    assert [feature.pooling_factor for feature in dataset.schema.sparse_features] == [1.0, 2.5, 1.5]
    assert samples.sparse.values().numel() == lengths.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
def test_popularity_follows_the_power_law(exponent: float) -> None:
    """Frequencies of ids, most popular first, against the integral of the density over each row."""
    rows, samples = 100, 400_000
    settings = SyntheticConfig(tables=1, rows=[rows], zipf_exponent=exponent)
    ids = _read(settings, torch.arange(samples)).sparse.values()
    frequencies = ids.bincount(minlength=rows).sort(descending=True).values.double() / samples

    edges = torch.arange(1, rows + 2, dtype=torch.float64)
    integral = edges.log() if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = integral.diff() / (integral[-1] - integral[0])
    # Cumulated, since sorting moves ids that are equally popular.
    assert torch.allclose(frequencies.cumsum(0), expected.cumsum(0), atol=0.008)


def test_popular_ids_are_not_neighbours() -> None:
    settings = SyntheticConfig(tables=1, rows=[1000], zipf_exponent=1.5)
    ids = _read(settings, torch.arange(50_000)).sparse.values()
    popular = ids.bincount().argsort(descending=True)[:20].sort().values
    assert popular.diff().min() > 1


@pytest.mark.parametrize("rows", [1, 2, 3, 10])
def test_all_rows_of_a_small_table_occur(rows: int) -> None:
    settings = SyntheticConfig(tables=1, rows=[rows], zipf_exponent=1.05)
    assert _read(settings, torch.arange(20_000)).sparse.values().unique().tolist() == list(range(rows))


def test_dense_features_are_roughly_standard_normal_and_independent() -> None:
    dense = _read(_settings(), torch.arange(50_000)).dense.double()
    assert torch.allclose(dense.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.02)
    assert torch.allclose(dense.T.cov(), torch.eye(3, dtype=torch.float64), atol=0.02)
    assert (dense.abs() < 1).double().mean() == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)


def test_slots_of_a_sample_are_independent() -> None:
    settings = SyntheticConfig(tables=2, rows=[64], pooling=[2], zipf_exponent=0.0)
    ids = _read(settings, torch.arange(100_000)).sparse.values().view(2, -1, 2).double()
    columns = torch.stack([ids[0, :, 0], ids[0, :, 1], ids[1, :, 0], ids[1, :, 1], ids[0, :, 0].roll(1)])
    assert torch.allclose(columns.corrcoef(), torch.eye(5, dtype=torch.float64), atol=0.015)


def test_the_logit_has_the_strength_asked_for() -> None:
    """Labels of a logit with standard deviation s are drawn from sigmoid(logit): with s = 0, they are coin flips."""
    rows = torch.arange(20_000)
    assert _read(_settings(signal=0.0), rows).labels.mean() == pytest.approx(0.5, abs=0.015)
    attainable = [
        SyntheticDataset(_settings(signal=signal, test_samples=20_000), 1, CPU).best_attainable_auc().auc
        for signal in (0.0, 1.0, 2.0, 4.0)
    ]
    assert attainable[0] == pytest.approx(0.5, abs=0.01)
    assert attainable == sorted(attainable)
    assert attainable[2] == pytest.approx(0.86, abs=0.02)  # of a normal logit with standard deviation 2


def test_labels_depend_on_ids_and_dense_features() -> None:
    """A logistic regression on the dense features and one weight for each id comes close to the best attainable AUC."""
    settings = SyntheticConfig(tables=2, rows=[20], pooling=[1, 3], dense_features=2, test_samples=20_000)
    dataset = SyntheticDataset(settings, 1, CPU)
    attainable = dataset.best_attainable_auc()

    def inputs(split: Split) -> tuple[Tensor, Tensor]:
        samples = dataset.read(split, torch.arange(20_000))
        first = torch.nn.functional.one_hot(samples.sparse["table_0"].values().long(), 20)
        second = torch.nn.functional.one_hot(samples.sparse["table_1"].values().long().view(-1, 3), 20).sum(1)
        return torch.cat([samples.dense, first, second, torch.ones(20_000, 1)], dim=1), samples.labels

    features, labels = inputs(Split.train)
    weights = torch.zeros(features.size(1), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(features @ weights, labels)
        value.backward()
        return value

    optimizer.step(loss)
    features, labels = inputs(Split.test)
    auc, _ = auc_with_error((features @ weights).detach(), labels)
    assert attainable.auc - 0.005 < auc <= attainable.auc + attainable.error


# Histories


def _history_settings(**changes: object) -> SyntheticConfig:
    """As many items as groups, so that the items are the groups."""
    return _settings(**{"history_length": 12, "history_items": 8, "zipf_exponent": 0.5, **changes})


def _histories(split: Split, count: int, jagged: bool) -> tuple[SyntheticDataset, Samples, Tensor]:
    """A data set with histories, the first samples of a split, and the lengths of their histories."""
    dataset = SyntheticDataset(_history_settings(jagged=jagged), 1, CPU)
    samples = dataset.read(split, torch.arange(count))
    assert samples.history_lengths is not None
    assert samples.token_count == int(samples.history_lengths.sum()) + count
    return dataset, samples, samples.history_lengths


def _tokens(samples: Samples, feature: str) -> list[list[int]]:
    assert samples.tokens is not None
    return [bag.int().tolist() for bag in samples.tokens[feature].to_dense()]


@pytest.mark.parametrize("jagged", [False, True])
def test_tokens_of_a_sample_are_the_same_in_any_batch(jagged: bool) -> None:
    dataset = SyntheticDataset(_history_settings(jagged=jagged), 1, CPU)
    whole = dataset.read(Split.train, torch.arange(50))
    rows = torch.tensor([49, 3, 3])
    some = dataset.read(Split.train, rows)
    for feature in ("token_item", "token_response", "token_gap"):
        bags = _tokens(whole, feature)
        assert _tokens(some, feature) == [bag for row in rows.tolist() for bag in bags[row * 13 : (row + 1) * 13]]
    assert torch.equal(some.token_times, whole.token_times[rows])


@pytest.mark.parametrize("jagged", [False, True])
def test_a_history_is_followed_by_the_candidate_without_a_response(jagged: bool) -> None:
    dataset, samples, lengths = _histories(Split.train, 2000, jagged)
    assert lengths.unique().tolist() == (list(range(13)) if jagged else [12])
    position = torch.arange(13)
    for feature in dataset.schema.token_features:
        of_bags = samples.tokens[feature.name].lengths().view(2000, 13)
        occupied = position < lengths[:, None] if feature.history_only else position <= lengths[:, None]
        assert torch.equal(of_bags.bool(), occupied)
        assert of_bags.float().mean() == pytest.approx(feature.pooling_factor, abs=0.02)
        ids = samples.tokens[feature.name].values()
        assert 0 <= ids.min() < ids.max() == feature.rows - 1


@pytest.mark.parametrize("jagged", [False, True])
def test_tokens_follow_each_other_in_time_at_gaps_of_a_second_to_24_days(jagged: bool) -> None:
    dataset, samples, lengths = _histories(Split.train, 2000, jagged)
    assert dataset.schema.has_token_times
    assert samples.token_times is not None
    assert samples.token_times.dtype == torch.int64
    gaps = samples.token_times.diff(dim=1, prepend=torch.zeros(2000, 1, dtype=torch.int64))
    occupied = torch.arange(13) <= lengths[:, None]
    assert not gaps[~occupied].any(), "padding has the candidate's time"
    gaps = gaps[occupied]
    assert 1 <= gaps.min() < gaps.max() < 2**21
    # Each of the 21 powers of two begins as many gaps, and within one they are uniform.
    power = gaps.double().log2().floor().long()
    assert torch.allclose(power.bincount() / len(gaps), torch.tensor(1 / 21), atol=0.01)
    longest = gaps[power == 20].double()
    assert longest.mean() == pytest.approx(1.5 * 2**20, rel=0.02)


def test_other_seeds_have_other_times_and_data_without_histories_none() -> None:
    first, second = (_read(_history_settings(), torch.arange(10), seed).token_times for seed in (1, 2))
    assert not torch.equal(first, second)
    dataset = SyntheticDataset(_settings(), 1, CPU)
    assert not dataset.schema.has_token_times
    assert dataset.read(Split.train, torch.arange(10)).token_times is None


def test_tokens_are_those_of_releases_before_times() -> None:
    samples = _read(_history_settings(), torch.tensor([0]))
    assert samples.tokens is not None
    assert samples.tokens["token_item"].values().tolist() == [7, 2, 4, 1, 6, 4, 0, 3, 7, 2, 2, 4, 6]
    assert samples.tokens["token_response"].values().tolist() == [1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert samples.tokens["token_gap"].values().tolist() == [26, 20, 26, 7, 8, 26, 12, 1, 7, 22, 13, 1, 14]


@pytest.mark.parametrize("jagged", [False, True])
def test_responses_to_the_items_of_the_candidates_group_foretell_the_label(jagged: bool) -> None:
    dataset, samples, lengths = _histories(Split.test, 4000, jagged)
    items, responses = (samples.tokens[name].to_padded_dense(1).view(4000, 13) for name in ("token_item", "token_response"))
    candidate = items.gather(1, lengths.long()[:, None])
    alike = (items == candidate) & (torch.arange(13) < lengths[:, None])
    mean = ((2 * responses - 1) * alike).sum(1) / alike.sum(1).clamp(min=1)
    auc, error = auc_with_error(mean, samples.labels)
    assert auc > 0.65 + 3 * error
    assert dataset.best_attainable_auc(max_samples=4000).auc > auc + 0.05


def test_histories_leave_the_other_features_as_they_are() -> None:
    rows = torch.arange(100)
    without, with_history = _read(_settings(), rows), _read(_history_settings(zipf_exponent=1.05), rows)
    assert torch.equal(without.dense, with_history.dense)
    assert torch.equal(without.sparse.values(), with_history.sparse.values())
    assert without.tokens is None


def test_caps_on_rows_hold_for_token_tables() -> None:
    config = Config()
    config.data.source = DataSource.synthetic
    config.data.synthetic = _history_settings(history_items=100)
    config.embedding.rows = [50, 1000, 7, 90, 1, 4]
    dataset = open_dataset(config, CPU)
    assert [feature.rows for feature in dataset.schema.tables] == [50, 1000, 7, 90, 1, 4]
    samples = dataset.read(Split.train, torch.arange(1000))
    for feature in dataset.schema.token_features:
        ids = [i for bag in _tokens(samples, feature.name) for i in bag]
        assert (min(ids), max(ids)) == (0, feature.rows - 1)


def test_auc_and_its_error_are_those_of_all_pairs() -> None:
    """AUC: the share of pairs in which the positive sample scores higher. Error: DeLong's, from the shares of each sample."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 50, (300,), generator=generator).double()  # with many ties
    labels = torch.rand(300, generator=generator) < 0.2 + scores / 100
    positive, negative = scores[labels], scores[~labels]
    wins = [[(p > n) + 0.5 * (p == n) for n in negative.tolist()] for p in positive.tolist()]
    pairs = torch.tensor(wins, dtype=torch.float64)
    variance = pairs.mean(1).var() / len(positive) + pairs.mean(0).var() / len(negative)
    auc, error = auc_with_error(scores, labels)
    assert auc == pytest.approx(float(pairs.mean()), abs=1e-12)
    assert error == pytest.approx(math.sqrt(variance), abs=1e-12)


def test_the_stated_error_is_the_spread_over_repetitions() -> None:
    """Of 200 repetitions, whose own spread is known to 5%."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(200, 400, generator=generator) < 0.4
    scores = torch.randn(200, 400, generator=generator) + labels
    results = [auc_with_error(*repetition) for repetition in zip(scores, labels, strict=True)]
    aucs, errors = torch.tensor(results, dtype=torch.float64).T
    assert errors.mean() == pytest.approx(float(aucs.std()), rel=0.15)


def test_the_best_attainable_auc_uses_no_more_samples_than_asked_for() -> None:
    dataset = SyntheticDataset(_settings(test_samples=5000), 1, CPU)
    assert dataset.best_attainable_auc().samples == 5000
    few = dataset.best_attainable_auc(max_samples=1000)
    assert few.samples == 1000
    assert few.error > dataset.best_attainable_auc().error


def test_a_table_too_large_for_its_ids_is_refused() -> None:
    config = Config()
    config.data.source = DataSource.synthetic
    config.data.synthetic = _settings(rows=[50, 3_000_000_000, 7])
    with pytest.raises(ConfigError, match=r"data.synthetic.rows=\[50, 3000000000, 7\]: allowed: at most 2147483647 each"):
        open_dataset(config, CPU)


def test_a_cap_on_rows_gives_smaller_tables_with_their_signal_intact() -> None:
    config = Config()
    config.data.source = DataSource.synthetic
    config.data.synthetic = _settings()
    config.embedding.max_rows = 40
    dataset = open_dataset(config, CPU)
    assert [feature.rows for feature in dataset.schema.sparse_features] == [40, 40, 7]
    assert dataset.read(Split.train, torch.arange(1000)).sparse["table_1"].values().max() == 39


def test_labels_do_not_depend_on_how_many_samples_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sets with many ids a sample open in little memory."""
    settings, labels = _settings(pooling=[7]), []
    for at_once in (2**30, 1000):
        monkeypatch.setattr(synthetic, "_MOST_VALUES", at_once)
        monkeypatch.setattr(synthetic, "_score_statistics", {})
        labels.append(_read(settings, torch.arange(5000)).labels)
    assert torch.equal(*labels)
    assert 0 < labels[0].mean() < 1
