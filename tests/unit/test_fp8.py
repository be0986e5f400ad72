"""Layers in 8 bits: their products and gradients, the scales, and which layers they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_fused.config import Compile, Config, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import build_model, fp8
from dlrm_fused.models.dlrm import cross_layers
from dlrm_fused.models.fp8 import Fp8Linear, Fp8Products, check_gpu, describe, fp8_linear, gains, multiply_in_8_bits

CPU = torch.device("cpu")
ROWS, N, K = 256, 48, 32


@pytest.fixture
def small_layers_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_FEWEST_COLUMNS", 16)
    monkeypatch.setattr(fp8, "_FEWEST_ROWS", 16)


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    torch.manual_seed(0)
    return torch.randn(ROWS, K).bfloat16(), torch.randn(N, K) / 8, torch.randn(N)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def with_gradients(function: Callable[..., Tensor], upstream: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype))]


def in_8_bits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return fp8_linear(x, weight, bias, fp8._scale_by_largest(fp8._rows_of(x)))


class TestProduct:
    # Operands are off by at most 2^-4 in e4m3 and by 2^-3 in e5m2, most of them by far less.
    @pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6])
    def test_product_and_gradients_are_those_of_a_linear_layer_whatever_the_magnitude(self, operands, factor: float) -> None:
        x, weight, bias = operands[0] * factor, operands[1], operands[2] * factor
        upstream = torch.randn(ROWS, N) / factor
        found = with_gradients(in_8_bits, upstream, x, weight, bias)
        expected = with_gradients(linear, upstream, x.float(), weight, bias)
        assert found[0].dtype == torch.bfloat16
        assert [tuple(t.shape) for t in found] == [(ROWS, N), (ROWS, K), (N, K), (N,)]
        for ours, theirs, most in zip(found, expected, (0.04, 0.08, 0.08, 0.08), strict=True):
            assert error(ours, theirs) < most

    def test_operands_that_8_bits_hold_are_multiplied_without_an_error(self) -> None:
        x = torch.tensor([[1.0, 2.0, -3.0, 0.5] * 4] * 16).bfloat16()
        weight = torch.tensor([[0.25, -1.5, 4.0, 2.0] * 4] * 16)
        upstream = torch.tensor([[1.0, -2.0] * 8] * 16)
        for ours, theirs in zip(
            with_gradients(in_8_bits, upstream, x, weight), with_gradients(linear, upstream, x.float(), weight), strict=True
        ):
            assert torch.equal(ours.float(), theirs)

    def test_zeros_are_multiplied_too(self) -> None:
        zeros = torch.zeros(16, 16)
        for result in with_gradients(in_8_bits, zeros, zeros.bfloat16(), zeros):
            assert torch.equal(result.float(), zeros)

    def test_the_same_inputs_give_the_same_bits(self, operands) -> None:
        x, weight, bias = operands
        upstream = torch.randn(ROWS, N)
        for left, right in zip(*(with_gradients(in_8_bits, upstream, x, weight, bias) for _ in range(2)), strict=True):
            assert torch.equal(left, right)

    def test_gradients_of_rare_positives_are_not_cut_off(self, operands) -> None:
        """One row in 4,096 has a gradient 4,096 times as large as the others, and is not in the sample."""
        rows = 4096
        x, upstream = torch.randn(rows, K).bfloat16(), torch.randn(rows, N) / rows**2
        upstream[7] *= rows
        for ours, theirs in zip(
            with_gradients(in_8_bits, upstream, x, operands[1]),
            with_gradients(linear, upstream, x.float(), operands[1]),
            strict=True,
        ):
            assert error(ours, theirs) < 0.08

    def test_what_is_not_finite_makes_its_row_nan(self, operands) -> None:
        for value, row in itertools.product((float("nan"), float("inf"), float("-inf")), (0, 3)):
            x = operands[0].clone()
            x[row, 5] = value
            bad = in_8_bits(x, operands[1]).isnan().any(dim=1)
            assert bad.nonzero().flatten().tolist() == [row]


def largest(value: float) -> Tensor:
    """Return rows of which the largest magnitude is this one."""
    rows = torch.zeros(16, 16)
    rows[0, 3] = -value
    return rows


class TestScale:
    @pytest.mark.parametrize(
        ("value", "power"), [(1.0, 16.0), (28.0, 1.0), (29.0, 0.5), (1e-3, 16384.0), (1e-30, 2.0**100), (3e38, 2.0**-100)]
    )
    def test_of_operands_is_the_power_of_two_that_brings_the_largest_element_up_to_28(self, value: float, power: float) -> None:
        assert float(fp8._scale_by_largest(largest(value))) == power

    @pytest.mark.parametrize(("value", "power"), [(0.125, 1.0), (1e-6, 65536.0), (1.0, 0.125)])
    def test_of_gradients_is_that_which_brings_their_mean_up_to_an_eighth(self, value: float, power: float) -> None:
        assert float(fp8._scale_by_mean(torch.full((16, 16), value), rows=64)) == power

    @pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
    def test_without_a_finite_sample_gradients_are_taken_for_those_of_a_mean(self, value: float) -> None:
        assert float(fp8._scale_by_mean(largest(value), rows=3000)) == 2048.0
        assert float(fp8._scale_by_largest(largest(value))) == 1.0

    def test_rows_beside_the_sample_may_have_elements_16_times_as_large(self) -> None:
        x = torch.full((3 * fp8._SAMPLED_ROWS, 16), 16.0)
        fp8._rows_of(x).fill_(1.0)
        scale = fp8._scale_by_largest(fp8._rows_of(x))
        assert torch.equal(fp8._in_8_bits(x, scale, fp8.OPERAND).float() / scale, x)

    def test_larger_ones_become_the_largest_number(self) -> None:
        x, scale = torch.tensor([[1e6, -1e6, 1.0]]), torch.tensor(2.0)
        assert fp8._in_8_bits(x, scale, fp8.OPERAND).float().tolist() == [[448.0, -448.0, 2.0]]

    @pytest.mark.parametrize("rows", [16_384, 32_768, 65_536, 100_000])
    @pytest.mark.parametrize("second", [False, True])
    def test_rows_that_repeat_are_all_in_the_sample(self, rows: int, second: bool) -> None:
        numbers = fp8._rows_of(torch.arange(rows)[:, None], second).flatten()
        assert 900 <= len(numbers) <= 1100
        for period in (2, 16, 64):
            assert len((numbers % period).unique()) == period


@pytest.mark.usefixtures("small_layers_gain")
class TestModel:
    @staticmethod
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))

    def test_parameters_keep_their_names_and_places(self) -> None:
        model = self.model()
        before = {name: p.data_ptr() for name, p in model.named_parameters()}
        products = Fp8Products()
        multiply_in_8_bits(model, products)
        assert products.weights == [(64, K), (64, 64), (1, 64)]
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
        assert list(model.state_dict()) == list(before)

    def test_products_are_in_8_bits_where_gradients_are_wanted_and_autocast_takes_bf16(self, operands) -> None:
        plain, model = self.model(), self.model()
        multiply_in_8_bits(model, Fp8Products())
        x = operands[0]
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x)
            assert 0.001 < error(model(x), expected) < 0.2
            with torch.no_grad():
                assert torch.equal(model(x), expected)
        assert torch.equal(model(x.float()), plain(x.float()))

    @pytest.mark.parametrize("rows", [15, 24])
    def test_batches_whose_size_does_not_suit_are_multiplied_in_bf16(self, rows: int) -> None:
        plain, model = self.model(), self.model()
        multiply_in_8_bits(model, Fp8Products())
        x = torch.randn(rows, K)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), plain(x))

    def test_cross_layers_are_multiplied_in_8_bits_in_training_alone(self) -> None:
        torch.manual_seed(0)
        layers, products = LowRankCrossNet(in_features=64, num_layers=2, low_rank=16), Fp8Products()
        for bias in layers.bias:
            nn.init.normal_(bias)
        x = torch.randn(ROWS, 64).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            expected = cross_layers(layers, x)
            multiply_in_8_bits(layers, products)
            assert len(products.weights) == 4
            assert 0.001 < error(cross_layers(layers, x), expected) < 0.1
            with torch.no_grad():
                assert torch.equal(cross_layers(layers, x), expected)

    def test_layers_of_experts_are_not(self) -> None:
        own = config("model.experts.count=2", "model.experts.shared_hidden=32")
        task = build_model(own, open_dataset(own, CPU).schema, 1, CPU)
        (experts,) = task.expert_layers
        assert [type(layer) for layer in experts.modules() if isinstance(layer, nn.Linear)]
        assert not [layer for layer in experts.modules() if isinstance(layer, Fp8Linear)]

    def test_elements_that_are_cut_off_are_counted(self) -> None:
        products, x = Fp8Products(), torch.ones(5 * fp8._SAMPLED_ROWS + 1, K)[: 5 * fp8._SAMPLED_ROWS]
        second = fp8._rows_of(x, second=True)
        second[::2, 0] = 100.0
        with torch.autocast("cpu", torch.bfloat16):
            products.multiply(x, torch.ones(N, K))
            assert int(products.cut_off) == len(second[::2])
            products.multiply(torch.ones_like(x), torch.ones(N, K))
        assert int(products.cut_off) == len(second[::2])


class TestRule:
    @pytest.mark.parametrize(
        ("rows", "weight", "expected"),
        [
            (16_384, (512, 3456), True),
            (8_192, (512, 3456), False),  # measured: 1.02 times the time of bf16
            (65_536, (512, 496), False),
            (65_536, (256, 512), False),
            (65_537, (512, 512), False),
            (65_536, (520, 512), False),
        ],
    )
    def test_large_layers_and_sizes_that_the_product_takes_gain(
        self, rows: int, weight: tuple[int, int], expected: bool
    ) -> None:
        assert gains(rows, weight) is expected

    def test_the_log_names_the_layers_and_the_rule(self) -> None:
        line = describe([(1024, 512), (256, 512)], 32_768)
        assert "1 of 2 layers" in line
        assert "(1024 x 512)" in line
        assert "it takes 16,384 samples, 512 inputs and 512 outputs or more, all multiples of 16" in line
        assert "(none)" in describe([(1024, 512)], 4096)


def config(*overrides: str) -> Config:
    return load_config("configs/synthetic.yaml", ["training.precision=fp8", *overrides])


class TestSetting:
    def test_a_model_that_is_not_called_in_two_parts_is_refused(self) -> None:
        own = config("model.kind=transformer", "data.synthetic.history_length=4", "model.d_model=16", "model.heads=2")
        with pytest.raises(
            ConfigError, match=r"training\.precision=fp8: model\.kind=transformer .* allowed with it: fp32, tf32, bf16"
        ):
            build_model(own, open_dataset(own, CPU).schema, 1, CPU)

    def test_a_gpu_without_such_products_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        with pytest.raises(ConfigError, match=r"fp8: NVIDIA A100 .* compute capability 8\.9 .* allowed here: fp32, tf32, bf16"):
            check_gpu(torch.device("cuda"))
        check_gpu(CPU)

    def test_layers_of_dlrm_multiply_in_8_bits_and_their_count_is_not_saved(self) -> None:
        own = config()
        task = build_model(own, open_dataset(own, CPU).schema, 1, CPU)
        assert own.training.compile is Compile.auto
        assert any(isinstance(layer, Fp8Linear) for layer in task.modules())
        assert isinstance(task.fp8_products, Fp8Products)
        assert not [name for name in task.state_dict() if "fp8" in name]
