"""The update of embedding tables, whose kernels run on the CPU under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all.update import sort_lookup
from tests.ops.embedding_all_to_all.lookups import make_tables
from tests.ops.interpreter import run_interpreted


@pytest.mark.slow
def test_kernels_under_the_interpreter() -> None:
    assert run_interpreted(["tests/ops/embedding_all_to_all/check_embedding_update.py"])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is about Triton without the interpreter")
def test_tables_on_the_cpu_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match="TRITON_INTERPRET=1"):
        sort_lookup(make_tables([4], [4], [0]), torch.tensor([1]), torch.tensor([0, 1]))
