"""A Mixture of Experts on one rank: what the router chooses, what the losses are of, and who counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config, ExpertActivation, ExpertsConfig, Gate, ModelConfig, ModelKind, Precision, load_config
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError, UsageError
from dlrm_fused.inference.online.model import OnlineModel
from dlrm_fused.models import RankingTask
from dlrm_fused.models.expert_parallel import ExpertComputation, choose_computations
from dlrm_fused.models.moe import MixtureOfExperts, Router, balance_loss
from dlrm_fused.models.transformer import HistoryTransformer
from dlrm_fused.training.metrics import load_values
from dlrm_fused.training.telemetry import RunWriter

WIDTH, TOKENS = 16, 10
EXPERTS = ExpertsConfig(count=6, top_k=2, hidden=24)


def layer(experts: ExpertsConfig = EXPERTS, width: int = WIDTH) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(width, experts)


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))


class TestRouter:
    @pytest.mark.parametrize("gate", Gate)
    def test_takes_the_best_experts_and_weighs_them_by_their_scores(self, gate: Gate) -> None:
        router, x = Router(WIDTH, 6, 3, gate), tokens()
        routing = router(x)
        logits = x @ router.linear.weight.T
        scores = logits.softmax(-1) if gate is Gate.softmax else logits.sigmoid()
        chosen = scores.gather(1, routing.experts)
        assert torch.equal(routing.experts, scores.argsort(-1, descending=True)[:, :3])
        torch.testing.assert_close(routing.gates, chosen / chosen.sum(-1, keepdim=True))
        torch.testing.assert_close(routing.probabilities, scores / scores.sum(-1, keepdim=True))

    @pytest.mark.parametrize("gate", Gate)
    def test_with_one_expert_a_token_the_gate_still_teaches_it(self, gate: Gate) -> None:
        router = Router(WIDTH, 6, 1, gate)
        gates = router(tokens()).gates
        assert (gates < 1).all()
        gates.sum().backward()
        assert router.linear.weight.grad.any()

    def test_is_float32_under_autocast(self) -> None:
        router, x = Router(WIDTH, 6, 2, Gate.softmax), tokens()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(router(x).logits, router(x).logits.float())
            within = router(x)
        assert torch.equal(within.logits, router(x).logits)


class TestBalanceLoss:
    def test_is_one_where_all_experts_have_as_much_to_do(self) -> None:
        assert balance_loss(torch.full((6,), 1 / 6), torch.full((6,), 20)) == pytest.approx(1)

    def test_is_the_number_of_experts_where_one_does_all(self) -> None:
        assert balance_loss(torch.eye(6)[0], 20 * torch.eye(6)[0]) == pytest.approx(6)

    def test_is_zero_without_tokens(self) -> None:
        assert balance_loss(torch.zeros(6), torch.zeros(6)) == 0


def dense_reference(model: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every expert of every token, times the gates of those that are its own."""
    routing = model.router(x)
    gates = torch.zeros(len(x), len(model.w_in)).scatter(1, routing.experts, routing.gates)
    hidden = torch.einsum("td,efd->tef", x, model.w_in)
    if model.w_in.shape[1] == model.w_out.shape[2]:
        hidden = F.silu(hidden)
    else:
        gate, up = hidden.chunk(2, -1)
        hidden = F.silu(gate) * up
    return torch.einsum("te,tef,edf->td", gates, hidden, model.w_out)


class TestLayer:
    def test_is_the_weighted_sum_of_each_tokens_experts(self) -> None:
        model, x = layer(), tokens()
        torch.testing.assert_close(model(x), dense_reference(model, x))

    def test_a_shared_expert_is_added_for_all_tokens(self) -> None:
        model, x = layer(replace(EXPERTS, shared_hidden=8)), tokens()
        assert model.shared is not None
        shared = F.silu(x @ model.shared.into.weight.T) @ model.shared.out.weight.T
        torch.testing.assert_close(model(x), dense_reference(model, x) + shared)

    def test_swiglu_has_a_second_matrix_for_what_its_gates_multiply(self) -> None:
        model, x = layer(replace(EXPERTS, shared_hidden=8, activation=ExpertActivation.swiglu)), tokens()
        assert model.w_in.shape == (6, 48, WIDTH)
        assert model.shared is not None
        gate, up = (x @ model.shared.into.weight.T).chunk(2, -1)
        shared = (F.silu(gate) * up) @ model.shared.out.weight.T
        torch.testing.assert_close(model(x), dense_reference(model, x) + shared)

    def test_result_is_in_autocasts_dtype(self) -> None:
        model = layer(replace(EXPERTS, shared_hidden=8))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(tokens())
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), model(tokens()), rtol=0.05, atol=0.01)

    def test_without_tokens_every_parameter_still_gets_a_gradient(self) -> None:
        model = layer()
        loss = model(tokens(0)).sum() + model.take_auxiliary_loss()
        loss.backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())

    def test_load_is_what_each_expert_got_in_training(self) -> None:
        model, x = layer(), tokens()
        experts = model.router(x).experts
        model.eval()(x)
        assert not model.load.any()
        model.train()(x)
        model(x)
        assert torch.equal(model.load, 2 * torch.bincount(experts.flatten(), minlength=6))
        assert "load" not in model.state_dict()


