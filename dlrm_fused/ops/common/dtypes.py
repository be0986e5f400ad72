"""The dtypes that kernels take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# By torch's.
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES = tuple(TRITON_DTYPES)
LARGEST_FP16 = 65504.0
_LARGEST_FP16 = tl.constexpr(LARGEST_FP16)


def within_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that can be copied into a tensor of ``dtype``: those beyond fp16 become its largest, as in TorchRec's codec."""
    return values.clamp(-LARGEST_FP16, LARGEST_FP16) if dtype == torch.float16 else values


def uses_tf32(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of this dtype in TF32 on GPUs."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


@triton.jit
def to_wire(values, dtype: tl.constexpr):
    """Values in the wire's dtype; fp16 ends at its largest number, as TorchRec's codec does, and NaN stays NaN."""
    if dtype == tl.float16:
        # Unless told to keep it, a GPU makes a number of NaN; the interpreter does not.
        values = tl.clamp(values, -_LARGEST_FP16, _LARGEST_FP16, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)
