"""GEMM + All-to-All in plain torch and torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.all_to_all import all_to_all


def reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """Row block s is this rank's block of rank s's ``x @ weight.T``: a product, then an All-to-All."""
    return all_to_all(torch.nn.functional.linear(x, weight), process_group)
