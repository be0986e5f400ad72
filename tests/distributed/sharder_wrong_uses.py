"""Wrong uses of the sharder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from tests.distributed import test_fused_sharder as torchrec_models
from tests.ops.wrong_use import SECOND, Scene, WrongUse

TABLES_OF_MODEL = (
    torchrec_models.Table("table_wise", 8, rank=1),
    torchrec_models.Table("column_wise", 8),
    torchrec_models.Table("row_wise", 4),
)
MODEL = torchrec_models.World((TABLES_OF_MODEL,), batch_sizes=(4, 4))


class Sharded(Scene):
    """A model with our sharder, beside the same one with TorchRec's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build(strict=True)
        self.torchrecs = torchrec_models.build(
            MODEL, torchrec_models.EmbeddingBagCollectionSharder(dict(torchrec_models.ADAGRAD))
        )
        self.batches = torchrec_models.batches(MODEL, 1)
        with torch.no_grad():
            self.held = [get_unwrapped_module(self.model).embeddings(self.batches[0])]

    def tables(self) -> Sequence[Tensor]:
        return torchrec_models.tables_of(self.model)

    def difference(self) -> float:
        seen = []
        for model in (self.model, self.torchrecs):
            loss = model(self.batches[0])
            loss.backward()
            seen.append([loss.detach(), *torchrec_models.tables_of(model)])
        return max(float((our - torchrecs).abs().max()) for our, torchrecs in zip(*seen, strict=True) if our.numel())


def build(world: Any = MODEL, fused_params: dict[str, Any] | None = None, codecs: Any = None, **options: Any) -> Any:
    sharder = FusedEmbeddingBagCollectionSharder({**torchrec_models.ADAGRAD, **(fused_params or {})}, codecs, **options)
    return torchrec_models.build(world, sharder)


def option(**wrong: Any) -> Callable[[Sharded, bool], object]:
    """Make the sharder with other arguments."""
    return lambda scene, is_wrong: FusedEmbeddingBagCollectionSharder(**(wrong if is_wrong else {}))


def model(*wrong_tables: torchrec_models.Table, **wrong: Any) -> Callable[[Sharded, bool], object]:
    """Shard another model, or with other arguments."""
    world = dataclasses.replace(MODEL, modules=(wrong_tables,)) if wrong_tables else MODEL
    return lambda scene, is_wrong: build(**({"world": world, **wrong} if is_wrong else {}))


def int8_codecs(scene: Sharded, is_wrong: bool) -> None:
    wire = QCommsConfig(forward_precision=CommType.INT8, backward_precision=CommType.FP16)
    build(codecs=get_qcomm_codecs_registry(wire), strict=True)


def batch(change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> Callable[[Sharded, bool], object]:
    def attempt(scene: Sharded, is_wrong: bool) -> None:
        with torch.no_grad():
            scene.model(change(scene.batches[0]))

    return attempt


def with_sizes_of_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch in which each feature has a batch size of its own."""
    keys = features.keys()
    strides = [[i % 2 + 1] for i in range(len(keys))]
    lengths = torch.ones(sum(stride for (stride,) in strides), dtype=torch.int64)
    inverse = torch.stack([torch.arange(3) % stride for (stride,) in strides])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.zeros(len(lengths), dtype=torch.int64),
        lengths=lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(keys, inverse),
    )


def track_lookups(scene: Sharded, is_wrong: bool) -> None:
    tracked = build(strict=True)
    get_unwrapped_module(tracked).collections[0].register_post_lookup_tracker_fn(lambda *_: None)
    tracked(scene.batches[0])


def lose_batch_sizes(scene: Sharded, is_wrong: bool) -> None:
    collection = get_unwrapped_module(scene.model).collections[0]
    context = collection.create_context()
    (uneven,) = torchrec_models.batches(dataclasses.replace(MODEL, batch_sizes=(5, 4)), 1)
    features = collection.input_dist(context, uneven).wait().wait()
    for sharding_context in context.sharding_contexts:
        sharding_context.batch_size_per_rank = []
    collection.compute_and_output_dist(context, features)


def drop_a_feature(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    first, second, _ = features.split([1, 1, 1])
    return KeyedJaggedTensor.concat([first, second])


def index_beyond(scene: Sharded, is_wrong: bool) -> None:
    """With kernels: the table-wise table of rank 1 is asked for a row that it has not."""
    features = scene.batches[0]
    values = features.values().clone()
    if is_wrong:
        values[0] = 1_000
    checked = build(check_indices=True)
    checked(KeyedJaggedTensor(keys=features.keys(), values=values, lengths=features.lengths()))


DATA_PARALLEL = (*TABLES_OF_MODEL, torchrec_models.Table("data_parallel"))
ELSEWHERE = (dataclasses.replace(TABLES_OF_MODEL[0], rank=0), *TABLES_OF_MODEL[1:])
STRICT_DIFFERS, MODE_DIFFERS = (
    f"FusedEmbeddingBagCollectionSharder: {key} differs between ranks" for key in ("strict", "mode")
)

SHARDER = [
    WrongUse('`mode="fast"`', option(mode="fast"), "mode='fast': allowed: 'fused', 'auto'"),
    WrongUse("`forward_wire=torch.int8`", option(forward_wire=torch.int8), "forward_wire=torch.int8: allowed:"),
    WrongUse("`timeout_seconds=0`", option(timeout_seconds=0), "timeout_seconds=0: allowed:"),
    WrongUse(
        "`strict` with a data-parallel table", model(*DATA_PARALLEL, strict=True), "table_0_3: sharding type data_parallel"
    ),
    WrongUse("`strict` with int8 on the wire", int8_codecs, "forward_wire="),
    WrongUse("`strict` with a batch size for each feature", batch(with_sizes_of_features), "a batch size of its own"),
    WrongUse("`strict` with a tracker of lookups", track_lookups, "a tracker of lookups"),
    WrongUse("`strict` that differs between ranks", model(strict=True), STRICT_DIFFERS, SECOND, STRICT_DIFFERS),
    WrongUse("`mode` that differs between ranks", model(mode="auto"), MODE_DIFFERS, SECOND, MODE_DIFFERS),
    WrongUse(
        "a plan that differs between ranks",
        model(*ELSEWHERE),
        "layout.lookups[0][0] differs between ranks",
        SECOND,
        "layout.lookups[0][0] differs between ranks",
    ),
    WrongUse("uneven batches without their sizes", lose_batch_sizes, "a batch of 9 samples from 2 ranks without their sizes"),
    WrongUse("a feature is missing", batch(drop_a_feature), "the batch has no feature feature_2"),
]

SHARDER_WITH_KERNELS = [
    WrongUse(
        "`strict` with an optimizer that is not covered",
        model(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1}, strict=True),
        "weight_decay",
    ),
    WrongUse("`strict` with `max_norm`", model(fused_params={"max_norm": 1.0}, strict=True), "max_norm=1.0"),
    WrongUse("`check_indices`: a row that a table has not", index_beyond, "holds 1000 for feature 0", SECOND, "holds 1000"),
]
