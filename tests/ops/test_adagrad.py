"""The kernel steps as torch's Adagrad does."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.ops.adagrad import Adagrad

STEPS = 4


def check_steps(device: torch.device, weight_decay: float) -> None:
    """Some elements never have a gradient; rates change; a step without gradient counts for nothing."""
    torch.manual_seed(0)
    initial = torch.randn(3000, device=device)
    own, expected = (torch.nn.Parameter(initial.clone()) for _ in range(2))
    kernel = Adagrad(own, lr=0.1, weight_decay=weight_decay, eps=1e-8)
    torchs = torch.optim.Adagrad([expected], lr=0.1, weight_decay=weight_decay, eps=1e-8)
    for step in range(STEPS):
        gradient = torch.randn_like(initial)
        gradient[::7] = 0
        own.grad = expected.grad = None if step == 1 else gradient
        for optimizer in (kernel, torchs):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)
    state, expected_state = kernel.state[own], torchs.state[expected]
    torch.testing.assert_close(state["sum"], expected_state["sum"], rtol=1e-6, atol=0)
    assert state["step"] == expected_state["step"] == STEPS - 1
    if not weight_decay:
        assert own[::7].equal(initial[::7])


@pytest.mark.interpreted
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_torch(weight_decay: float) -> None:
    check_steps(torch.device("cpu"), weight_decay)
