"""The measurements of GEMM + All-to-All, by shape: rows, columns and K of one rank, and bytes of an element of x.

Nothing here is needed for a right result: for other shapes tuning.py has rules, and ``auto`` measures for itself.
"""

from __future__ import annotations

import torch

Shape = tuple[int, int, int, int]

# The GPU of all that follows.
MEASURED_ON = "NVIDIA H200"

# Fields of Tiles, by the product alone in bf16, commit e9d2747, torch 2.11.0, triton 3.6.0:
# torchrun --nproc-per-node=1 -m benchmarks.gemm_all_to_all.tune --alone --most 120
# Printed by --table from benchmarks/results/tune_gemm_alone_one_h200.json and ..._few_tiles_one_h200.json (--cells few).
TILES: dict[Shape, tuple[int, ...]] = {
    (1024, 1024, 4096, 2): (64, 128, 128, 4, 4, 4, 1, 1),  # 15.7 us; the library's 15.4
    (1024, 4096, 1024, 2): (128, 256, 64, 4, 8, 3, 1, 1),  # 15.8 us; the library's 15.6
    (1024, 7168, 2048, 2): (128, 256, 64, 8, 8, 4, 1, 1),  # 47.5 us; the library's 47.0
    (1024, 14336, 4096, 2): (128, 128, 64, 8, 4, 5, 1, 1),  # 163.0 us; the library's 155.0
    (2048, 2048, 2048, 2): (128, 256, 64, 4, 8, 3, 1, 1),  # 25.8 us; the library's 25.6
    (2048, 4096, 1024, 2): (128, 128, 64, 4, 4, 3, 2, 1),  # 27.6 us; the library's 27.1
    (2048, 4096, 14336, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 297.3 us; the library's 296.4
    (4096, 1024, 1024, 2): (128, 256, 64, 8, 8, 3, 1, 1),  # 15.7 us; the library's 15.5
    (4096, 4096, 4096, 2): (128, 256, 64, 8, 8, 3, 1, 1),  # 177.8 us; the library's 175.1
    (4096, 14336, 4096, 2): (128, 256, 64, 16, 8, 4, 1, 1),  # 620.2 us; the library's 616.0
    (8192, 1024, 2048, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 49.2 us; the library's 48.3
    (8192, 2048, 7168, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 301.5 us; the library's 300.2
    (8192, 4096, 4096, 2): (128, 256, 64, 16, 8, 4, 1, 1),  # 355.3 us; the library's 350.6
    (8192, 4096, 14336, 2): (128, 256, 64, 16, 8, 4, 1, 1),  # 1216.9 us; the library's 1205.9
    (16384, 1024, 4096, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 178.0 us; the library's 177.2
    (16384, 4096, 1024, 2): (128, 256, 64, 16, 8, 3, 1, 1),  # 197.2 us; the library's 193.3
    (16384, 7168, 2048, 2): (128, 256, 64, 16, 8, 3, 1, 1),  # 647.0 us; the library's 634.4
    (32768, 1024, 1024, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 103.1 us; the library's 99.1
    (32768, 4096, 4096, 2): (128, 256, 64, 16, 8, 4, 1, 1),  # 1508.8 us; the library's 1529.9
    (32768, 7168, 2048, 2): (128, 256, 64, 4, 8, 4, 1, 1),  # 1350.5 us; the library's 1382.3
    (128, 2048, 8192, 2): (64, 64, 128, 4, 4, 5, 1, 2),  # 16.4 us; the library's 17.8
    (256, 256, 8192, 2): (64, 64, 128, 4, 4, 5, 1, 4),  # 11.0 us; the library's 10.0
    (256, 1024, 4096, 2): (64, 64, 128, 4, 4, 5, 1, 2),  # 10.1 us; the library's 10.6
    (512, 512, 4096, 2): (64, 64, 128, 4, 4, 5, 1, 2),  # 10.1 us; the library's 10.2
    (512, 1024, 8192, 2): (64, 128, 128, 4, 4, 4, 1, 2),  # 19.4 us; the library's 19.3
    (1024, 512, 2048, 2): (64, 64, 128, 4, 4, 4, 1, 1),  # 8.6 us; the library's 7.5
}

# By ranks, on one host with NVLink. Microseconds of kernel, chunks, and library at commit 8941f35:
# torchrun --nproc-per-node=4 -m benchmarks.gemm_all_to_all.benchmark --stage all
# From benchmarks/results/gemm_all_to_all_4_h200.json. The kernel's tiles were those of a rule then; where they are others now,
# the kernel was the fastest already or its product takes as long as before, within 1.5 %. Without 1024x1024x4096, whose
# product takes half as long now.
SCHEDULES: dict[int, dict[Shape, str]] = {
    4: {
        (1024, 4096, 1024, 2): "kernel",  # 34.8, 60.1, 52.4
        (1024, 7168, 2048, 2): "kernel",  # 72.7, 92.1, 104.0
        (1024, 14336, 4096, 2): "kernel",  # 210.5, 217.5, 254.0
        (2048, 2048, 2048, 2): "kernel",  # 50.6, 71.0, 63.3
        (2048, 4096, 1024, 2): "kernel",  # 59.6, 90.1, 91.0
        (2048, 4096, 14336, 2): "kernel",  # 329.1, 339.0, 361.9
        (4096, 1024, 1024, 2): "kernel",  # 36.3, 58.8, 52.1
        (4096, 4096, 4096, 2): "chunks",  # 223.5, 216.1, 286.7
        (4096, 14336, 4096, 2): "chunks",  # 695.3, 691.5, 914.2
        (8192, 1024, 2048, 2): "kernel",  # 82.4, 95.2, 110.9
        (8192, 2048, 7168, 2): "chunks",  # 348.1, 334.2, 408.3
        (8192, 4096, 4096, 2): "chunks",  # 411.6, 399.7, 534.1
        (8192, 4096, 14336, 2): "chunks",  # 1284.8, 1248.2, 1386.8
        (16384, 1024, 4096, 2): "chunks",  # 227.2, 216.6, 288.6
        (16384, 4096, 1024, 2): "kernel",  # 361.9, 405.3, 536.6
        (16384, 7168, 2048, 2): "chunks",  # 762.5, 753.0, 1207.7
        (32768, 1024, 1024, 2): "kernel",  # 194.5, 218.1, 285.1
        (32768, 4096, 4096, 2): "kernel",  # 1530.7, 1544.3, 2081.3
        (32768, 7168, 2048, 2): "kernel",  # 1447.2, 1476.8, 2363.2
    }
}


def table_of(ranks: int, dtype: torch.dtype) -> dict[tuple[int, int, int], str]:
    """The fastest schedule by rows, columns and K of one rank."""
    return {shape[:3]: fastest for shape, fastest in SCHEDULES.get(ranks, {}).items() if shape[3] == dtype.itemsize}
