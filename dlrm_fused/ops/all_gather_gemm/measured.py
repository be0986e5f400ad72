"""The measurements of AllGather + GEMM and GEMM + ReduceScatter, by shape: rows of all ranks, columns and K of one rank, and
bytes of an element.

Nothing here is needed for a right result: for other shapes there is a rule, and ``auto`` measures for itself.
"""

from __future__ import annotations

import torch

from dlrm_fused.ops.schedules import Pair

Shape = tuple[int, int, int, int]

# The GPU of all that follows.
MEASURED_ON = "NVIDIA H200"

# The fastest schedule, by ranks, on one host with NVLink. Microseconds of it and of the library at commit 497b586:
# torchrun --nproc-per-node=2 -m benchmarks.all_gather_gemm.benchmark
# From benchmarks/results/schedules/all_gather_gemm_2_h200.json and gemm_reduce_scatter_2_h200.json; without disturbed calls.
SCHEDULES: dict[Pair, dict[int, dict[Shape, str]]] = {
    Pair.all_gather_gemm: {
        2: {
            (1024, 1024, 2048, 2): "kernel",  # 19.0, 36.1
            (1024, 1280, 8192, 2): "kernel",  # 56.9, 85.5
            (1024, 2048, 1024, 2): "kernel",  # 15.4, 27.0
            (1024, 3072, 4096, 2): "chunks",  # 47.2, 74.2
            (1024, 3584, 4096, 2): "chunks",  # 51.9, 79.2
            (1024, 4096, 4096, 2): "arriving",  # 56.9, 84.7
            (1024, 7168, 8192, 2): "chunks",  # 173.6, 230.0
            (4096, 768, 4096, 2): "chunks",  # 77.4, 124.7
            (4096, 1024, 2048, 2): "kernel",  # 44.4, 80.1
            (4096, 1280, 8192, 2): "chunks_2",  # 138.4, 267.6
            (4096, 2048, 1024, 2): "arriving",  # 37.1, 64.2
            (4096, 3072, 4096, 2): "arriving_4",  # 144.4, 227.8
            (4096, 3584, 4096, 2): "chunks_2",  # 180.5, 259.7
            (4096, 4096, 4096, 2): "arriving",  # 187.9, 271.0
            (4096, 7168, 8192, 2): "chunks",  # 628.8, 772.3
            (16384, 768, 4096, 2): "tapered",  # 222.4, 429.2
            (16384, 1024, 2048, 2): "chunks_4",  # 132.4, 252.4
            (16384, 1280, 8192, 2): "arriving_4",  # 470.5, 987.6
            (16384, 3072, 4096, 2): "chunks",  # 554.4, 824.3
            (16384, 3584, 4096, 2): "chunks",  # 644.0, 912.7
            (16384, 4096, 4096, 2): "chunks",  # 731.5, 1018.6
            (16384, 7168, 8192, 2): "chunks",  # 2486.4, 3038.0
            (65536, 768, 4096, 2): "tapered",  # 779.4, 1589.6
            (65536, 1024, 2048, 2): "arriving_4",  # 422.4, 912.9
            (65536, 1280, 8192, 2): "chunks_2",  # 1844.1, 3748.8
            (65536, 2048, 1024, 2): "chunks",  # 400.0, 678.9
            (65536, 3072, 4096, 2): "chunks",  # 2167.3, 3167.4
            (65536, 3584, 4096, 2): "chunks_2",  # 2553.4, 3551.9
            (65536, 4096, 4096, 2): "arriving",  # 2900.6, 3923.5
            (65536, 7168, 8192, 2): "chunks_4",  # 10100.5, 12626.0
        }
    },
    Pair.gemm_reduce_scatter: {
        2: {
            (1024, 1024, 2048, 2): "kernel",  # 18.5, 25.3
            (1024, 2048, 1024, 2): "kernel",  # 21.6, 33.6
            (1024, 4096, 512, 2): "kernel",  # 26.9, 42.5
            (1024, 4096, 1024, 2): "kernel",  # 32.0, 47.7
            (1024, 4096, 4096, 2): "kernel",  # 65.5, 80.0
            (1024, 8192, 1024, 2): "kernel",  # 58.4, 78.8
            (1024, 8192, 3584, 2): "kernel",  # 111.3, 134.5
            (4096, 1024, 2048, 2): "kernel",  # 44.7, 58.3
            (4096, 4096, 1024, 2): "tapered",  # 94.4, 142.0
            (4096, 4096, 1792, 2): "chunks_2",  # 110.2, 176.3
            (4096, 4096, 4096, 2): "chunks_2",  # 198.2, 274.1
            (4096, 8192, 1024, 2): "chunks_4",  # 150.5, 264.9
            (4096, 8192, 3584, 2): "chunks_2",  # 344.9, 477.7
            (16384, 1024, 2048, 2): "chunks_2",  # 118.1, 189.8
            (16384, 2048, 1024, 2): "chunks_4",  # 149.7, 265.7
            (16384, 4096, 512, 2): "tapered",  # 232.9, 416.6
            (16384, 4096, 1024, 2): "chunks_4",  # 264.8, 503.4
            (16384, 4096, 1792, 2): "chunks_4",  # 380.5, 629.1
            (16384, 4096, 4096, 2): "chunks_2",  # 764.3, 1033.9
            (16384, 8192, 1024, 2): "chunks_4",  # 491.9, 969.1
            (16384, 8192, 3584, 2): "chunks_2",  # 1346.4, 1852.6
            (65536, 1024, 2048, 2): "chunks_4",  # 425.1, 674.2
            (65536, 2048, 1024, 2): "chunks_4",  # 492.9, 975.8
            (65536, 4096, 512, 2): "chunks_8",  # 823.0, 1514.3
            (65536, 4096, 1024, 2): "chunks_4",  # 947.6, 1849.2
            (65536, 4096, 1792, 2): "tapered",  # 1473.4, 2357.6
            (65536, 4096, 4096, 2): "tapered",  # 3022.7, 3952.4
            (65536, 8192, 1024, 2): "chunks_4",  # 1870.4, 3520.1
            (65536, 8192, 3584, 2): "tapered",  # 5290.0, 6946.7
        }
    },
}


def table_of(pair: Pair, ranks: int, dtype: torch.dtype) -> dict[tuple[int, int, int], str]:
    """The fastest schedule by rows, columns and K."""
    return {shape[:3]: fastest for shape, fastest in SCHEDULES[pair].get(ranks, {}).items() if shape[3] == dtype.itemsize}
