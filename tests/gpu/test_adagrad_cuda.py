"""Adagrad's kernel on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_adagrad import check_steps

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_torch(weight_decay: float) -> None:
    check_steps(torch.device("cuda"), weight_decay)
