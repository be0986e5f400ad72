"""The fused lookup + All-to-All: its kernels in real processes on the CPU, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = [f"tests/kernels/check_{name}.py" for name in ("embedding_all_to_all", "operator", "example")]
ROOT = Path(__file__).parents[2]


def test_kernels_under_the_interpreter() -> None:
    # Triton decides when it is imported, so in a process of their own.
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout
