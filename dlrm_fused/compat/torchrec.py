"""Private names of TorchRec, 1.6, 1.8 and 1.9: what its sharded modules, their lookups and its pipeline keep to themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import CommOpGradientScaling
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _apply_mean_pooling,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingEnv
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

ShardedModule: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection

In = TypeVar("In")
Out = TypeVar("Out")

# A sharder.


def sharded_module_order(sharder: EmbeddingBagCollectionSharder) -> list[str] | None:
    """Return the sharder's argument ``sharded_module_order_overwrite``, which a sharder that replaces ``shard`` passes on."""
    return sharder._sharded_module_order_overwrite


def set_fused_params(weight: nn.Parameter, optimizer: type[torch.optim.Optimizer] | None, params: Mapping[str, Any]) -> None:
    """Give a table, before it is sharded, arguments of FBGEMM's lookup that differ from the sharder's ``fused_params``.

    TorchRec reads them where ``torch.distributed.optim._apply_optimizer_in_backward`` leaves those of an optimizer; that
    function would also make the optimizer, which must then do without FBGEMM's arguments.

    Args:
        optimizer: a class that TorchRec knows; its planner makes room for the states of such tables alone. None for the
            sharder's.
    """
    weight._optimizer_classes = [optimizer]  # type: ignore[attr-defined]
    weight._optimizer_kwargs = [dict(params)]  # type: ignore[attr-defined]


# A sharded module. Its sharding types have numbers: table_wise may be 0, row_wise 1.


def environment(module: ShardedModule) -> ShardingEnv:
    """Return the ranks that a module is sharded over."""
    return module._env


def device(module: ShardedModule) -> torch.device:
    """Return the device that holds a module's tables."""
    return module._device or torch.device("cpu")


def path(module: ShardedModule) -> str:
    """Return the name of a module within its model."""
    return module._module_fqn or "embeddings"


def sharding_types(module: ShardedModule) -> list[str]:
    """Return a module's sharding types, by number."""
    return module._sharding_types


def shardings(module: ShardedEmbeddingBagCollection) -> list[Any]:
    """TorchRec's EmbeddingSharding of each sharding type."""
    return module._embedding_shardings


def sequence_shardings(module: ShardedEmbeddingCollection) -> list[Any]:
    """TorchRec's EmbeddingSharding of each sharding type of a sharded EmbeddingCollection."""
    return list(module._sharding_type_to_sharding.values())


def set_output_dist(module: ShardedEmbeddingCollection, number: int, output_dist: nn.Module) -> None:
    """Let another module deliver the rows of a sharding type: it is called with what the lookup returns, [n, columns], and the
    SequenceShardingContext of the batch, and returns an awaitable of this rank's rows."""
    module._output_dists[number] = output_dist


def ids_for_ranks(awaitable: Any) -> list[int]:
    """Return how many ids an input dist, of which this is the result, sends to each rank."""
    if isinstance(awaitable, KJTSplitsAllToAllMeta):  # within a pipeline, which exchanges splits of all modules at once
        return list(awaitable.input_splits[awaitable.labels.index("values")])
    return list(awaitable._input_splits[awaitable._labels.index("values")])


@contextmanager
def lookups_replaced(module: ShardedEmbeddingCollection, others: Mapping[int, Any]) -> Iterator[None]:
    """Within, a module calls others instead of its lookups of the sharding types with these numbers."""
    own = module._lookups
    module._lookups = [others.get(number, lookup) for number, lookup in enumerate(own)]
    try:
        yield
    finally:
        module._lookups = own


def lookups(module: ShardedModule) -> list[Any]:
    """Return the lookup of each sharding type: a group of embedding modules, each of them an operator of FBGEMM."""
    return cast(list[Any], module._lookups)


def grouped_configs_per_rank(sharding: Any) -> list[list[Any]]:
    """Return, by rank, the tables of each of its embedding modules."""
    return sharding._grouped_embedding_configs_per_rank


def feature_names_per_rank(sharding: Any) -> list[list[str]]:
    """Return, by rank, the features that it looks up."""
    return [[name for name, _ in features] for features in features_per_rank(sharding)]


def features_per_rank(sharding: Any) -> list[list[tuple[str, int]]]:
    """Return, by rank, the features that it looks up, each with the number of the table's rows that it holds."""
    return [
        [(name, table.local_rows) for group in groups for table in group.embedding_tables for name in table.feature_names]
        for groups in grouped_configs_per_rank(sharding)
    ]


def rows_of_features(sharding: Any) -> list[tuple[str, int]]:
    """Return the features of all ranks, each with the rows of a table that it reads."""
    return [
        (name, table.num_embeddings)
        for groups in grouped_configs_per_rank(sharding)
        for group in groups
        for table in group.embedding_tables
        for name in table.feature_names
    ]


def look_up_and_deliver(
    module: ShardedEmbeddingBagCollection, number: int, context: EmbeddingBagCollectionContext, features: KJTList
) -> Awaitable[Tensor]:
    """TorchRec's own lookup and output dist of one sharding type."""
    lookup = lookups(module)[number]
    embeddings = lookup(features[number])
    if hasattr(lookup, "wait_for_forward"):  # 1.8: for kernels on a stream of their own
        lookup.wait_for_forward()
    return cast(Awaitable[Tensor], module._output_dists[number](embeddings, context.sharding_contexts[number]))


