"""The update of embedding tables, whose kernels run on the CPU under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_update import sort_lookup
from tests.kernels.lookups import make_tables

ROOT = Path(__file__).parents[2]


def test_kernels_under_the_interpreter() -> None:
    # Triton decides when it is imported, so in a process of their own.
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/check_embedding_update.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]
    assert " passed" in result.stdout
    assert " skipped" not in result.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is about Triton without the interpreter")
def test_tables_on_the_cpu_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match="TRITON_INTERPRET=1"):
        sort_lookup(make_tables([4], [4], [0]), torch.tensor([1]), torch.tensor([0, 1]))
