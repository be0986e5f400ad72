"""Warm-up, decay and floor of the learning rates."""

import pytest
import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_fused.config import ScheduleConfig
from dlrm_fused.training.schedule import LearningRates, factor

MLPERF = ScheduleConfig(warmup_steps=2750, decay_start_step=49315, decay_steps=27772, decay_power=2.0)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 2750),
        (2748, 2749 / 2750),
        (2749, 1.0),
        (2750, 1.0),
        (49314, 1.0),
        (49315, 1.0),
        (49315 + 13886, 0.25),  # half of the decay, squared
        (49315 + 27772, 0.0),
        (10**6, 0.0),
    ],
)
def test_warm_up_then_constant_then_polynomial_decay(step, expected):
    assert factor(MLPERF, step) == pytest.approx(expected)


def test_by_default_the_rate_is_constant():
    assert {factor(ScheduleConfig(), step) for step in (0, 1, 10**6)} == {1.0}


def test_the_decay_ends_at_the_floor():
    schedule = ScheduleConfig(decay_start_step=10, decay_steps=10, decay_power=1.0, floor=0.3)
    assert [factor(schedule, step) for step in (10, 15, 17, 18, 20, 99)] == pytest.approx([1.0, 0.5, 0.3, 0.3, 0.3, 0.3])


def test_the_factor_never_grows_after_the_warm_up():
    factors = [factor(MLPERF, step) for step in range(2749, 80_000, 50)]
    assert factors == sorted(factors, reverse=True)


def test_all_parameter_groups_follow_and_keep_their_own_rates():
    weights = {"a": torch.nn.Parameter(torch.zeros(1)), "b": torch.nn.Parameter(torch.zeros(1))}
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper({"a": weights["a"]}, lambda p: torch.optim.SGD(p, lr=1.0)),
            KeyedOptimizerWrapper({"b": weights["b"]}, lambda p: torch.optim.SGD(p, lr=10.0)),
        ]
    )
    rates = LearningRates(ScheduleConfig(warmup_steps=4), optimizer)
    for step, expected in ((0, 0.25), (1, 0.5), (3, 1.0), (1, 0.5)):
        rates.apply(step)
        assert rates.factor == expected
        assert [group["lr"] for group in optimizer.param_groups] == [expected, 10 * expected]
