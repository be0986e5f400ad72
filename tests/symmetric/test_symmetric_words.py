"""Host code and kernels mean the same by the words of a channel, so that both may use one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import channel, device, symmetric_group
from dlrm_fused.symmetric.memory import readable


@pytest.mark.parametrize(
    ("host", "kernel"),
    [
        ("_EPOCH", "EPOCH"),
        ("_FAULT", "FAULT"),
        ("_ABORT", "ABORT"),
        ("_LIMIT_EXCEEDED", "LIMIT_EXCEEDED"),
        ("_ABORTED", "ABORTED"),
        ("_REFUSED", "REFUSED"),
        ("_MISMATCH", "MISMATCH"),
        ("_READY", "READY"),
        ("_ARRIVAL", "ARRIVAL"),
        ("OFFSET_UNIT", "OFFSET_UNIT"),
        ("_REFUSED_OFFSET", "REFUSED_OFFSET"),
    ],
)
def test_words_and_values_are_those_of_the_kernels(host: str, kernel: str) -> None:
    assert getattr(channel, host) == getattr(device, kernel).value


def test_words_are_stored_and_loaded_at_any_address() -> None:
    words = np.zeros(4, dtype=np.int64)
    for value in (7 << 40, -3, (1 << 63) - 1):
        channel._store_release(words.ctypes.data + 16, value)
        assert words.tolist() == [0, 0, value, 0]
        assert channel._load_acquire(words.ctypes.data + 16) == value


def test_only_cpu_and_cuda_have_symmetric_memory() -> None:
    with pytest.raises(UsageError, match="device=meta: symmetric memory exists for cpu and cuda"):
        symmetric_group(device=torch.device("meta"))


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (64 << 20, "67.1 MB"), (3 * 10**16, "30.0 PB")]
)
def test_sizes_are_readable(size: int, words: str) -> None:
    assert readable(size) == words
