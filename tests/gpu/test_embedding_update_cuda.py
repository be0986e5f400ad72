"""The update of embedding tables on GPUs: against float64, against FBGEMM, in CUDA graphs, beyond 2 ** 31 elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import LocalTables, RowwiseAdagrad
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, per_sample_weight_gradients, sort_lookup
from tests.ops.embedding_all_to_all.lookups import Lookup, expected_products, expected_update, make_lookup, make_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def update(lookup: Lookup, **arguments: Any) -> None:
    order = sort_lookup(lookup.tables, lookup.indices, lookup.offsets)
    apply_gradients(
        lookup.tables, order, lookup.gradients, lookup.indices, lookup.offsets, lookup.per_sample_weights, **arguments
    )


def fbgemm_of(tables: LocalTables) -> Any:
    """FBGEMM's embeddings with the same weights, momentum and optimizer."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    is_adagrad = isinstance(tables.optimizer, RowwiseAdagrad)
    assert tables.optimizer is not None
    embeddings = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows, dim in zip(tables.rows, tables.dims, strict=True)],
        feature_table_map=list(tables.feature_tables),
        weights_precision=SparseType.from_dtype(tables.weights.dtype),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if is_adagrad else EmbOptimType.EXACT_SGD,
        pooling_mode=PoolingMode.MEAN if tables.mean else PoolingMode.SUM,
        learning_rate=tables.optimizer.learning_rate.item(),
        eps=1e-8,
        stochastic_rounding=tables.stochastic_rounding,
        device=torch.device("cuda"),
    )
    embeddings.weights_dev.data.copy_(tables.weights)
    if is_adagrad:
        embeddings.momentum1_dev.data.copy_(tables.optimizer.momentum)
    return embeddings


@pytest.mark.parametrize("adagrad", [True, False], ids=["adagrad", "sgd"])
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
    adagrad: bool, rows: Sequence[int], dims: Sequence[int], feature_tables: Sequence[int], hot: float
) -> None:
    tables = make_tables(rows, dims, feature_tables, adagrad=adagrad, device="cuda", generator=random())
    lookup = make_lookup(tables, 700, 9, hot=hot, index_dtype=torch.int32, padding=8, generator=random(1))
    weights, momentum = expected_update(lookup)
    update(lookup)
    torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)
    if isinstance(tables.optimizer, RowwiseAdagrad):
        torch.testing.assert_close(tables.optimizer.momentum.double(), momentum, rtol=1e-4, atol=1e-4)


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
    weights, momentum = expected_update(lookup, scale=0.5)
    update(lookup, scale=0.5)
    assert isinstance(tables.optimizer, RowwiseAdagrad)
    torch.testing.assert_close(tables.optimizer.momentum.double(), momentum, rtol=1e-4, atol=1e-4)
    if dtype == torch.float32:
        torch.testing.assert_close(tables.weights.double(), weights, rtol=1e-4, atol=1e-4)
    else:
        # To nearest: to the other neighbour only where fp32's own error decides.
        torch.testing.assert_close(tables.weights, weights.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert (tables.weights == weights.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # FBGEMM's kernels have no bf16 tables
@pytest.mark.parametrize("adagrad", [True, False], ids=["adagrad", "sgd"])
def test_equals_fbgemm(mean: bool, dtype: torch.dtype, adagrad: bool) -> None:
    tables = make_tables(
        [2000, 30, 400], [128, 96, 20], [0, 1, 1, 2], dtype=dtype, mean=mean, adagrad=adagrad, device="cuda", generator=random()
    )
    embeddings = fbgemm_of(tables)
    for step in range(2):
        lookup = make_lookup(tables, 500, 6, hot=0.2, generator=random(step))
        embeddings(lookup.indices, lookup.offsets).backward(lookup.gradients)
        update(lookup)
    tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(tables.weights, embeddings.weights_dev.data, rtol=tolerance, atol=tolerance)
    if isinstance(tables.optimizer, RowwiseAdagrad):
        momentum = embeddings.momentum1_dev.data
        torch.testing.assert_close(tables.optimizer.momentum, momentum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_right_in_the_mean(dtype: torch.dtype) -> None:
    rows, dim = 4096, 128
    tables = make_tables(
        [rows], [dim], [0], dtype=dtype, adagrad=False, stochastic_rounding=True, learning_rate=1.0, device="cuda"
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
    base = make_tables([8], [dim], [0], adagrad=False, device="cuda", learning_rate=1.0)
    tables = dataclasses.replace(base, weights=weights, rows=(rows,))
    looked_up = torch.tensor([5, rows - 1, rows - 1, rows - 3], device="cuda")
    offsets = torch.arange(5, device="cuda")
    gradients = torch.arange(1.0, 5.0, device="cuda")[:, None].expand(4, dim).contiguous()
    update(Lookup(tables, looked_up, offsets, None, gradients))
    touched = weights.view(rows, dim)
    assert touched[:, 7].nonzero().flatten().tolist() == [5, rows - 3, rows - 1]
    assert touched[[5, rows - 3, rows - 1], 127].tolist() == [-1.0, -4.0, -5.0]


def test_replays_of_a_cuda_graph_update_with_the_values_of_their_time() -> None:
    tables = make_tables([500, 30], [64, 32], [0, 1], adagrad=False, rate_on_device=True, device="cuda", generator=random())
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


def test_sorting_and_updating_do_not_wait_for_the_device() -> None:
    tables = make_tables([500, 30], [64, 32], [0, 1], mean=True, device="cuda", generator=random())
    lookup = make_lookup(tables, 300, 5, generator=random(1))
    update(lookup)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(lookup, tables_range=(0, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
