"""BinaryMetrics and LossTracker in one process, against definitions written out in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from dlrm_fused.training.metrics import BinaryMetrics, BinaryMetricValues, LossTracker

CPU = torch.device("cpu")


def measure(logits: Tensor, labels: Tensor, exact_samples: int = 2**24, batch: int = 64) -> BinaryMetricValues:
    metrics = BinaryMetrics(CPU, exact_samples)
    for x, y in zip(logits.split(batch), labels.split(batch), strict=True):
        metrics.update(x, y, torch.ones_like(x))
    return metrics.compute()


def auc_by_pairs(logits: Tensor, labels: Tensor) -> float:
    """The definition: over all pairs of a positive and a negative sample, 1 for a higher positive, 1/2 for a tie."""
    positives, negatives = logits[labels == 1, None], logits[None, labels == 0]
    return ((positives > negatives).double() + 0.5 * (positives == negatives).double()).mean().item()


def random_samples(n: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, generator=generator) - 1
    return logits * scale, (torch.rand(n, generator=generator) < logits.sigmoid()).float()


def test_auc_of_a_known_example():
    # 4 pairs: 0.8 > 0.1, 0.8 > 0.4, 0.35 > 0.1, 0.35 < 0.4
    values = measure(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert values.auc == 0.75
    assert values.auc_error == 0


def test_ties_count_half():
    logits, labels = random_samples(1500)
    logits = (logits * 4).round() / 4
    assert measure(logits, labels).auc == pytest.approx(auc_by_pairs(logits, labels), abs=1e-15)


def test_zero_and_minus_zero_tie():
    assert measure(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 1.0])).auc == 0.5


def test_saturated_predictions_keep_their_order():
    # sigmoid() of both is 1 in float32
    assert measure(torch.tensor([100.0, 200.0]), torch.tensor([0.0, 1.0])).auc == 1


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0], ids=["tiny", "usual", "beyond the bins"])
def test_beyond_exact_samples_the_stated_error_bounds_the_true_one(scale):
    logits, labels = random_samples(3000, scale=scale)
    values = measure(logits, labels, exact_samples=1000)
    assert 0 < values.auc_error < 0.5
    assert abs(values.auc - auc_by_pairs(logits, labels)) <= values.auc_error


def test_beyond_exact_samples_the_error_of_usual_logits_is_small():
    logits, labels = random_samples(200_000)
    exact, bounded = measure(logits, labels, batch=5000), measure(logits, labels, exact_samples=50_000, batch=5000)
    assert bounded.auc_error < 1e-4
    assert bounded.auc == pytest.approx(exact.auc, abs=1e-6)
    assert bounded.log_loss == exact.log_loss


def test_auc_is_exact_up_to_the_last_allowed_sample():
    logits, labels = random_samples(512, scale=1e-3)  # several in a bin
    assert measure(logits, labels, exact_samples=512).auc_error == 0
    assert measure(logits, labels, exact_samples=511).auc_error > 0


def test_padding_does_not_use_up_exact_samples():
    logits, labels = random_samples(400)
    metrics = BinaryMetrics(CPU, exact_samples=400)
    for x, y in zip(logits.split(10), labels.split(10), strict=True):
        padding = torch.full((90,), 7.0)
        weights = torch.cat([torch.ones(10), torch.zeros(90)])
        metrics.update(torch.cat([x, padding]), torch.cat([y, padding]), weights)
    assert metrics.compute() == measure(logits, labels, batch=10)


def test_more_samples_may_follow_a_result():
    logits, labels = random_samples(3000)
    metrics = BinaryMetrics(CPU, exact_samples=2000)
    for x, y in zip(logits.split(1000), labels.split(1000), strict=True):
        metrics.update(x, y, torch.ones_like(x))
        latest = metrics.compute()
    assert latest == measure(logits, labels, exact_samples=2000, batch=1000)


def test_log_loss_normalized_entropy_and_calibration_follow_their_definitions():
    logits, labels = random_samples(1000)
    values = measure(logits, labels)
    p, y = logits.double().sigmoid(), labels.double()
    log_loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean().item()
    rate = y.mean().item()
    assert values.log_loss == pytest.approx(log_loss, rel=1e-12)
    assert values.normalized_entropy == pytest.approx(
        log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-12
    )
    assert values.calibration == pytest.approx(p.mean().item() / rate, rel=1e-12)
    assert values.samples == 1000


def test_log_loss_of_extreme_logits_does_not_overflow():
    assert measure(torch.tensor([-1000.0, 1000.0]), torch.tensor([1.0, 1.0])).log_loss == 500


def test_predicting_the_base_rate_has_normalized_entropy_1():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    values = measure(torch.full((4,), math.log(1 / 3)), labels)
    assert values.normalized_entropy == pytest.approx(1, rel=1e-7)
    assert values.calibration == pytest.approx(1, rel=1e-7)
    assert values.auc == 0.5


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_auc(label):
    values = measure(torch.randn(10), torch.full((10,), label))
    assert math.isnan(values.auc)
    assert math.isnan(values.normalized_entropy)
    assert math.isfinite(values.log_loss)
    assert values.only_class == label


def test_samples_of_weight_0_are_of_no_class():
    metrics = BinaryMetrics(CPU, weighted=True)
    metrics.update(torch.randn(4), torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.5, 2.0]))
    assert metrics.compute().only_class == 1


def test_no_samples():
    values = BinaryMetrics(CPU).compute()
    assert values.samples == 0
    assert values.only_class is None
    assert all(math.isnan(v) for v in (values.auc, values.log_loss, values.normalized_entropy, values.calibration))
    assert not values.constant


@pytest.mark.parametrize("exact_samples", [100, 2])
def test_a_nan_prediction_shows_in_the_metrics(exact_samples):
    values = measure(torch.tensor([0.1, math.nan, 0.2, 0.3]), torch.tensor([0.0, 1.0, 1.0, 0.0]), exact_samples)
    assert math.isnan(values.auc)
    assert math.isnan(values.log_loss)


def test_constant_predictions_are_told():
    labels = torch.tensor([0.0, 1.0, 1.0])
    assert measure(torch.full((3,), -0.7), labels).constant
    assert measure(torch.tensor([90.0, 100.0, 110.0]), labels).constant  # all 1 in float32
    varied = measure(torch.tensor([-0.7, -0.7, 0.0]), labels)
    assert not varied.constant
    assert (varied.min_prediction, varied.max_prediction) == (pytest.approx(0.3318, abs=1e-4), 0.5)


def test_bfloat16_logits_and_reused_buffers():
    buffer = torch.tensor([0.5, -0.5], dtype=torch.bfloat16)
    metrics = BinaryMetrics(CPU)
    metrics.update(buffer, torch.tensor([1.0, 0.0]), torch.ones(2))
    buffer.zero_()
    assert metrics.compute().auc == 1


def test_reset_forgets_everything():
    metrics = BinaryMetrics(CPU, exact_samples=10)
    metrics.update(torch.randn(100), torch.ones(100), torch.ones(100))
    metrics.reset()
    metrics.update(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.ones(2))
    assert metrics.compute() == measure(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        BinaryMetrics(CPU).update(torch.zeros(4, 1), torch.zeros(4), torch.ones(4))


def test_losses_are_averaged_since_the_last_read():
    tracker = LossTracker()
    for step, loss in enumerate([1.0, 2.0, 6.0], start=1):
        tracker.add(step, torch.tensor(loss))
    assert (tracker.read().mean, tracker.read().steps) == (3.0, 0)
    tracker.add(4, torch.tensor(5.0))
    summary = tracker.read()
    assert (summary.mean, summary.steps, summary.first_nonfinite_step) == (5.0, 1, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_step_with_a_nonfinite_loss_is_told(bad):
    tracker = LossTracker()
    for step, loss in [(11, 0.5), (12, bad), (13, 0.5), (14, bad)]:
        tracker.add(step, torch.tensor(loss))
    assert tracker.read().first_nonfinite_step == 12
    tracker.add(15, torch.tensor(0.5))
    assert tracker.read().first_nonfinite_step is None


class TestWeights:
    """A sample of weight w counts as w samples would."""

    def weighted(self, logits: Tensor, labels: Tensor, weights: Tensor, exact_samples: int = 2**24) -> BinaryMetricValues:
        metrics = BinaryMetrics(CPU, exact_samples, weighted=True)
        for part in zip(*(values.split(64) for values in (logits, labels, weights)), strict=True):
            metrics.update(*part)
        return metrics.compute()

    @pytest.mark.parametrize("exact_samples", [2**24, 100], ids=["exact", "in bins"])
    def test_whole_weights_are_as_so_many_copies(self, exact_samples):
        logits, labels = random_samples(1500)
        logits = (logits * 4).round() / 4  # ties, which fall into one bin
        copies = torch.randint(0, 4, (1500,), generator=torch.Generator().manual_seed(3))
        found = self.weighted(logits, labels, copies.float(), exact_samples)
        expected = measure(logits.repeat_interleave(copies), labels.repeat_interleave(copies))
        for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)
        assert (found.min_prediction, found.max_prediction) == (expected.min_prediction, expected.max_prediction)

    def test_samples_of_weight_0_are_not_counted(self):
        logits, labels = random_samples(200)
        assert self.weighted(logits, labels, (torch.arange(200) % 4).float()).samples == 150

    def test_of_1_give_what_there_is_without_weights(self):
        logits, labels = random_samples(3000)
        assert self.weighted(logits, labels, torch.ones(3000)) == measure(logits, labels)

    def test_their_scale_does_not_matter(self):
        logits, labels = random_samples(500)
        weights = torch.rand(500, generator=torch.Generator().manual_seed(3))
        small, large = (self.weighted(logits, labels, weights * scale) for scale in (2**-10, 2**10))
        assert small == large

    def test_auc_follows_its_definition(self):
        logits, labels = random_samples(300)
        logits = logits.round()
        weights = torch.rand(300, generator=torch.Generator().manual_seed(3))
        positives, negatives = labels == 1, labels == 0
        pairs = weights[positives, None].double() * weights[None, negatives].double()
        x, y = logits[positives, None], logits[None, negatives]
        expected = (pairs * ((x > y).double() + 0.5 * (x == y).double())).sum() / pairs.sum()
        assert self.weighted(logits, labels, weights).auc == pytest.approx(expected.item(), rel=1e-12)
