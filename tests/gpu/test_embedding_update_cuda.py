"""The update of embedding tables on GPUs: against float64, against FBGEMM, in CUDA graphs, beyond 2 ** 31 elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import Adam, LocalTables
from dlrm_fused.ops.embedding_all_to_all.update import per_sample_weight_gradients
from tests.ops.embedding_all_to_all.lookups import (
    EPS,
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

pytestmark = pytest.mark.gpu(1)


def fbgemm_of(tables: LocalTables) -> Any:
    """FBGEMM's embeddings with the same weights, optimizer and states of it."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    assert tables.optimizer is not None
    adam = tables.optimizer if isinstance(tables.optimizer, Adam) else None
    hyperparameters = {key: getattr(adam, key) for key in ("beta1", "beta2", "weight_decay")} if adam is not None else {}
    embeddings = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows, dim in zip(tables.rows, tables.dims, strict=True)],
        feature_table_map=list(tables.feature_tables),
        weights_precision=SparseType.from_dtype(tables.weights.dtype),
        optimizer=EmbOptimType[FBGEMM_NAMES[type(tables.optimizer).__name__]],
        pooling_mode=PoolingMode.MEAN if tables.mean else PoolingMode.SUM,
        learning_rate=tables.optimizer.learning_rate.item(),
        eps=EPS,
        **hyperparameters,
        stochastic_rounding=tables.stochastic_rounding,
        device=torch.device("cuda"),
    )
    embeddings.weights_dev.data.copy_(tables.weights)
    for state, own in zip(fbgemm_states(embeddings), states_of(tables), strict=False):
        state.copy_(own)
    return embeddings


def fbgemm_states(embeddings: Any) -> list[Tensor]:
    """As :func:`states_of` lists them, and more that are not in use."""
    return [embeddings.momentum1_dev.data, embeddings.momentum2_dev.data, embeddings.iter]


def skip_unless_fbgemm_updates(optimizer: str) -> None:
    """Builds of FBGEMM leave out backward passes."""
    import fbgemm_gpu  # noqa: F401

    prefix = f"fbgemm::split_embedding_backward_codegen_{optimizer}_unweighted"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names):
        pytest.skip(f"this build of FBGEMM has no {prefix}... for CUDA")


def train_by_fbgemm(embeddings: Any, lookup: Lookup) -> None:
    """FBGEMM 1.6 cannot train tables of 16 bits with Adam: it makes an empty row counter of their dtype, and refuses it."""
    try:
        embeddings(lookup.indices, lookup.offsets).backward(lookup.gradients)
    except RuntimeError as error:
        if "'row_counter_dev' to have scalar type Float, but found Half" not in str(error):
            raise
        pytest.skip("this FBGEMM does not train tables of fp16 with Adam")


FBGEMM_NAMES = {
    "RowwiseAdagrad": "EXACT_ROWWISE_ADAGRAD",
    "Sgd": "EXACT_SGD",
    "Adagrad": "EXACT_ADAGRAD",
    "Adam": "ADAM",
    "RowwiseAdam": "PARTIAL_ROWWISE_ADAM",
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("rows", "dims", "feature_tables"),
    [
        ([5000, 70], [128, 128], [0, 1]),
        ([3, 1000, 40, 9], [4, 96, 256, 1024], [0, 1, 2, 3]),
        ([300, 4000], [64, 32], [1, 0, 1]),
    ],
    ids=["one_dim", "dims_differ", "shared"],
)
@pytest.mark.parametrize("hot", [0.0, 0.3, 1.0])
def test_equals_float64(
    optimizer: str, rows: Sequence[int], dims: Sequence[int], feature_tables: Sequence[int], hot: float
) -> None:
    tables = make_tables(rows, dims, feature_tables, optimizer=optimizer, weight_decay=0.1, device="cuda", generator=random())
    lookup = make_lookup(tables, 700, 9, hot=hot, index_dtype=torch.int32, padding=8, generator=random(1))
    weights, states = expected_update(lookup)
    update(lookup)
    torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)
    assert_states(tables, states)


