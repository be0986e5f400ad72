"""The fused lookup + All-to-All: its kernels in real processes on the CPU, under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import run_interpreted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding_all_to_all", "operator", "example"])
def test_kernels_under_the_interpreter(name: str) -> None:
    assert run_interpreted([f"tests/kernels/check_{name}.py"]) >= 1
