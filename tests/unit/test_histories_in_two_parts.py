"""A model of histories that trains in two parts, lookups and what GPUs capture, trains as one that runs as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.train_pipeline.utils import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Compile, Precision
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.models import Output, RankingTask
from dlrm_fused.models.history import HistoryDLRM, HistoryEncoder
from dlrm_fused.models.hstu import Hstu
from dlrm_fused.models.jagged import NUMBERS_OF_ROWS
from dlrm_fused.models.transformer import HistoryTransformer

HISTORY, DIM, D_MODEL, SAMPLES = 9, 4, 8, 6
TOKENS = HISTORY + 1
CPU = torch.device("cpu")
ENCODERS: dict[str, Callable[..., HistoryEncoder[Any]]] = {
    "transformer": lambda **shape: HistoryTransformer(d_ff=16, **shape),
    "hstu": lambda **shape: Hstu(reads_times=True, **shape),
}


def task(
    kind: str,
    compile: Compile,
    has_sample_weights: bool = False,
    device: torch.device = CPU,
    precision: Precision = Precision.fp32,
) -> RankingTask:
    torch.manual_seed(1)
    encoder = ENCODERS[kind](token_width=DIM, d_model=D_MODEL, heads=2, layers=2, history_length=HISTORY)
    model = HistoryDLRM(tables("user"), tables("item"), encoder, 3, [8, DIM], [8, 1])
    return RankingTask(model.to(device), precision, 1, device, compile, has_sample_weights=has_sample_weights)


def tables(feature: str) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name=feature, feature_names=[feature], num_embeddings=20, embedding_dim=DIM)
    return EmbeddingBagCollection([config], device=CPU)


def batch(lengths: list[int], seed: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    samples, counts = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    is_token = torch.arange(TOKENS) <= counts[:, None]

    def ids(feature: str, bags: Tensor) -> KeyedJaggedTensor:
        values = torch.randint(0, 20, (int(bags.sum()),), generator=generator)
        return KeyedJaggedTensor(keys=[feature], values=values, lengths=bags)

    return Batch(
        dense=torch.randn(samples, 3, generator=generator),
        sparse=ids("user", torch.ones(samples, dtype=torch.int32)),
        labels=(torch.rand(samples, generator=generator) < 0.5).float(),
        weights=torch.ones(samples),
        global_size=samples,
        tokens=ids("item", is_token.flatten().int()),
        history_lengths=counts,
        sample_weights=torch.rand(samples, generator=generator),
        token_count=int(is_token.sum()),
        token_times=torch.randint(0, 10**6, (samples, TOKENS), generator=generator).sort(1).values,
    )


def step(task: RankingTask, batch: Batch) -> tuple[Output, list[Tensor | None]]:
    loss, output = task(batch)
    loss.backward()
    return output, [parameter.grad for parameter in task.parameters()]


@pytest.mark.parametrize("has_sample_weights", [False, True])
@pytest.mark.parametrize("lengths", [[0, 2, 9, 4, 1, 7], [HISTORY] * SAMPLES, [0] * SAMPLES])
@pytest.mark.parametrize("kind", ENCODERS)
def test_losses_and_gradients_are_those_of_the_whole(kind: str, lengths: list[int], has_sample_weights: bool) -> None:
    whole, of_whole = step(task(kind, Compile.never, has_sample_weights), batch(lengths))
    in_parts, of_parts = step(task(kind, Compile.always, has_sample_weights), batch(lengths))
    torch.testing.assert_close(in_parts, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_parts, of_whole, rtol=1e-4, atol=1e-6)


def test_batches_have_few_numbers_of_rows_where_gradients_are_wanted() -> None:
    encoder = ENCODERS["transformer"](token_width=DIM, d_model=D_MODEL, heads=2, layers=1, history_length=HISTORY)
    numbers = set()
    for longest in range(HISTORY + 1):
        for last in range(longest + 1):
            lengths = torch.tensor([longest] * (SAMPLES - 1) + [last])
            rows, *_ = encoder.rows_to_encode(torch.randn(SAMPLES * TOKENS, DIM), lengths)
            numbers.add(len(rows))
            with torch.no_grad():
                rows, *_ = encoder.rows_to_encode(torch.randn(SAMPLES * TOKENS, DIM), lengths)
            assert len(rows) == int(lengths.sum()) + SAMPLES
    assert len(numbers) <= NUMBERS_OF_ROWS


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_pipeline_finds_both_lookups_and_their_inputs(kind: str) -> None:
    lookups = [f"model.sparse_arch.{name}" for name in ("embedding_bag_collection", "token_embedding_bag_collection")]
    orders = [f"model.sparse_arch.{name}" for name in ("in_feature_order", "tokens_in_feature_order")]
    graph = Tracer(leaf_modules=[*lookups, *orders, "dense_part"]).trace(task(kind, Compile.always))
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    assert sorted(called) == sorted([*lookups, *orders, "dense_part"])


def test_evaluation_gives_the_logits_of_the_whole() -> None:
    with torch.no_grad():
        (_, whole), (_, in_parts) = (
            task("hstu", compile)(batch([3, 0, 9, 2, 2, 5])) for compile in (Compile.never, Compile.always)
        )
    torch.testing.assert_close(in_parts.logits, whole.logits)
