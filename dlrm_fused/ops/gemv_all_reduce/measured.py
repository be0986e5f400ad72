"""The measurements of products + AllReduce of many rows, by rows, columns and K of one rank.

Nothing here is needed for a right result: other shapes are measured by ``auto`` itself, or have a rule.
"""

from __future__ import annotations

import torch

from dlrm_fused.ops.common.schedules import Shape

# The GPU and the dtype of all that follows.
MEASURED_ON, _MEASURED_DTYPE = "NVIDIA H200", torch.bfloat16

# By ranks, on one host with NVLink. Microseconds of chunks and library at commit 47fb11a:
# torchrun --nproc-per-node=2 -m benchmarks.gemv_all_reduce.benchmark --cells large
# From benchmarks/results/gemm_all_reduce_2_h200.json, where products were cut into as many chunks as they are now.
_SCHEDULES: dict[int, dict[Shape, str]] = {
    2: {
        (16384, 2048, 4096): "chunks",  # 569.2, 602.0
        (8192, 4096, 8192): "chunks",  # 933.0, 949.5
        (16384, 4096, 8192): "library",  # 1948.4, 1905.9
        (8192, 5120, 6912): "chunks",  # 991.4, 1056.5
        (16384, 5120, 6912): "library",  # 2121.3, 2079.6
        (4096, 8192, 4096): "chunks",  # 587.9, 607.6
        (8192, 8192, 4096): "chunks",  # 1179.9, 1200.0
        (16384, 8192, 4096): "library",  # 2471.2, 2354.2
        (4096, 8192, 14336): "library",  # 1601.1, 1475.8
        (8192, 8192, 14336): "library",  # 3264.7, 2990.3
        (16384, 8192, 14336): "library",  # 6635.7, 5965.3
    }
}


def table_of(ranks: int, dtype: torch.dtype) -> dict[Shape, str]:
    """The fastest schedule by rows, columns and K of one rank."""
    return _SCHEDULES.get(ranks, {}) if dtype == _MEASURED_DTYPE else {}
