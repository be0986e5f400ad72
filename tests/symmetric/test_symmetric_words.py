"""Words of a channel are set by host code as kernels set them, and sizes are said so that people can read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import channel, symmetric_group
from dlrm_fused.symmetric.memory import readable


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
