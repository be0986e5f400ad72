"""The update of embedding tables where its kernels cannot run."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all.update import sort_lookup
from tests.ops.embedding_all_to_all.lookups import make_tables


def test_tables_on_the_cpu_are_refused_without_the_interpreter() -> None:
    with pytest.raises(UsageError, match="TRITON_INTERPRET=1"):
        sort_lookup(make_tables([4], [4], [0]), torch.tensor([1]), torch.tensor([0, 1]))
