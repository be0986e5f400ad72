"""Generated samples of several segments, whose labels follow different rules."""

import pytest
import torch
from torch import Tensor

from dlrm_fused.config import Config, DataSource, Split, SyntheticConfig, check_consistency
from dlrm_fused.datasets.synthetic import SyntheticDataset, auc_with_error
from dlrm_fused.errors import ConfigError

CPU = torch.device("cpu")


def _dataset(**changes: object) -> SyntheticDataset:
    """Four segments, told by two dense features; two tables of four rows."""
    settings = SyntheticConfig(tables=2, rows=[4], dense_features=2, zipf_exponent=0.0, segments=4, test_samples=20_000)
    for key, value in changes.items():
        setattr(settings, key, value)
    return SyntheticDataset(settings, 1, CPU)


def _segment_by_sign(dense: Tensor) -> Tensor:
    return (dense[:, 0] > 0) + 2 * (dense[:, 1] > 0).long()


def test_dense_features_are_normal_around_a_mean_that_tells_the_segment() -> None:
    dense = _dataset().read(Split.train, torch.arange(40_000)).dense
    segment = _segment_by_sign(dense)
    assert torch.allclose(segment.bincount() / 40_000, torch.tensor(0.25), atol=0.01)
    for number, mean in enumerate([(-3, -3), (3, -3), (-3, 3), (3, 3)]):
        own = dense[segment == number]
        assert torch.allclose(own.mean(0), torch.tensor(mean).float(), atol=0.05)
        assert torch.allclose(own.T.cov(), torch.eye(2), atol=0.05)


def test_ids_are_those_of_data_without_segments() -> None:
    rows = torch.arange(1000)
    with_segments, without = _dataset().read(Split.train, rows), _dataset(segments=1).read(Split.train, rows)
    assert torch.equal(with_segments.sparse.values(), without.sparse.values())


def _rates(cell: Tensor, labels: Tensor) -> Tensor:
    """The rate of label 1 in each cell."""
    return torch.zeros(64).index_add(0, cell, labels) / cell.bincount(minlength=64).clamp(min=1)


def test_rates_by_segment_and_ids_reach_the_best_attainable_auc_and_by_ids_alone_do_not() -> None:
    dataset = _dataset()
    train, test = (dataset.read(split, torch.arange(20_000)) for split in (Split.train, Split.test))
    aucs = []
    for segments in (4, 1):
        cells = []
        for samples in (train, test):
            first, second = samples.sparse.values().long().view(2, -1)
            cells.append(16 * (_segment_by_sign(samples.dense) % segments) + 4 * first + second)
        aucs.append(auc_with_error(_rates(cells[0], train.labels)[cells[1]], test.labels)[0])
    attainable = dataset.best_attainable_auc()
    assert attainable.auc - 0.005 < aucs[0] <= attainable.auc + attainable.error
    assert aucs[1] < attainable.auc - 0.1


@pytest.mark.parametrize("changes", [{"pooling": [3]}, {"pooling": [3], "jagged": True}, {"tables": 14}, {"segments": 3}])
def test_the_logit_has_the_strength_asked_for(changes: dict[str, object]) -> None:
    weak, strong = (_dataset(signal=signal, **changes).best_attainable_auc().auc for signal in (0.0, 2.0))
    assert weak == pytest.approx(0.5, abs=0.015)
    assert strong == pytest.approx(0.86, abs=0.04)  # of a normal logit with standard deviation 2


def test_histories_add_to_the_rules() -> None:
    dataset = _dataset(history_length=12, history_items=8)
    samples = dataset.read(Split.train, torch.arange(100))
    assert samples.tokens is not None
    assert torch.equal(samples.sparse.values(), _dataset().read(Split.train, torch.arange(100)).sparse.values())


@pytest.mark.parametrize(("segments", "allowed"), [(0, "1 to 4"), (5, "1 to 4")])
def test_more_segments_than_dense_features_can_tell_are_refused(segments: int, allowed: str) -> None:
    config = Config()
    config.data.source = DataSource.synthetic
    config.data.synthetic.dense_features, config.data.synthetic.segments = 2, segments
    with pytest.raises(ConfigError, match=f"data.synthetic.segments={segments}: allowed: {allowed} with .*dense_features=2"):
        check_consistency(config)
