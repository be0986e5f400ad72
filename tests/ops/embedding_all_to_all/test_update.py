"""The kernels of the update, under Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all import Adagrad, Adam, LocalTables, RowwiseAdagrad, RowwiseAdam
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, per_sample_weight_gradients, sort_lookup
from tests.ops.embedding_all_to_all.lookups import (
    OPTIMIZERS,
    Lookup,
    expected_products,
    expected_update,
    make_lookup,
    make_tables,
    random,
    states_of,
    update,
)

pytestmark = pytest.mark.interpreted

TABLES: dict[str, dict[str, Any]] = {
    "one": {"rows": [13], "dims": [8], "feature_tables": [0]},
    "dims_differ": {"rows": [5, 40, 9], "dims": [4, 20, 12], "feature_tables": [0, 1, 2]},
    "shared": {"rows": [7, 11], "dims": [8, 4], "feature_tables": [0, 0, 1]},
    "shared_apart": {"rows": [7, 11], "dims": [8, 8], "feature_tables": [1, 0, 1]},
    "without_feature": {"rows": [3, 6, 4], "dims": [4, 4, 4], "feature_tables": [1]},
}


def assert_updates_as_expected(lookup: Lookup, scale: float = 1.0) -> None:
    weights, states = expected_update(lookup, scale)
    before = lookup.tables.weights.clone()
    update(lookup, scale=scale)
    torch.testing.assert_close(lookup.tables.weights.double(), weights, rtol=1e-5, atol=1e-5)
    assert not torch.equal(lookup.tables.weights, before)
    for state, expected in zip(states_of(lookup.tables), states, strict=True):
        torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", TABLES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_row_is_updated_once_with_the_sum_of_its_gradients(shape: str, optimizer: str) -> None:
    tables = make_tables(**TABLES[shape], optimizer=optimizer, generator=random())
    assert_updates_as_expected(make_lookup(tables, 6, 4, generator=random(1)))


class TestAdam:
    """Of the rows that were looked up."""

    @pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
    @pytest.mark.parametrize(("mean", "weighted"), [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("shape", ["dims_differ", "shared_apart"])
    def test_steps_from_the_first_on_are_those_of_float64(self, optimizer, mean, weighted, shape):
        tables = make_tables(
            **TABLES[shape], optimizer=optimizer, mean=mean, weight_decay=0.1, learning_rate=0.01, generator=random()
        )
        for state in states_of(tables):
            state.zero_()
        for step in range(5):
            lookup = make_lookup(tables, 6, 4, hot=0.3, weighted=weighted, generator=random(step))
            weights, states = expected_update(lookup, 0.5)
            update(lookup, scale=0.5)
            torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-6, atol=1e-6)
            for state, expected in zip(states_of(tables), states, strict=True):
                torch.testing.assert_close(state.double(), expected, rtol=1e-6, atol=1e-6)

    def test_a_row_is_as_in_torchs_adamw_as_long_as_every_batch_holds_it(self):
        tables = make_tables([7], [8], [0], optimizer="adam", weight_decay=0.1, generator=random())
        for state in states_of(tables):
            state.zero_()
        weights = tables.weights.view(7, 8).clone().requires_grad_()
        torchs = torch.optim.AdamW([weights], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        for step in range(6):
            gradients = torch.randn(7, 8, generator=random(step))
            weights.grad = gradients
            torchs.step()
            update(Lookup(tables, torch.arange(7), torch.arange(8), None, gradients))
        torch.testing.assert_close(tables.weights.view(7, 8), weights.detach(), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
    @pytest.mark.parametrize("hot", [0.9, 1.0])
    def test_rows_that_span_many_programs(self, optimizer, hot):
        tables = make_tables([3, 30], [4, 4], [0, 1], optimizer=optimizer, weight_decay=0.1, generator=random())
        assert_updates_as_expected(make_lookup(tables, 20, 9, hot=hot, generator=random(1)))

    def test_other_rows_neither_move_nor_decay_nor_lose_their_moments(self):
        tables = make_tables([5], [4], [0], optimizer="adam", weight_decay=0.1, generator=random())
        before = [tensor.clone().view(5, 4) for tensor in (tables.weights, *states_of(tables)[:2])]
        update(Lookup(tables, torch.tensor([1, 3]), torch.tensor([0, 2]), None, torch.zeros(1, 4)))
        for old, new in zip(before, (tables.weights, *states_of(tables)[:2]), strict=True):
            is_changed = (new.view(5, 4) != old).all(1)
            assert is_changed.tolist() == [False, True, False, True, False]

    def test_a_step_without_indices_counts(self):
        tables = make_tables([9, 6], [8, 4], [0, 1], optimizer="adam", generator=random())
        before = tables.weights.clone()
        update(make_lookup(tables, 3, 0, generator=random(1)))
        assert states_of(tables)[-1].item() == 4
        assert torch.equal(tables.weights, before)

    def test_a_cancelled_step_does_not_count(self):
        tables = make_tables([9, 6], [8, 4], [0, 1], optimizer="adam", generator=random())
        before = [tensor.clone() for tensor in (tables.weights, *states_of(tables))]
        update(make_lookup(tables, 3, 4, generator=random(1)), cancelled=torch.ones(1, dtype=torch.int64))
        assert all(map(torch.equal, before, (tables.weights, *states_of(tables))))

    def test_the_count_may_be_set_between_steps(self):
        tables = make_tables([9, 6], [8, 4], [0, 1], optimizer="adam", generator=random())
        update(make_lookup(tables, 3, 4, generator=random(1)))
        states_of(tables)[-1].fill_(1000)
        assert_updates_as_expected(make_lookup(tables, 3, 4, generator=random(2)))


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("shape", ["dims_differ", "shared_apart"])
def test_coefficients_of_positions(mean: bool, weighted: bool, shape: str) -> None:
    tables = make_tables(**TABLES[shape], mean=mean, generator=random())
    assert_updates_as_expected(make_lookup(tables, 5, 4, weighted=weighted, generator=random(1)), scale=0.25)


@pytest.mark.parametrize("hot", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_span_many_programs(hot: float, seed: int) -> None:
    tables = make_tables([3, 30], [4, 4], [0, 1], generator=random(seed))
    assert_updates_as_expected(make_lookup(tables, 20, 9, hot=hot, generator=random(seed + 10)))


def test_a_row_that_spans_more_programs_than_a_tile_of_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_fused.ops.embedding_all_to_all.update._MERGE_ELEMENTS", 16)
    tables = make_tables([2], [4], [0], generator=random())
    assert_updates_as_expected(make_lookup(tables, 30, 6, hot=0.9, generator=random(1)))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 3, 4])
def test_types_and_strides(index_dtype: torch.dtype, gradient_dtype: torch.dtype, padding: int) -> None:
    tables = make_tables([9, 6], [8, 4], [0, 1], generator=random())
    lookup = make_lookup(
        tables, 4, 3, index_dtype=index_dtype, gradient_dtype=gradient_dtype, padding=padding, generator=random(1)
    )
    assert_updates_as_expected(lookup)


def test_keys_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_fused.ops.embedding_all_to_all.update._MAX_INT32", 10)
    tables = make_tables([9, 6], [8, 4], [0, 1], generator=random())
    lookup = make_lookup(tables, 4, 3, generator=random(1))
    assert sort_lookup(tables, lookup.indices, lookup.offsets).keys.dtype == torch.int64
    assert_updates_as_expected(lookup)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_rounded_to_nearest(dtype: torch.dtype, optimizer: str) -> None:
    tables = make_tables([9], [8], [0], dtype=dtype, optimizer=optimizer, generator=random())
    lookup = make_lookup(tables, 4, 3, generator=random(1))
    weights, _ = expected_update(lookup)
    update(lookup)
    torch.testing.assert_close(tables.weights, weights.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    if dtype == torch.float16:  # the interpreter cuts bf16 off instead
        assert (tables.weights == weights.to(dtype)).float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-15], ids=["normal", "below_the_normal_range_of_fp16"])
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_in_the_mean(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(3)
    rows, dim = 64, 16
    tables = make_tables([rows], [dim], [0], dtype=dtype, optimizer="sgd", stochastic_rounding=True, learning_rate=1.0)
    sign = torch.where(torch.arange(rows * dim) % 2 == 0, 1.0, -1.0)
    tables.weights.copy_(sign * magnitude)
    step = max(magnitude, 2.0**-14 if dtype == torch.float16 else 0.0) * torch.finfo(dtype).eps
    # Away from zero by 0.3 of the distance between neighbours.
    gradients = -0.3 * step * sign.view(rows, dim)
    lookup = Lookup(tables, torch.arange(rows), torch.arange(rows + 1), None, gradients)
    update(lookup)
    moved = (tables.weights.float() - sign * magnitude) / (sign * step)
    assert set(moved.tolist()) == {0.0, 1.0}
    # 1024 independent draws: a standard deviation of 0.0143.
    assert moved.mean().item() == pytest.approx(0.3, abs=0.06)
    first = tables.weights.clone()
    tables.weights.copy_(sign * magnitude)
    update(lookup)
    assert not torch.equal(tables.weights, first), "the next update must draw other numbers"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stochastic_rounding_of_every_optimizer_goes_up_and_down(optimizer: str) -> None:
    tables = make_tables([90], [8], [0], dtype=torch.float16, optimizer=optimizer, stochastic_rounding=True, generator=random())
    lookup = make_lookup(tables, 60, 4, generator=random(1))
    before = tables.weights.clone()
    weights, _ = expected_update(lookup)
    update(lookup)
    spacing = weights.abs() * 2.0**-10
    error = (tables.weights.double() - weights) / spacing
    moved = tables.weights != before
    assert error.abs().max() <= 1.0
    assert (error[moved] > 0).any()
    assert (error[moved] < 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    tables = make_tables([6], [4], [0], dtype=dtype, stochastic_rounding=True, generator=random())
    gradients = torch.randn(6, 4, generator=random(1))
    # The bits of this NaN are all ones: rounding must not carry into the sign.
    gradients[2, 1] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    gradients[4, 0] = torch.inf
    update(Lookup(tables, torch.arange(6), torch.arange(7), None, gradients))
    is_finite = tables.weights.view(6, 4).isfinite().all(1)
    assert is_finite.tolist() == [True, True, False, True, False, True]


def test_the_learning_rate_may_lie_beside_the_weights_and_is_read_at_every_update() -> None:
    for rate_on_device in (True, False):
        tables = make_tables([9], [4], [0], optimizer="sgd", rate_on_device=rate_on_device, generator=random())
        lookup = make_lookup(tables, 4, 3, generator=random(1))
        assert tables.optimizer is not None
        for rate in (0.5, 0.0, 0.125):
            tables.optimizer.learning_rate.fill_(rate)
            weights, _ = expected_update(lookup)
            update(lookup)
            torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [0, 3])
def test_nothing_was_looked_up(batch_size: int) -> None:
    tables = make_tables([9, 6], [8, 4], [0, 1], generator=random())
    lookup = make_lookup(tables, batch_size, 0, weighted=True, generator=random(1))
    before = tables.weights.clone()
    update(lookup)
    assert torch.equal(tables.weights, before)
    assert per_sample_weight_gradients(tables, lookup.gradients, lookup.indices, lookup.offsets).shape == (0,)


def test_the_same_inputs_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        tables = make_tables(**TABLES["shared"], generator=random())
        update(make_lookup(tables, 16, 6, hot=0.5, generator=random(1)))
        results.append(tables.weights)
    assert torch.equal(*results)


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_per_sample_weights(mean: bool, dtype: torch.dtype) -> None:
    tables = make_tables([5, 40, 9], [4, 160, 12], [1, 0, 2], mean=mean, dtype=dtype, generator=random())
    lookup = make_lookup(tables, 5, 4, weighted=True, padding=4, generator=random(1))
    expected = expected_products(lookup, scale=0.5)
    result = per_sample_weight_gradients(tables, lookup.gradients, lookup.indices, lookup.offsets, scale=0.5)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


# FBGEMM has no Adam on the CPU.
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "adagrad"])
# Not weighted means: FBGEMM's backward pass on the CPU forgets to divide them by the length of the bag.
@pytest.mark.parametrize(("mean", "weighted"), [(True, False), (False, True), (False, False)], ids=["mean", "weighted", "sum"])
def test_updates_as_fbgemm_does(optimizer: str, mean: bool, weighted: bool) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rows, dims, feature_tables = [5, 40, 9], [4, 20, 12], [0, 1, 1, 2]
    tables = make_tables(rows, dims, feature_tables, mean=mean, optimizer=optimizer, generator=random())
    embeddings = SplitTableBatchedEmbeddingBagsCodegen(
        [(count, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for count, dim in zip(rows, dims, strict=True)],
        feature_table_map=feature_tables,
        optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
        pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
        learning_rate=0.1,
        eps=1e-8,
    )
    embeddings.weights_host.data.copy_(tables.weights)
    for state in states_of(tables):
        embeddings.momentum1_host.data.copy_(state)
    for step in range(3):
        lookup = make_lookup(tables, 7, 5, hot=0.3, weighted=weighted, generator=random(step))
        embeddings(lookup.indices, lookup.offsets, lookup.per_sample_weights).backward(lookup.gradients)
        update(lookup)
    torch.testing.assert_close(tables.weights, embeddings.weights_host.data, rtol=1e-5, atol=1e-5)
    for state in states_of(tables):
        torch.testing.assert_close(state, embeddings.momentum1_host.data, rtol=1e-5, atol=1e-5)


WRONG_USES: dict[str, tuple[Callable[[Lookup], Lookup], str]] = {
    "indices of another type": (
        lambda lookup: dataclasses.replace(lookup, offsets=lookup.offsets.int()),
        r"offsets are torch.int32, indices torch.int64",
    ),
    "float indices": (lambda lookup: dataclasses.replace(lookup, indices=lookup.indices.float()), r"indices are torch.float32"),
    "offsets that do not fit": (lambda lookup: dataclasses.replace(lookup, offsets=lookup.offsets[:-1]), r"F \* B \+ 1"),
    "strided indices": (
        lambda lookup: dataclasses.replace(lookup, indices=lookup.indices.repeat_interleave(2)[::2]),
        r"strides \(2,\)",
    ),
    "gradients of another width": (
        lambda lookup: dataclasses.replace(lookup, gradients=lookup.gradients[:, :-4]),
        r"shape \[4, 8\]",
    ),
    "transposed gradients": (
        lambda lookup: dataclasses.replace(lookup, gradients=lookup.gradients.T.contiguous().T),
        r"contiguous rows",
    ),
    "float64 gradients": (
        lambda lookup: dataclasses.replace(lookup, gradients=lookup.gradients.double()),
        r"gradients are torch.float64",
    ),
    "too few per-sample weights": (
        lambda lookup: dataclasses.replace(lookup, per_sample_weights=torch.ones(1)),
        r"per_sample_weights are torch.float32 \[1\]",
    ),
    "no optimizer": (
        lambda lookup: dataclasses.replace(lookup, tables=dataclasses.replace(lookup.tables, optimizer=None)),
        r"no optimizer",
    ),
}


@pytest.mark.parametrize("use", WRONG_USES)
def test_wrong_use_is_an_error_and_changes_nothing(use: str) -> None:
    tables = make_tables([9, 6], [8, 4], [0, 1], generator=random())
    lookup = make_lookup(tables, 4, 3, generator=random(1))
    before = tables.weights.clone()
    change, message = WRONG_USES[use]
    with pytest.raises(UsageError, match=message):
        update(change(lookup))
    assert torch.equal(tables.weights, before)


def test_the_order_of_other_inputs_is_refused() -> None:
    tables = make_tables([9], [8], [0], generator=random())
    lookup, other = (make_lookup(tables, batch, 3, generator=random(1)) for batch in (4, 5))
    order = sort_lookup(tables, other.indices, other.offsets)
    with pytest.raises(UsageError, match="same inputs"):
        apply_gradients(tables, order, lookup.gradients, lookup.indices, lookup.offsets)


def adam(kind: type[Adam] = Adam, **changes: Tensor) -> Adam:
    """Of 9 rows x 8."""
    states = {"momentum1": torch.zeros(72), "momentum2": torch.zeros(72), "steps": torch.zeros(1, dtype=torch.int64)}
    given = {**states, "learning_rate": torch.tensor(0.1), **changes}
    return kind(**given, eps=1e-8, beta1=0.9, beta2=0.999, weight_decay=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": (6,)}, "multiple of 4"),
        ({"rows": (10,)}, "does not lie"),
        ({"offsets": (2,)}, "does not lie"),
        ({"rows": (9, 9)}, "one of each"),
        ({"feature_tables": (0, 1)}, "feature 1 reads table 1"),
        ({"weights": torch.zeros(72, dtype=torch.float64)}, "torch.float64"),
        ({"weights": torch.zeros(9, 8)}, "flat"),
        ({"optimizer": RowwiseAdagrad(torch.zeros(8), torch.tensor(0.1), 1e-8)}, r"momentum is torch.float32 \[8\]"),
        ({"optimizer": RowwiseAdagrad(torch.zeros(9), torch.tensor(1), 1e-8)}, "learning_rate is torch.int64"),
        ({"optimizer": Adagrad(torch.zeros(9), torch.tensor(0.1), 1e-8)}, r"momentum is torch.float32 \[9\]: .* fp32 \[72\]"),
        ({"optimizer": adam(momentum1=torch.zeros(9))}, r"momentum1 is torch.float32 \[9\]: give contiguous fp32 \[72\]"),
        ({"optimizer": adam(momentum2=torch.zeros(72).half())}, r"momentum2 is torch.float16 \[72\]"),
        ({"optimizer": adam(momentum2=torch.zeros(144)[::2])}, r"momentum2 is .*: give contiguous"),
        ({"optimizer": adam(momentum2=torch.zeros(72, device="meta"))}, "momentum2 is on meta: the weights are on cpu"),
        ({"optimizer": adam(RowwiseAdam)}, r"momentum2 is torch.float32 \[72\]: give contiguous fp32 \[9\]"),
        ({"optimizer": adam(steps=torch.zeros(1))}, r"steps is torch.float32 \[1\]: give contiguous int64 \[1\]"),
        ({"optimizer": adam(steps=torch.zeros(1, dtype=torch.int64, device="meta"))}, "steps is on meta"),
        ({"optimizer": adam(learning_rate=torch.zeros(2))}, r"learning_rate is torch.float32 \[2\]"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str) -> None:
    tables: LocalTables = make_tables([9], [8], [0], generator=random())
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(tables, **change)
