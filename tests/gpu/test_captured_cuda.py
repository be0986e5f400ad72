"""Functions captured as CUDA graphs give the results and gradients that they give without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dlrm_fused.models import captured
from dlrm_fused.models.captured import CapturedFunction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Scorer:
    """Two layers, one of which is frozen, and a function of them that returns a loss and scores."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [nn.Linear(8, 16).cuda(), nn.Linear(16, 1).cuda().requires_grad_(False)]
        self.captured = CapturedFunction(self.compute, lambda: self.layers)
        self.calls = 0

    def compute(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        scores = self.layers[1](torch.relu(self.layers[0](features)) * embeddings)
        return scores.square().sum(), scores

    def inputs(self, rows: int = 32) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 8, device="cuda"), torch.randn(rows, 16, device="cuda", requires_grad=True)

    def gradients(self, loss: Tensor, embeddings: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss * 3, [embeddings, *self.layers[0].parameters()]))

    def check(self, features: Tensor, embeddings: Tensor) -> None:
        loss, scores = self.captured(features, embeddings)
        own = [loss, scores, *self.gradients(loss, embeddings)]
        loss, scores = self.compute(features, embeddings)
        for mine, expected in zip(own, [loss, scores, *self.gradients(loss, embeddings)], strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.fixture(params=["copied", "read in place"])
def scorer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scorer:
    if request.param != "copied":
        monkeypatch.setattr(captured, "_COPIED_BYTES", 32 * 8 * 4)  # what is smaller than the embeddings
    return Scorer()


def test_other_inputs_weights_and_addresses_give_other_results(scorer: Scorer) -> None:
    held = []
    for rows in (32, 32, 32, 20):
        held.append(scorer.inputs(rows))
        scorer.check(*held[-1])
        with torch.no_grad():
            scorer.layers[0].weight.add_(0.1)


def test_it_is_replayed_not_run(scorer: Scorer) -> None:
    features, embeddings = scorer.inputs()
    scorer.captured(features, embeddings)
    calls = scorer.calls
    for _ in range(3):
        scorer.captured(features, embeddings)
    assert scorer.calls == calls


def test_however_many_addresses_there_are_it_is_replayed(scorer: Scorer) -> None:
    held = [scorer.inputs() for _ in range(captured._MOST_IN_PLACE + 3)]
    for inputs in held:
        scorer.check(*inputs)
    calls = scorer.calls
    for inputs in held:
        scorer.captured(*inputs)
    assert scorer.calls == calls


def test_more_shapes_than_it_is_captured_for_give_the_same(scorer: Scorer) -> None:
    held = [scorer.inputs(rows) for rows in range(20, 21 + captured._MOST_IN_PLACE + captured._MOST_COPIED)]
    for inputs in (*held, *held):
        scorer.check(*inputs)


def test_results_keep_their_values(scorer: Scorer) -> None:
    loss, scores = scorer.captured(*scorer.inputs())
    assert not scores.requires_grad
    copies = loss.clone(), scores.clone()
    scorer.captured(*scorer.inputs())
    assert torch.equal(loss, copies[0])
    assert torch.equal(scores, copies[1])


def test_a_backward_pass_that_comes_too_late_is_refused(scorer: Scorer) -> None:
    features, embeddings = scorer.inputs()
    loss, _ = scorer.captured(features, embeddings)
    scorer.captured(features, embeddings)
    with pytest.raises(RuntimeError, match="called again before the backward pass"):
        loss.backward()


class Kept:
    """Keeps a copy of the gradients that it is given."""

    def __init__(self, scorer: Scorer) -> None:
        self.gradients = [torch.full_like(parameter, torch.nan) for parameter in scorer.layers[0].parameters()]
        self.uses = 0

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        for kept, gradient in zip(self.gradients, gradients, strict=True):
            assert gradient is not None
            kept.copy_(gradient)

    def use(self) -> None:
        self.uses += 1


def test_who_takes_gradients_has_those_of_each_replay(scorer: Scorer) -> None:
    scorer.captured.takes_gradients = kept = Kept(scorer)
    for step in range(captured._MOST_IN_PLACE + 3):
        features, embeddings = scorer.inputs()
        (3 * scorer.captured(features, embeddings)[0]).backward()
        loss, _ = scorer.compute(features, embeddings)
        expected = scorer.gradients(loss, embeddings)
        torch.testing.assert_close([embeddings.grad, *kept.gradients], expected)
        assert kept.uses == step + 1
        assert all(parameter.grad is None for parameter in scorer.layers[0].parameters())


def test_one_result_is_given_as_it_is() -> None:
    layer = nn.Linear(4, 4).cuda()
    double = CapturedFunction(lambda x: layer(x) * 2, lambda: [layer])
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    upstream = torch.randn(3, 4, device="cuda")
    double(x).backward(upstream)
    torch.testing.assert_close(x.grad, 2 * upstream @ layer.weight)
