"""Sums between GPUs of several hosts, with a stand-in of NCCL that has as many ranks as one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.gemv_all_reduce import between_hosts
from dlrm_fused.ops.gemv_all_reduce.between_hosts import SumsByNccl
from dlrm_fused.ops.gemv_all_reduce.workspace import Inputs


class Nccl:
    """What is summed is doubled when it is finished: two ranks with the same products."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, bool]] = []  # rows, and whether beside

    def all_reduce(self, values: Tensor, *, beside: bool) -> Any:
        self.begun.append((len(values), beside))
        return SimpleNamespace(finish=lambda: values.mul_(2.0))


@pytest.mark.parametrize(("has_bias", "has_residual"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize(("least_bytes", "begun"), [(1, [(2, True), (3, False)]), (1 << 30, [(5, False)])])
def test_one_rank_adds_bias_and_residual_and_all_pieces_but_the_last_are_summed_beside_the_next(
    has_bias: bool, has_residual: bool, least_bytes: int, begun: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between_hosts, "_BYTES_IN_HALVES", least_bytes)
    x, weight, bias, residual = (torch.randn(shape) for shape in ((5, 8), (6, 8), (6,), (5, 6)))
    inputs = Inputs(x, weight, bias if has_bias else None, residual if has_residual else None, None, 1e-6)
    for rank in range(2):
        nccl = Nccl()
        workspace: Any = SimpleNamespace(channel=nccl, rank=rank, device=torch.device("cpu"))
        out = SumsByNccl(inputs)(workspace, inputs)
        added = has_bias * bias + has_residual * residual if rank == 0 else torch.zeros(())
        torch.testing.assert_close(out, 2 * (x @ weight.T + added))
        assert nccl.begun == begun
