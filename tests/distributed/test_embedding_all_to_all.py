"""The fused lookup + All-to-All: its kernels in real processes on the CPU, under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import run_interpreted


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    checks = ("embedding_all_to_all", "operator", "example")
    assert run_interpreted([f"tests/kernels/check_{name}.py" for name in checks]) >= len(checks)