class TestMaskedTokens:
    MASK = torch.tensor([True, False] * (TOKENS // 2))

    def test_have_no_experts(self) -> None:
        model, x = layer(), tokens()
        out = model(x, self.MASK)
        assert not out[~self.MASK].any()
        torch.testing.assert_close(out[self.MASK], layer()(x[self.MASK]))

    def test_count_neither_for_the_losses_nor_for_the_load(self) -> None:
        masked, alone, x = layer(), layer(), tokens()
        masked(x, self.MASK)
        alone(x[self.MASK])
        assert torch.equal(masked.load, alone.load)
        torch.testing.assert_close(masked.take_auxiliary_loss(), alone.take_auxiliary_loss())


class TestAuxiliaryLoss:
    @pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.7)])
    def test_is_the_weighted_sum_of_balance_loss_and_z_loss(self, weights: tuple[float, float]) -> None:
        model, x = layer(replace(EXPERTS, balance_loss=weights[0], z_loss=weights[1])), tokens()
        routing = model.router(x)
        slots = torch.bincount(routing.experts.flatten(), minlength=6)
        balance = 6 * (slots / slots.sum() * routing.probabilities.mean(0)).sum()
        z = routing.logits.exp().sum(-1).log().square().mean()
        model(x)
        torch.testing.assert_close(model.take_auxiliary_loss(), weights[0] * balance + weights[1] * z)

    def test_evens_the_load(self) -> None:
        model, x = layer(replace(EXPERTS, balance_loss=1.0, z_loss=0.0)), tokens(200) + 1.0
        optimizer = torch.optim.SGD(model.router.parameters(), lr=0.1)
        losses = []
        for _ in range(50):
            model(x)
            loss = model.take_auxiliary_loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1
        assert losses[-1] < 1.1

    def test_is_there_once_and_in_training_only(self) -> None:
        model = layer()
        model(tokens())
        assert model.take_auxiliary_loss() is not None
        assert model.take_auxiliary_loss() is None
        model.eval()(tokens())
        assert model.take_auxiliary_loss() is None

    def test_is_none_without_weights(self) -> None:
        model = layer(replace(EXPERTS, balance_loss=0.0, z_loss=0.0))
        model(tokens())
        assert model.take_auxiliary_loss() is None


