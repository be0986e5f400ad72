"""HSTU over histories: its encodings and gradients are those of the paper's equations on padded samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from dlrm_fused.datasets import Dataset
from dlrm_fused.datasets.identity import difference, digests_of
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.models.hstu import Hstu
from dlrm_fused.models.tensor_parallel import rms_norm
from dlrm_fused.ops.hstu_attention import BUCKETS
from tests.unit.small_models import config_of
from tests.unit.test_transformer import gradients

HISTORY, WIDTH, TOKENS = 4, 6, 5
LENGTHS = torch.tensor([0, 2, 4], dtype=torch.int32)
MIXED = [3, 0, 4, 1, 2, 4, 0, 1, 1]


def hstu(layers: int = 2, reads_times: bool = True) -> Hstu:
    """Return a model whose biases count for as much as its products."""
    torch.manual_seed(1)
    model = Hstu(token_width=WIDTH, d_model=8, heads=2, layers=layers, history_length=HISTORY, reads_times=reads_times)
    with torch.no_grad():
        for block, _ in model.stages():
            for parameter in (block.by_distance, block.by_time, block.gated_norm):
                if parameter is not None:
                    parameter += torch.randn_like(parameter)
    return model


def tokens(samples: int = len(LENGTHS)) -> Tensor:
    return torch.randn(samples, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))


def times(samples: int = len(LENGTHS)) -> Tensor:
    """Return seconds since 1970, from a second to years apart: [samples, T] int64."""
    gaps = torch.randint(0, 28, (samples, TOKENS), generator=torch.Generator().manual_seed(3))
    return 1_700_000_000 + (1 << gaps).cumsum(1)


def encode(model: Hstu, vectors: Tensor, lengths: Tensor = LENGTHS, of_times: Tensor | None = None) -> Tensor:
    of_times = times(len(lengths)) if of_times is None else of_times
    with torch.no_grad():
        return model(vectors.flatten(0, 1), lengths, token_times=of_times)


def by_the_equations(model: Hstu, vectors: Tensor, lengths: Tensor, of_times: Tensor) -> Tensor:
    """Compute the encodings by blocks that all read [b, T, ...], one head after the other."""
    places, last = torch.arange(TOKENS), lengths.long()[:, None]
    apart = (places[:, None] - places).clamp(min=0)
    seconds = (of_times[:, :, None] - of_times[:, None]).clamp(min=1).double()
    # Two buckets an octave: in the upper one is the upper half of its numbers.
    octave = seconds.log2().floor()
    bucket = (2 * octave + (seconds >= 1.5 * 2**octave)).long().clamp(max=BUCKETS - 1)
    x = model.input(vectors) + model.positions[(last - places).clamp(min=0)]
    for block, _ in model.stages():
        projected = torch.nn.functional.silu(rms_norm(x, block.attention_norm) @ block.projection.weight.T)
        gated = []
        for head, of_head in enumerate(projected.unflatten(-1, (model.heads, 4, -1)).unbind(2)):
            q, k, v, u = of_head.unbind(2)
            scores = q @ k.mT / q.shape[-1] ** 0.5 + block.by_distance[head][apart]
            if block.by_time is not None:
                scores = scores + block.by_time[head][bucket]
            shares = torch.nn.functional.silu(scores).masked_fill(places > places[:, None], 0.0) / TOKENS
            av = shares @ v
            normed = (av - av.mean(-1, keepdim=True)) / (av.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
            gated.append(normed * block.gated_norm[head] * u)
        x = x + torch.cat(gated, dim=-1) @ block.out.weight.T
    return rms_norm(x, model.final_norm)[torch.arange(len(lengths)), lengths.long()]


@pytest.mark.parametrize("reads_times", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [MIXED, [0, 4], [0, 0, 0], [4, 4], [2], []],
    ids=["mixed", "none and all", "no histories", "full", "one sample", "no sample"],
)
def test_encodings_and_gradients_are_those_of_the_equations(lengths: list[int], reads_times: bool) -> None:
    model, of = hstu(reads_times=reads_times), torch.tensor(lengths, dtype=torch.int32)
    vectors, of_times = tokens(len(lengths)).requires_grad_(), times(len(lengths))
    inputs = vectors, *model.parameters()
    expected = by_the_equations(model, vectors, of, of_times)
    expected_gradients = gradients(expected, *inputs)
    room, count = len(lengths) * TOKENS, sum(lengths) + len(lengths)
    # Ranks that share layers have as many rows as the rank with the most.
    for rows in {None, count, min(count + 3, room), room}:
        encoded = model(vectors.flatten(0, 1), of, None, rows, of_times)
        torch.testing.assert_close(encoded, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(encoded, *inputs), expected_gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_candidate_sees_its_history_and_itself(layers: int) -> None:
    model, vectors = hstu(layers=layers), tokens()
    before = encode(model, vectors)
    for sample, length in enumerate(LENGTHS.tolist()):
        for place in range(TOKENS):
            changed = vectors.clone()
            changed[sample, place] += 1.0
            differs = (encode(model, changed) != before).any(dim=1)
            assert differs.tolist() == [i == sample and place <= length for i in range(len(LENGTHS))]


def test_it_sees_when_tokens_happened_relative_to_each_other() -> None:
    model, vectors, later = hstu(), tokens(), times()
    later[2, 3:] += 10**8
    before, after = encode(model, vectors), encode(model, vectors, of_times=later)
    assert (after != before).any(dim=1).tolist() == [False, False, True]
    assert torch.equal(encode(model, vectors, of_times=times() + 10**8), before)


def test_without_times_it_does_not() -> None:
    model, vectors = hstu(reads_times=False), tokens()
    assert torch.equal(encode(model, vectors, of_times=2 * times()), encode(model, vectors))


def test_a_set_without_times_of_tokens_is_other_data(tmp_path: Path) -> None:
    """A model that has learned biases by time would otherwise go on without them."""

    def digests(kind: str, has_token_times: bool) -> dict[str, str]:
        settings = ["data.source=prepared", "data.path=set", f"model.kind={kind}", "model.d_model=8"]
        schema = DatasetSchema(("x",), (SparseFeature("item", 5),), has_token_times=has_token_times)
        return digests_of(config_of(tmp_path, *settings), cast(Dataset, SimpleNamespace(schema=schema)))

    assert "model.kind=hstu" in (difference(digests("hstu", True), digests("hstu", False)) or "")
    assert difference(digests("transformer", True), digests("transformer", False)) is None


def test_every_parameter_gets_a_gradient() -> None:
    model = hstu()
    encoded = model(tokens().flatten(0, 1), LENGTHS, token_times=times())
    (encoded * torch.randn(encoded.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_encodings_do_not_depend_on_whether_gradients_are_wanted() -> None:
    model = hstu()
    trained = model(tokens().flatten(0, 1), LENGTHS, token_times=times())
    torch.testing.assert_close(encode(model, tokens()), trained.detach())


@pytest.mark.parametrize("wants_gradients", [True, False])
def test_what_is_between_products_has_16_bits_under_autocast(monkeypatch: pytest.MonkeyPatch, wants_gradients: bool) -> None:
    seen, layer_norm = [], torch.nn.functional.layer_norm

    def norm(*inputs: object, **settings: object) -> Tensor:
        seen.append(layer_norm(*inputs, **settings))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(torch.nn.functional, "layer_norm", norm)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(wants_gradients):
        hstu()(tokens().flatten(0, 1), LENGTHS, token_times=times())
    assert [one.dtype for one in seen] == [torch.bfloat16] * 2
