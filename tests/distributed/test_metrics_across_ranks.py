"""BinaryMetrics and LossTracker over real gloo processes: the same result on all ranks, whatever their number."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.training.metrics import BinaryMetrics, BinaryMetricValues, LossSummary, LossTracker
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks

CPU = torch.device("cpu")
SAMPLES = 3000


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(SAMPLES, generator=generator) * 20).round() / 20  # with ties
    return logits, (torch.rand(SAMPLES, generator=generator) < logits.sigmoid()).float()


def measure(share: slice, exact_samples: int, shift: float = 0.0, weighted: bool = False) -> BinaryMetricValues:
    metrics = BinaryMetrics(CPU, exact_samples, weighted=weighted)
    logits, labels = (t[share] for t in samples())
    weights = torch.arange(SAMPLES)[share] % 3 / 2 if weighted else torch.ones_like(logits)
    for x, y, w in zip(logits.split(100), labels.split(100), weights.split(100), strict=True):
        x, padding = x + shift, torch.zeros(1)
        metrics.update(torch.cat([x, padding]), torch.cat([y, padding]), torch.cat([w, padding]))
    return metrics.compute()


def track(rank: int) -> list[LossSummary]:
    tracker = LossTracker()
    tracker.add(1, torch.tensor(1.0 + rank))
    healthy = tracker.read()
    for step in (2, 3, 4):
        tracker.add(step, torch.tensor(math.nan if rank == 1 and step >= 3 else 0.0))
    return [healthy, tracker.read()]


def work(shares: list[slice]) -> dict[str, Any]:
    """What a rank finds with its own share."""
    rank = Rank.from_environment()
    with process_group(rank, CPU):
        return {
            "exact": measure(shares[rank.index], SAMPLES),
            "bounded": measure(shares[rank.index], 500),
            "nan on one rank": measure(shares[rank.index], SAMPLES, shift=math.nan if rank.index == 1 else 0.0),
            "weighted": measure(shares[rank.index], SAMPLES, weighted=True),
            "losses": track(rank.index),
        }


@pytest.fixture(scope="module", params=["uneven", "one empty"])
def found_by_rank(request):
    shares = {
        "uneven": [slice(0, 700), slice(700, 2900), slice(2900, SAMPLES)],
        "one empty": [slice(0, 0), slice(0, SAMPLES)],
    }[request.param]
    return run_ranks(len(shares), work, shares)


@pytest.mark.parametrize("case", ["exact", "bounded", "weighted", "losses"])
def test_all_ranks_hold_the_same_result(found_by_rank, case):
    # By their text, in which NaN equals NaN; it holds every bit of a float.
    assert len({repr(found[case]) for found in found_by_rank}) == 1


@pytest.mark.parametrize(("case", "exact_samples"), [("exact", SAMPLES), ("bounded", 500)])
def test_the_result_is_that_of_one_process(found_by_rank, case, exact_samples):
    found, alone = found_by_rank[0][case], measure(slice(0, SAMPLES), exact_samples)
    rounded = {
        name: pytest.approx(getattr(alone, name), rel=1e-12) for name in ("log_loss", "normalized_entropy", "calibration")
    }
    assert found.auc_error == 0 if case == "exact" else found.auc_error > 0
    assert found == replace(alone, **rounded)  # the rest, AUC included, bit for bit


def test_the_result_of_weighted_samples_is_that_of_one_process_up_to_rounding(found_by_rank):
    found, alone = found_by_rank[0]["weighted"], measure(slice(0, SAMPLES), SAMPLES, weighted=True)
    assert asdict(found) == pytest.approx(asdict(alone), rel=1e-12)
    assert found.auc != found_by_rank[0]["exact"].auc


def test_nan_on_one_rank_reaches_all(found_by_rank):
    assert all(math.isnan(found["nan on one rank"].auc) for found in found_by_rank)


def test_the_loss_is_the_mean_over_ranks_and_a_bad_one_is_told_on_all(found_by_rank):
    healthy, bad = found_by_rank[0]["losses"]
    assert healthy == LossSummary(mean=(1 + len(found_by_rank)) / 2, steps=1, first_nonfinite_step=None)
    assert (bad.steps, bad.first_nonfinite_step) == (3, 3)
