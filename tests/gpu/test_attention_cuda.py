"""Attention of as many samples as an evaluation has at once, more than a kernel can be launched for; and of jagged batches."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.models.jagged import JaggedBatch, attend

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[0, 300, 17, 1, 299], [300, 300, 150], [0] * 70_000 + [1]], ids=["mixed", "long", "many"])
@pytest.mark.parametrize("padding", [0, 1])
def test_rows_of_jagged_samples_are_attended_to_as_padded_ones(dtype: torch.dtype, lengths: list[int], padding: int) -> None:
    """In 16 bits without padding, forward and backward, beside fp32 with it."""
    tokens, rows = max(lengths) + 1, sum(lengths) + len(lengths) + padding
    batch = JaggedBatch.of(torch.tensor(lengths, device="cuda"), tokens, rows)
    exact = torch.randn(rows, HEADS, 3, D_HEAD, device="cuda", dtype=dtype).float().requires_grad_()
    rounded = exact.detach().to(dtype).requires_grad_()
    upstream = torch.randn(rows, HEADS, D_HEAD, device="cuda", dtype=dtype)
    assert batch._needs_no_padding(rounded) == (len(lengths) < 2**16)
    assert not batch._needs_no_padding(exact)
    found, expected = batch.attend(rounded), batch.attend(exact)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(of, x, upstream.to(of.dtype))[0] for of, x in ((found, rounded), (expected, exact))]
    torch.testing.assert_close(gradients[0].float(), gradients[1], rtol=2e-2, atol=2e-2 * float(gradients[1].abs().max()))
