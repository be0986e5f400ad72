"""What was measured of AllGather + GEMM and GEMM + ReduceScatter, by shape: rows of all ranks, columns and K of one rank, and
bytes of an element.

Nothing here is needed for a right result: for other shapes there is a rule, and ``auto`` measures for itself.
"""

from __future__ import annotations

import torch

from dlrm_fused.ops.schedules import Pair

Shape = tuple[int, int, int, int]

# The GPU of all that follows.
MEASURED_ON = "NVIDIA H200"

# The fastest schedule, by ranks, on one host with NVLink.
SCHEDULES: dict[Pair, dict[int, dict[Shape, str]]] = {Pair.all_gather_gemm: {}, Pair.gemm_reduce_scatter: {}}


def table_of(pair: Pair, ranks: int, dtype: torch.dtype) -> dict[tuple[int, int, int], str]:
    """The fastest schedule by rows, columns and K."""
    return {shape[:3]: fastest for shape, fastest in SCHEDULES[pair].get(ranks, {}).items() if shape[3] == dtype.itemsize}
