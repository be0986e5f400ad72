"""The dtypes that kernels take."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

# By torch's.
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES = tuple(TRITON_DTYPES)
LARGEST_FP16 = 65504.0


def within_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that can be copied into a tensor of ``dtype``: those beyond fp16 become its largest, as in TorchRec's codec."""
    return values.clamp(-LARGEST_FP16, LARGEST_FP16) if dtype == torch.float16 else values
