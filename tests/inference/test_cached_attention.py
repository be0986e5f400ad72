"""The attention to a kept history against plain torch, and online scoring with it. Under Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.inference.online.cached_attention import cached_attention, reference
from tests.distributed.launch import run_ranks
from tests.inference.test_online import Requests, scores, with_scorer

pytestmark = pytest.mark.interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, HEADS, MAX_KEYS = 2, 3, 300
# The interpreter has no product of bf16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


# Histories that are empty, shorter than a step of a split, and of several steps, with and without an incomplete one.
@pytest.mark.parametrize(
    ("rows", "keys", "d_head", "dtype"),
    [
        (1, 0, 16, torch.float32),
        (1, 5, 12, torch.float32),
        (3, 130, 20, torch.float32),
        (20, 300, 16, torch.float32),
        (1, 256, 32, HALF),
    ],
)
def test_equals_the_reference(rows: int, keys: int, d_head: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    projected = torch.randn(rows, HEADS, 3, d_head, generator=generator).to(DEVICE, dtype)
    kept = torch.randn(LAYERS, 2, HEADS, keys, d_head, generator=generator).to(DEVICE, dtype)
    cache = torch.tensor([kept.data_ptr(), keys], device=DEVICE)
    for layer in range(LAYERS):
        attended = cached_attention(projected, cache, layer, MAX_KEYS)
        expected = reference(projected.float(), *kept[layer].float())
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is HALF else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(attended.float(), expected, **tolerance)


def test_online_scores_are_those_of_the_full_model() -> None:
    requests = Requests([5], count=3)
    for result in run_ranks(2, with_scorer, True, torch.float32, scores, requests, [3]):
        torch.testing.assert_close(result, requests.of_full_model(), rtol=1e-4, atol=1e-5)
