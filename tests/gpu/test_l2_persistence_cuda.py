"""A part of the L2 cache that keeps chosen memory: asked for and given back on a GPU; results are the same."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common import l2_persistence
from dlrm_fused.ops.common.l2_persistence import forget_kept, set_aside
from dlrm_fused.ops.embedding_all_to_all.reduce import add_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def limit() -> int:
    """Bytes that are set aside."""
    size = ctypes.c_size_t()
    l2_persistence._call("cuCtxGetLimit", ctypes.byref(size), l2_persistence._LIMIT_PERSISTING_L2)
    return size.value


def test_what_is_set_aside_keeps_memory_and_is_given_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    parts, expected, kept_result = torch.randn(4, 256, 512, device=device), *torch.empty(2, 256, 512, device=device)
    add_up(parts, expected)
    before = limit()
    try:
        with set_aside(device) as kept:
            assert limit() >= kept.size > 0
            with torch.cuda.stream(torch.cuda.Stream()), kept.keep(parts):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                add_up(parts, kept_result)
            torch.cuda.synchronize()
            forget_kept()
    except UsageError as refused:
        pytest.skip(str(refused))
    assert limit() == before
    assert torch.equal(kept_result, expected)
