"""Tests of kernels on the CPU: pytest in a process of its own, since Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(tests: Sequence[str]) -> int:
    """Run these tests under Triton's interpreter, and fail if one fails or is skipped; returns how many passed."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2_000:]
    assert " skipped" not in ended.stdout
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed, ended.stdout[-2_000:]
    return int(passed[1])