def assert_states(tables: LocalTables, expected: Sequence[Tensor]) -> None:
    for state, wanted in zip(states_of(tables), expected, strict=True):
        torch.testing.assert_close(state.double(), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
def test_adams_steps_from_the_first_on_are_those_of_float64(optimizer: str, mean: bool) -> None:
    tables = make_tables(
        [400, 70], [128, 96], [0, 1, 1], optimizer=optimizer, mean=mean, learning_rate=0.01, weight_decay=0.1,
        device="cuda", generator=random(),
    )  # fmt: skip
    for state in states_of(tables):
        state.zero_()
    for step in range(5):
        lookup = make_lookup(tables, 300, 4, hot=0.1, generator=random(step))
        weights, states = expected_update(lookup)
        update(lookup)
        torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-6, atol=1e-6)
        assert_states(tables, states)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_optimizers_with_states_of_elements_update_tables_of_16_bits(optimizer: str, dtype: torch.dtype) -> None:
    tables = make_tables([2000, 30], [128, 96], [0, 1], dtype=dtype, optimizer=optimizer, device="cuda", generator=random())
    lookup = make_lookup(tables, 500, 6, hot=0.2, generator=random(1))
    weights, states = expected_update(lookup)
    update(lookup)
    assert_states(tables, states)
    torch.testing.assert_close(tables.weights, weights.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert (tables.weights == weights.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_and_coefficients(mean: bool, weighted: bool, dtype: torch.dtype, gradient_dtype: torch.dtype) -> None:
    tables = make_tables([2000, 30], [128, 96], [0, 1, 1], dtype=dtype, mean=mean, device="cuda", generator=random())
    lookup = make_lookup(
        tables, 500, 6, hot=0.2, weighted=weighted, gradient_dtype=gradient_dtype, padding=4, generator=random(1)
    )
    products = per_sample_weight_gradients(tables, lookup.gradients, lookup.indices, lookup.offsets, scale=0.5)
    torch.testing.assert_close(products.double(), expected_products(lookup, scale=0.5), rtol=1e-4, atol=1e-4)
    weights, states = expected_update(lookup, scale=0.5)
    update(lookup, scale=0.5)
    assert_states(tables, states)
    if dtype == torch.float32:
        torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)
    else:
        # To nearest: to the other neighbour only where fp32's own error decides.
        torch.testing.assert_close(tables.weights, weights.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert (tables.weights == weights.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # FBGEMM's kernels have no bf16 tables
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_fbgemm(mean: bool, dtype: torch.dtype, optimizer: str) -> None:
    # Of Adam and elementwise Adagrad, others may bring the backward pass.
    if optimizer not in ("rowwise_adagrad", "sgd"):
        skip_unless_fbgemm_updates("partial_rowwise_adam" if optimizer == "rowwise_adam" else optimizer)
    tables = make_tables(
        [2000, 30, 400], [128, 96, 20], [0, 1, 1, 2], dtype=dtype, mean=mean, optimizer=optimizer, weight_decay=0.1,
        device="cuda", generator=random(),
    )  # fmt: skip
    embeddings = fbgemm_of(tables)
    for step in range(2):
        lookup = make_lookup(tables, 500, 6, hot=0.2, generator=random(step))
        train_by_fbgemm(embeddings, lookup)
        update(lookup)
    tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tables.weights, embeddings.weights_dev.data, rtol=tolerance, atol=tolerance)
    assert_states(tables, fbgemm_states(embeddings)[: len(states_of(tables))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_right_in_the_mean(dtype: torch.dtype) -> None:
    rows, dim = 4096, 128
    tables = make_tables(
        [rows], [dim], [0], dtype=dtype, optimizer="sgd", stochastic_rounding=True, learning_rate=1.0, device="cuda"
    )
    tables.weights.fill_(1.0)
    step = torch.finfo(dtype).eps
    gradients = torch.full((rows, dim), -0.3 * step, device="cuda")
    update(Lookup(tables, torch.arange(rows).cuda(), torch.arange(rows + 1).cuda(), None, gradients))
    moved = (tables.weights.float() - 1.0) / step
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    # 524,288 draws: a standard deviation of 0.0006; of the means of rows and columns 0.04 and 0.007.
    assert moved.mean().item() == pytest.approx(0.3, abs=0.004)
    assert moved.view(rows, dim).mean(0).sub(0.3).abs().max() < 0.05
    assert moved.view(rows, dim).mean(1).std().item() == pytest.approx((0.3 * 0.7 / dim) ** 0.5, rel=0.1)


def test_the_same_inputs_give_the_same_bits() -> None:
    results: list[Tensor] = []
    for _ in range(3):
        tables = make_tables([3, 900], [128, 64], [0, 1], device="cuda", generator=random())
        update(make_lookup(tables, 4000, 9, hot=0.3, generator=random(1)))
        results.append(tables.weights)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tables_of_more_elements_than_32_bits_count() -> None:
    rows, dim = 2**31 // 128 + 1000, 128
    weights = torch.zeros(rows * dim, dtype=torch.float16, device="cuda")
    base = make_tables([8], [dim], [0], optimizer="sgd", device="cuda", learning_rate=1.0)
    tables = dataclasses.replace(base, weights=weights, rows=(rows,))
    looked_up = torch.tensor([5, rows - 1, rows - 1, rows - 3], device="cuda")
    offsets = torch.arange(5, device="cuda")
    gradients = torch.arange(1.0, 5.0, device="cuda")[:, None].expand(4, dim).contiguous()
    update(Lookup(tables, looked_up, offsets, None, gradients))
    touched = weights.view(rows, dim)
    assert touched[:, 7].nonzero().flatten().tolist() == [5, rows - 3, rows - 1]
    assert touched[[5, rows - 3, rows - 1], 127].tolist() == [-1.0, -4.0, -5.0]


def test_replays_of_a_cuda_graph_update_with_the_values_of_their_time() -> None:
    tables = make_tables([500, 30], [64, 32], [0, 1], optimizer="sgd", rate_on_device=True, device="cuda", generator=random())
    lookup = make_lookup(tables, 300, 5, generator=random(1))
    update(lookup)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(lookup)
    assert tables.optimizer is not None
    for step in range(2):
        tables.optimizer.learning_rate.fill_(0.1 * (step + 1))
        lookup.gradients.copy_(torch.randn(lookup.gradients.shape, generator=random(step)))
        lookup.indices.copy_(lookup.indices.roll(1) % 30)
        weights, _ = expected_update(lookup)
        graph.replay()
        torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adam"])
def test_replays_of_a_cuda_graph_count_the_steps_of_adam(optimizer: str) -> None:
    tables = make_tables([500, 30], [64, 32], [0, 1], optimizer=optimizer, device="cuda", generator=random())
    lookup, cancelled = make_lookup(tables, 300, 5, generator=random(1)), torch.zeros(1, dtype=torch.int64, device="cuda")
    update(lookup, cancelled=cancelled)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(lookup, cancelled=cancelled)
    steps = states_of(tables)[-1]
    assert steps.item() == 4, "to capture is not to run"
    for step in range(4):
        if step == 3:
            steps.fill_(100)  # as after a checkpoint is loaded
        lookup.gradients.copy_(torch.randn(lookup.gradients.shape, generator=random(step)))
        weights, states = expected_update(lookup)
        graph.replay()
        torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)
        assert_states(tables, states)
    assert steps.item() == 101
    before = [tensor.clone() for tensor in (tables.weights, *states_of(tables))]
    cancelled.fill_(1)
    graph.replay()
    assert all(map(torch.equal, before, (tables.weights, *states_of(tables))))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_sorting_and_updating_do_not_wait_for_the_device(optimizer: str) -> None:
    tables = make_tables([500, 30], [64, 32], [0, 1], mean=True, optimizer=optimizer, device="cuda", generator=random())
    lookup = make_lookup(tables, 300, 5, generator=random(1))
    update(lookup)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(lookup)
    finally:
        torch.cuda.set_sync_debug_mode("default")
