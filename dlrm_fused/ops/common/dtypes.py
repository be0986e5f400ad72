"""The dtypes that kernels take."""

from __future__ import annotations

import torch
import triton.language as tl

# By torch's.
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES = tuple(TRITON_DTYPES)
