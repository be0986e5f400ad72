"""Functions captured as CUDA graphs give the results and gradients that they give without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from dlrm_fused.models import captured
from dlrm_fused.models.captured import CapturedFunction

pytestmark = pytest.mark.gpu(1)


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


def test_every_call_counts_once_in_buffers() -> None:
    layers = [nn.BatchNorm1d(4).cuda()]
    function = CapturedFunction(lambda x: (layers[0](x).square().sum(), x), lambda: layers)
    for call in range(1, 5):
        loss, _ = function(torch.randn(8, 4, device="cuda", requires_grad=True))
        loss.backward()
        assert int(layers[0].num_batches_tracked) == call


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


def test_without_memory_for_one_more_capture_it_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Runs before the second capture need as much as the first keeps."""
    layer, total = nn.Linear(1024, 1024).cuda(), torch.cuda.get_device_properties(0).total_memory

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(12):
            x = torch.relu(layer(x)) + x
        return x.square().mean(), x[0]

    def losses(of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[float]:
        found = []
        for rows in (2**15, 2**15 - 64) * 3:
            loss, _ = of(torch.linspace(0, 1, rows * 1024, device="cuda").view(rows, 1024).requires_grad_())
            loss.backward()
            layer.weight.grad = layer.bias.grad = None
            found.append(loss.item())
        return found

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    expected = losses(function)
    needed = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((before + 1.6 * needed) / total)
    try:
        assert losses(CapturedFunction(function, lambda: [layer], most_shapes=4)) == pytest.approx(expected, rel=1e-5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "dlrm_fused"]
    assert "a training step runs without CUDA graphs: too little memory to capture it" in warning


def gradients_of(scorer: Scorer, loss: Tensor, features: Tensor, embeddings: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [features, embeddings, *scorer.layers[0].parameters()]))


def test_gradients_keep_their_values_and_are_accumulated(scorer: Scorer) -> None:
    parameters = list(scorer.layers[0].parameters())
    features, embeddings = scorer.inputs()
    leaves = [features.requires_grad_(), embeddings, *parameters]
    total = [torch.zeros_like(leaf) for leaf in leaves]
    held = []
    for step in range(4):
        with torch.no_grad():
            features.copy_(torch.randn(features.shape, device="cuda"))
        expected = gradients_of(scorer, scorer.compute(features, embeddings)[0], features, embeddings)
        if step == 2:  # zeroed in place, which keeps the memory of the gradients
            for leaf in leaves:
                assert leaf.grad is not None
                leaf.grad.zero_()
            total = [torch.zeros_like(leaf) for leaf in leaves]
        scorer.captured(features, embeddings)[0].backward()
        total = [before + own for before, own in zip(total, expected, strict=True)]
        torch.testing.assert_close([leaf.grad for leaf in leaves], total)
        held.append((gradients_of(scorer, scorer.captured(features, embeddings)[0], features, embeddings), expected))
    for found, expected in held:
        torch.testing.assert_close(found, expected)


def test_gradients_of_inputs_that_are_leaves_are_accumulated_beside_who_takes_the_others(scorer: Scorer) -> None:
    scorer.captured.takes_gradients = Kept(scorer)
    features, embeddings = scorer.inputs()
    total = torch.zeros_like(embeddings)
    for _ in range(3):
        features = torch.randn_like(features)
        total += torch.autograd.grad(scorer.compute(features, embeddings)[0], embeddings)[0]
        scorer.captured(features, embeddings)[0].backward()
        assert embeddings.grad is not None
        torch.testing.assert_close(embeddings.grad, total)


def test_parameters_that_are_replaced_or_moved_are_followed(scorer: Scorer) -> None:
    features, embeddings = scorer.inputs()
    scorer.check(features, embeddings)
    layer = scorer.layers[0]
    before = layer.weight
    layer.weight = nn.Parameter(torch.randn_like(before))
    for _ in range(3):
        scorer.check(features, embeddings)
    layer.bias.data = torch.randn_like(layer.bias)
    for _ in range(3):
        scorer.check(features, embeddings)
    calls = scorer.calls
    scorer.captured(features, embeddings)
    assert scorer.calls == calls, "captured again"
    scorer.captured(features, embeddings)[0].backward()
    assert before.grad is None
    assert layer.weight.grad is not None


def test_each_mode_has_a_capture_of_its_own() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    layer = nn.Sequential(linear, nn.Dropout(0.5)).cuda()
    captured_layer = CapturedFunction(lambda x: layer(x), lambda: [layer])
    x = torch.randn(256, 64, device="cuda")

    def dropped() -> float:
        return (captured_layer(x) == 0).float().mean().item()

    for _ in range(2):
        layer.train()
        assert 0.4 < dropped() < 0.6
        layer.eval()
        assert dropped() < 0.01
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            assert captured_layer(x).dtype == torch.bfloat16
            with torch.no_grad():
                linear.weight.add_(1.0)
            # Casts of weights that autocast has kept are of older ones.
            torch.clear_autocast_cache()
            torch.testing.assert_close(captured_layer(x), layer(x), rtol=0.05, atol=0.1)
    assert captured_layer(x).dtype == torch.float32


def test_autocast_around_it_casts_the_weights_of_each_replay() -> None:
    layer = nn.Linear(8, 8).cuda()
    double = CapturedFunction(lambda x: layer(x) * 2, lambda: [layer])
    x = torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer(x)  # autocast keeps a cast
        double(x)
        with torch.no_grad():
            layer.weight.fill_(1.0)
            layer.bias.zero_()
        found = double(x)
    torch.testing.assert_close(found.float(), 2 * x.sum(1, keepdim=True).expand(4, 8), rtol=0.05, atol=0.2)


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


@pytest.mark.gpu(2)
def test_it_is_captured_on_the_device_of_its_inputs() -> None:
    layer = nn.Linear(4, 4).to("cuda:1")
    double = CapturedFunction(lambda x: layer(x) * 2, lambda: [layer])
    with torch.cuda.device(0):
        for _ in range(3):
            x = torch.randn(3, 4, device="cuda:1")
            torch.testing.assert_close(double(x), 2 * layer(x))
