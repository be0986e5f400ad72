"""Attention of as many samples as an evaluation has at once, which is more than a kernel of attention can be launched for."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.models.jagged import attend

pytestmark = pytest.mark.gpu(1)

SAMPLES, HEADS, TOKENS, D_HEAD = 70_000, 2, 31, 64
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("of_candidates", [False, True])
def test_every_sample_is_attended_to(dtype: torch.dtype, of_candidates: bool) -> None:
    keys, values = torch.randn(2, SAMPLES, HEADS, TOKENS, D_HEAD, device="cuda", dtype=dtype)
    candidates = torch.randint(TOKENS, (SAMPLES,), device="cuda")
    seen = torch.arange(TOKENS, device="cuda") <= candidates[:, None]
    with torch.no_grad():
        attended = attend(keys[:, :, :1], keys, values, seen) if of_candidates else attend(keys, keys, values)
    for sample in (0, SAMPLES // 2, SAMPLES - 1):
        queries = keys[sample, :, :1] if of_candidates else keys[sample]
        scores = (queries.double() @ keys[sample].double().mT) / D_HEAD**0.5
        hidden = ~seen[sample] if of_candidates else torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        expected = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ values[sample].double()
        torch.testing.assert_close(attended[sample].double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