def feature_names(module: ShardedEmbeddingBagCollection) -> list[str]:
    """Return the features that a module's tables read, one table after the other."""
    return [name for config in module._embedding_bag_configs for name in config.feature_names]


def feature_order(module: ShardedEmbeddingBagCollection) -> list[str]:
    """Return the features of a module in the order of its tables, which is that of the module before it was sharded."""
    return [name for names in get_embedding_names_by_table(module._embedding_bag_configs) for name in names]


def divides_after_output(module: ShardedEmbeddingBagCollection) -> bool:
    """Return whether the output's columns are divided for mean pooling, in the order of TorchRec's sharding types."""
    return module._has_mean_pooling_callback


def output_of(
    module: ShardedEmbeddingBagCollection,
    parts: Mapping[int, Awaitable[Tensor]],
    context: EmbeddingBagCollectionContext,
    order: Sequence[str] = (),
) -> LazyAwaitable[KeyedTensor]:
    """Return the output of a module, from the columns of its sharding types.

    Args:
        parts: by number of a sharding type; one that is missing has its columns in the part before.
        order: of the columns' features, where it is not that of the sharding types.
    """
    dims = dict(zip(module._embedding_names, module._embedding_dims, strict=True)) if order else {}
    numbers = sorted(parts)
    awaitable = EmbeddingBagCollectionAwaitable(
        awaitables=[parts[i] for i in numbers],
        embedding_dims=[dims[name] for name in order] if order else module._embedding_dims,
        embedding_names=list(order) or module._embedding_names,
        module_fqn=module._module_fqn,
        sharding_types=[module._sharding_types[i] for i in numbers],
    )
    if module._has_mean_pooling_callback:
        awaitable.callbacks.append(partial(_apply_mean_pooling, divisor=context.divisor))
    return awaitable


def put_in_order(output: LazyAwaitable[KeyedTensor], order: Sequence[str]) -> None:
    """Set the order of the features of an output that is still to be waited for."""
    output.callbacks.append(partial(_in_order, order=list(order)))


def _in_order(output: KeyedTensor, order: list[str]) -> KeyedTensor:
    if output.keys() == order:
        return output
    columns = output.to_dict()
    in_order = [columns[name] for name in order]
    return KeyedTensor(order, [own.shape[1] for own in in_order], torch.cat(in_order, dim=1))


# The lookup of one sharding type.


def embedding_modules(lookup: Any) -> list[Any]:
    """Return the embedding modules of a lookup; none on a rank without tables of its sharding type."""
    return list(lookup._emb_modules)


def set_dtype_without_tables(lookup: Any, dtype: torch.dtype) -> None:
    """Set the dtype of what a lookup returns on a rank without tables of its sharding type: no elements, but with a dtype, by
    which the rank knows how many bytes the others send. TorchRec has fp32 there, whatever the others look up."""
    own = getattr(lookup, "module", lookup)  # DDP wraps the lookups of data-parallel tables
    if not embedding_modules(own):
        own._dummy_embs_tensor = torch.empty(0, dtype=dtype, device=own._dummy_embs_tensor.device, requires_grad=True)


def fbgemm_lookups(model: nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the lookups of FBGEMM that update the tables of a model. TorchRec does not keep them as submodules."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    # DDP wraps the lookups of data-parallel tables, which are no such lookups.
    own = [getattr(lookup, "module", lookup) for module in sharded for lookup in lookups(module)]
    found = [module.emb_module for lookup in own for module in embedding_modules(lookup)]
    return [lookup for lookup in found if isinstance(lookup, SplitTableBatchedEmbeddingBagsCodegen)]


def split_features(lookup: Any, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    """Return the features of each embedding module."""
    splits = lookup._feature_splits
    return features.split(splits) if len(splits) > 1 else [features]


def pooled_by_module(lookup: Any, features: KeyedJaggedTensor) -> list[Tensor]:
    """Return the pooled embeddings of each embedding module, before TorchRec concatenates them."""
    return list(lookup._forward(split_features(lookup, features))) if embedding_modules(lookup) else []


def undivided_gradient(lookup: Any, weights: Tensor) -> Tensor:
    """Weights of samples whose gradient is not divided by the number of ranks, as TorchRec's lookup has it."""
    return cast(Tensor, CommOpGradientScaling.apply(weights, lookup._scale_gradient_factor))


class Later(Awaitable[Out], Generic[Out]):
    """A result that its function computes when it is waited for."""

    def __init__(self, function: Callable[[], Out]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> Out:
        return self._function()


class SparseDistPipeline(TrainPipelineSparseDist[In, Out], Generic[In, Out]):
    """TrainPipelineSparseDist, with public names for the parts of a step that a subclass may time."""

    @property
    def sharded_model(self) -> nn.Module:
        return self._model

    def data_dist_stream(self) -> AbstractContextManager[Any]:
        """Return the stream on which sparse features are exchanged: the current one, on GPUs."""
        return self._stream_context(self._data_dist_stream)

    def next_batch(self, batches: Iterator[In]) -> In | None:
        """Take the next batch from the reader; None at the end."""
        return super()._next_batch(batches)

    def run_backward(self, losses: Tensor) -> None:
        """The backward pass of a step."""
        super()._backward(losses)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        return self.next_batch(dataloader_iter)

    def _backward(self, losses: Tensor) -> None:
        self.run_backward(losses)
