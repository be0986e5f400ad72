"""Products of random operands on several GPUs, compared in fp64, and calls that a workspace refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import synchronize

TIMEOUT_SECONDS = 20.0
FP32 = torch.float32


class Products:
    """Operands of this rank, over one workspace, and how far results may be from what they must be.

    Args:
        tolerance: by dtype, of the largest element.
    """

    def __init__(self, group: SymmetricGroup, dtype: torch.dtype, workspace: Any, tolerance: dict[torch.dtype, float]) -> None:
        self.group, self.dtype, self.workspace = group, dtype, workspace
        self._tolerance = tolerance[dtype]

    def operands(self, rows: int, columns: int, depth: int, seed: int) -> tuple[Tensor, Tensor]:
        """x [rows, depth] and weight [columns, depth]."""
        generator = torch.Generator().manual_seed(100 * seed + self.group.rank + 1)
        x = torch.randn(rows, depth, generator=generator)
        weight = torch.randn(columns, depth, generator=generator) * depth**-0.5
        return x.to(self.group.device, self.dtype), weight.to(self.group.device, self.dtype)

    def assert_close(self, found: Tensor, right: Tensor) -> None:
        atol = self._tolerance * right.abs().max().item()
        torch.testing.assert_close(found.double(), right.double(), rtol=self._tolerance, atol=atol)


def check_refused(group: SymmetricGroup, workspace: Any, call: Callable[[bool], object], culprit: str) -> None:
    """Rank 1 makes a wrong call, ``call(True)``, the others a right one: it is told so, the others that it was rank 1."""
    wrong = group.rank == 1
    with pytest.raises(UsageError if wrong else CommunicationError) as raised:
        call(wrong)
        synchronize()
        workspace.raise_fault()
    assert (culprit if wrong else "rank 1 on") in str(raised.value)


def check_calls_that_differ(workspace: Any, call: Callable[[], object]) -> None:
    with pytest.raises(CommunicationError, match="differ in shapes or settings"):
        call()
        synchronize()
        workspace.raise_fault()