class Ranker(nn.Module):
    """The least that has experts and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = layer()

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor, real: Tensor) -> Tensor:
        return self.experts(dense, real).sum(-1, keepdim=True)


def test_in_training_the_task_adds_it_to_the_loss_but_reports_cross_entropy() -> None:
    weights = torch.ones(TOKENS)
    weights[-3:] = 0
    ones = torch.ones(TOKENS, dtype=torch.int32)
    sparse = KeyedJaggedTensor(keys=["f"], values=ones, lengths=ones)
    batch = Batch(tokens(), sparse, torch.ones(TOKENS), weights, global_size=TOKENS - 3)
    task = RankingTask(Ranker(), Precision.fp32, 1, torch.device("cpu"))
    (loss, output), alone = task(batch), layer()
    alone(tokens()[:-3])
    torch.testing.assert_close(loss - output.loss, alone.take_auxiliary_loss())
    of_samples = F.binary_cross_entropy_with_logits(output.logits, batch.labels, reduction="none")
    torch.testing.assert_close(output.loss, of_samples[:-3].mean())
    loss, output = task.eval()(batch)
    assert torch.equal(loss, output.loss)


class TestTransformerWithExperts:
    HISTORY, LENGTHS = 4, torch.tensor([0, 2, 4], dtype=torch.int32)

    def model(self, layers: int = 2) -> HistoryTransformer:
        experts = [layer(replace(EXPERTS, count=3)) for _ in range(layers)]
        return HistoryTransformer(
            token_width=6, d_model=WIDTH, heads=2, layers=2, d_ff=64, history_length=self.HISTORY, experts=experts
        )

    def test_only_tokens_of_real_samples_go_to_experts(self) -> None:
        model, real = self.model(), torch.tensor([True, True, False])
        model(torch.randn(3 * (self.HISTORY + 1), 6), self.LENGTHS, real)
        first, last = (block.experts for block, _ in model.stages())
        assert first.load.sum() == 2 * (1 + 3)  # candidates and their histories
        assert last.load.sum() == 2 * 2  # candidates

    def test_every_parameter_gets_a_gradient(self) -> None:
        model = self.model()
        encoded = model(torch.randn(30 * (self.HISTORY + 1), 6), self.LENGTHS.repeat(10))
        encoded.square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())

    def test_needs_experts_for_every_layer(self) -> None:
        with pytest.raises(UsageError, match=r"1 layers of experts for layers=2"):
            self.model(layers=1)


@pytest.mark.parametrize(
    ("width", "changes", "message"),
    [
        (12, {}, "width=12: must be a positive multiple of 8"),
        (16, {"hidden": 20}, "hidden=20: must be a positive multiple of 8"),
        (16, {"count": 0}, "count=0: must be a positive multiple of the 1 ranks that share the experts"),
        (16, {"top_k": 7}, "top_k=7: must be 1 to count=6"),
    ],
)
def test_impossible_shapes(width: int, changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layer(replace(EXPERTS, **changes), width)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["count=-1"], "model.experts.count=-1: allowed: 0 or more"),
        (["top_k=9"], "model.experts.top_k=9: allowed: 1 to model.experts.count=8"),
        (["top_k=0"], "model.experts.top_k=0: allowed: 1 to model.experts.count=8"),
        (["hidden=12"], "model.experts.hidden=12: allowed: a positive multiple of 8"),
        (["shared_hidden=-8"], "model.experts.shared_hidden=-8: allowed: 0 or more"),
        (["balance_loss=-0.1"], "model.experts.balance_loss=-0.1: allowed: 0 or more"),
        (["z_loss=-0.1"], "model.experts.z_loss=-0.1: allowed: 0 or more"),
        (["parallel=3"], "model.experts.parallel=3: allowed: 0, or a divisor of model.experts.count=8"),
        (["activation=relu"], "model.experts.activation=relu: allowed: silu, swiglu"),
        (["gate=relu"], "model.experts.gate=relu: allowed: softmax, sigmoid"),
    ],
)
def test_settings_of_experts_that_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *(f"model.experts.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.top_mlp=[20,1]"], r"model.top_mlp=[20, 1]: allowed: a first width that is a multiple of 8 with model.experts"),
        (
            ["model.kind=transformer", "data.synthetic.history_length=5", "model.d_model=12"],
            "model.d_model=12: allowed: a multiple of 8 with model.experts.count=8",
        ),
        (
            ["model.kind=transformer", "data.synthetic.history_length=5"],
            "model.tensor_parallel=0: allowed: 1 with model.experts.count=8",
        ),
    ],
)
def test_settings_of_models_that_do_not_go_with_experts(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *overrides)


def refusal(folder: Path, *overrides: str) -> str:
    (folder / "config.yaml").write_text("data: {source: synthetic}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(folder / "config.yaml", ["model.experts.count=8", *overrides])
    return str(raised.value)


def test_models_with_experts_do_not_score_online() -> None:
    config = Config(model=ModelConfig(kind=ModelKind.transformer, experts=EXPERTS))
    schema = DatasetSchema(dense_features=(), sparse_features=())
    with pytest.raises(ConfigError, match=r"model.experts.count=6: online scoring is for models without experts: 0"):
        OnlineModel.build(config, schema, torch.device("cpu"), ids_per_bag=1)


def test_loads_are_charted_by_layer_and_expert(tmp_path: Path) -> None:
    loads = [[0.5, 0.25, 0.25, 0.0], [0.25] * 4]
    assert load_values(loads) == {
        "experts_0_busiest": 2.0,
        "experts_0_idlest": 0.0,
        "experts_1_busiest": 1.0,
        "experts_1_idlest": 1.0,
    }
    writer = RunWriter(tmp_path, Config(), rank=0)
    writer.train(10, load_values(loads))
    for number, fractions in enumerate(loads):
        writer.expert_load(10, number, fractions)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("experts/0_busiest")[0].value == 2.0
    (chart,) = events.Histograms("experts/0_load")
    bars = dict(zip(chart.histogram_value.bucket_limit, chart.histogram_value.bucket, strict=True))
    assert {edge: share for edge, share in bars.items() if share} == {1.0: 0.5, 2.0: 0.25, 3.0: 0.25}


def test_experts_in_fp32_run_unfused_on_gpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There the fused kernels take ten times as long as the library's products."""
    group: Any = object()
    gpu = torch.device("cuda", 0)
    given = ["model.kind=dcnv2", "model.experts.count=4", "comm=fused", f"output_dir={tmp_path}"]
    config = load_config(Path("configs/synthetic.yaml"), given)
    first, second = choose_computations(config, group, 2, 16, 1, gpu)
    assert first == second == ExpertComputation(group)
    assert "experts run without fused communication: training.precision=fp32" in caplog.text
    strict = load_config(Path("configs/synthetic.yaml"), [*given, "comm_strict=true"])
    with pytest.raises(UsageError, match=r"comm_strict=true: experts .*training\.precision=fp32"):
        choose_computations(strict, group, 2, 16, 1, gpu)
