"""The dense part is compiled for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import compile_fx

from dlrm_fused.models.dense_part import CompiledForTraining, has_odd_widths


class NotCompiledError(Exception):
    pass


def test_no_measurement_decides_in_which_order_a_compiled_function_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that is killed and goes on would have other bits than one that is not."""
    options: list[dict[str, Any]] = []

    def compile_nothing(*_: object, config_patches: dict[str, Any], **__: object) -> None:
        options.append(config_patches)
        raise NotCompiledError

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    compiled: CompiledForTraining[torch.Tensor] = CompiledForTraining(lambda x: x.sum(1), is_compiled=True)
    with pytest.raises(Exception, match="NotCompiledError"):
        compiled(torch.ones(4, 3, requires_grad=True))
    assert options[0]["deterministic"] is True


@pytest.mark.parametrize(
    ("widths", "precision", "expected"),
    [
        ((479, 1024), "high", True),
        ((1024, 479), "high", True),
        ((479, 1024), "highest", False),
        ((480, 1024), "high", False),
        ((13, 512), "high", False),
        ((512, 1), "high", False),
    ],
)
def test_large_matrices_of_odd_widths_are_filled_up_for_tensor_cores(
    widths: tuple[int, int], precision: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert has_odd_widths([torch.nn.Linear(16, 64), torch.nn.Linear(*widths)]) is expected
