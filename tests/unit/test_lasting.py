"""State that later calls change does not depend on the modes under which it was made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from dlrm_fused.lasting import lasting, lasting_property
from dlrm_fused.training.metrics import BinaryMetrics


class Owner:
    @lasting_property
    def state(self) -> Tensor:
        return torch.zeros(3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
@pytest.mark.parametrize("make", [lasting(lambda: torch.zeros(3)), lambda: Owner().state])
def test_a_training_step_changes_and_differentiates_it(
    mode: Callable[[], AbstractContextManager[object]], make: Callable[[], Tensor]
) -> None:
    with mode():
        state = make()
    state.add_(2.0)
    factor = torch.ones(3, requires_grad=True)
    (factor * state).sum().backward()
    assert factor.grad is not None
    assert factor.grad.tolist() == [2.0, 2.0, 2.0]


def test_it_records_no_gradients_and_leaves_the_modes_as_they_were() -> None:
    weight = torch.ones(2, requires_grad=True)
    double = lasting(lambda: 2 * weight)
    assert not double().requires_grad
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        double()
        assert torch.is_inference_mode_enabled()


def test_metrics_that_begin_in_inference_mode_go_on_outside() -> None:
    logits, labels, weights = torch.tensor([-1.0, 2.0, 0.5]), torch.tensor([0, 1, 0]), torch.ones(3)
    expected = BinaryMetrics(torch.device("cpu"), exact_samples=4)
    with torch.inference_mode():
        metrics = BinaryMetrics(torch.device("cpu"), exact_samples=4)
        for of_both in (metrics, expected):
            of_both.update(logits, labels, weights)
            of_both.update(logits, labels, weights)
    for of_both in (metrics, expected):
        of_both.update(logits, labels, weights)
    assert metrics.compute() == expected.compute()
