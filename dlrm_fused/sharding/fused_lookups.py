"""Lookup and delivery of a module's pooled embeddings in one operator, from TorchRec's lookups and FBGEMM's tables.

The operator writes the output [local batch, columns] in TorchRec's order of keys, or in that of the module before it was
sharded: nothing is permuted or concatenated afterwards. On GPUs kernels read and update FBGEMM's tables in place; on the
CPU FBGEMM looks up and updates.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.fbgemm import Storage, kernel_inputs, storage, what_is_copied
from dlrm_fused.compat.torchrec import (
    divides_after_output,
    embedding_modules,
    feature_order,
    grouped_configs_per_rank,
    lookups,
    path,
    pooled_by_module,
    sharding_types,
    split_features,
    undivided_gradient,
)
from dlrm_fused.compat.torchrec import shardings as embedding_shardings
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all import (
    Adagrad,
    Adam,
    EmbeddingWorkspace,
    ExchangeLayout,
    LocalTables,
    LookupLayout,
    RowwiseAdagrad,
    RowwiseAdam,
    Sgd,
    embedding_all_to_all,
    pooled_all_to_all,
)
from dlrm_fused.ops.embedding_all_to_all.tables import Optimizer
from dlrm_fused.sharding.distinct_bags import DistinctBags
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll
from dlrm_fused.symmetric import SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels

# Names of workspaces must be unique within a group and equal on its ranks, which make the same modules in the same order.
_workspace_numbers: weakref.WeakKeyDictionary[SymmetricGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class FusedLookups:
    """Lookup and delivery of some sharding types of a module, in one operator. Construction is collective.

    Args:
        shardings: numbers of the sharding types in the module, ascending.
        output_dtype: of the pooled embeddings. What has 16 bits is sent so, too.
        keyed: the features that keys of batches are for, see :class:`BatchKeys`; None if none are made.

    Attributes:
        order: of the output's features, with ``in_feature_order`` that before the module was sharded, if these are all sharding
            types. Empty for TorchRec's order, that of the sharding types.
    """

    def __init__(
        self,
        module: ShardedEmbeddingBagCollection,
        options: FusedOptions,
        group: SymmetricGroup,
        shardings: Sequence[int],
        output_dtype: torch.dtype,
        keyed: Sequence[tuple[str, int]] | None,
    ) -> None:
        self.shardings = tuple(shardings)
        self._lookups = [lookups(module)[i] for i in shardings]
        self._widths = [sum(embedding_shardings(module)[i].embedding_dims()) for i in shardings]
        self._uses_kernels = uses_kernels(group.device)
        self.order = _order(module, shardings) if options.in_feature_order else []
        self._workspace = EmbeddingWorkspace(
            group,
            _layout(module, shardings, group.world_size, self.order),
            name=f"{path(module)} ({next_number(group)})",
            output_dtype=output_dtype,
            forward_wire=_no_wider(options.forward_wire, output_dtype),
            backward_wire=_no_wider(options.backward_wire, output_dtype),
            timeout_seconds=options.timeout_seconds,
            check_indices=options.check_indices,
        )
        self._modules = [module for lookup in self._lookups for module in embedding_modules(lookup)]
        self._attached: list[tuple[object, ...]] | None = None
        if self._uses_kernels:
            self._attach_tables()
        self._check_indices = options.check_indices
        self._distinct: DistinctBags | None = None
        if keyed is not None and self._workspace.layout.row_dim is not None:
            self._distinct = DistinctBags(module, group, shardings, keyed)
        prepare = partial(_prepare, self._modules, options.check_indices)
        self._embedding_all_to_all = ReplayedEmbeddingAllToAll(self._workspace, prepare)

    def __call__(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> dict[int, Tensor]:
        """Pooled embeddings of the local batch, by the number of the first of neighbouring sharding types. Collective.

        Args:
            ctx: its ``own_keys``, if all ranks have them, are those of the local batch, by :class:`BatchKeys`.
        """
        features = [input[i] for i in self.shardings]
        batch_sizes = self._batch_sizes(ctx, features[0].stride())
        if self._uses_kernels:
            output = self._in_kernels(features, batch_sizes)
        else:
            output = self._on_host(features, batch_sizes, getattr(ctx, "own_keys", None))
        return self._split(output)

    def release(self) -> None:
        """Let go of the memory. Collective; as :meth:`~dlrm_fused.ops.common.workspace.Workspace.release`."""
        self._workspace.release()

    def _attach_tables(self) -> None:
        """Let the kernels see FBGEMM's tables and optimizers as they are now, as FBGEMM does in every forward pass."""
        lookups = [module.emb_module for module in self._modules]
        copied = [what_is_copied(lookup) for lookup in lookups]
        if copied != self._attached:
            self._workspace.attach_tables([local_tables(lookup) for lookup in lookups])
            self._attached = copied

    def _batch_sizes(self, ctx: EmbeddingBagCollectionContext, global_batch: int) -> list[int]:
        sizes = list(cast(Any, ctx.sharding_contexts[self.shardings[0]]).batch_size_per_rank)
        if not sizes:
            # After TrainPipelineSparseDist.attach they are missing; TorchRec then takes them for equal, too.
            world_size = self._workspace.world_size
            if global_batch % world_size:
                raise UsageError(
                    f"a batch of {global_batch} samples from {world_size} ranks without their sizes, which "
                    "TrainPipelineSparseDist.attach loses; give all ranks batches of one size, or do not attach in between"
                )
            sizes = [global_batch // world_size] * world_size
        return sizes

    def _on_host(self, features: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int], own_keys: Tensor | None) -> Tensor:
        pooled = [
            result
            for lookup, of_sharding in zip(self._lookups, features, strict=True)
            for result in pooled_by_module(lookup, of_sharding)
        ]
        distinct = None
        if self._distinct is not None and own_keys is not None:
            distinct = self._distinct.rows(own_keys, features, batch_sizes)
        return pooled_all_to_all(self._workspace, pooled, batch_sizes, distinct, self._gradient_scale())

    def _in_kernels(self, features: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> Tensor:
        with abort_peers_on_error(self._workspace.forward_channel):
            self._attach_tables()
        of_modules = [
            (lookup, of_lookup)
            for lookup, of_sharding in zip(self._lookups, features, strict=True)
            if embedding_modules(lookup)
            for of_lookup in split_features(lookup, of_sharding)
        ]
        indices, offsets = [of.values() for _, of in of_modules], [of.offsets() for _, of in of_modules]
        weights = [_weights(lookup, module, of) for (lookup, of), module in zip(of_modules, self._modules, strict=True)]
        if all(weight is None for weight in weights):
            return self._embedding_all_to_all(indices, offsets, batch_sizes, self._gradient_scale())
        inputs = [
            _kernel_inputs(*of_module, self._check_indices)
            for of_module in zip(self._modules, indices, offsets, weights, strict=True)
        ]
        own_indices, own_offsets, own_weights = zip(*inputs, strict=True)
        return embedding_all_to_all(self._workspace, own_indices, own_offsets, own_weights, batch_sizes, self._gradient_scale())

    def _gradient_scale(self) -> float:
        """Return the factor of gradients that TorchRec's own collective would have if it ran now."""
        return 1 / self._workspace.world_size if get_gradient_division() else 1.0

    def _split(self, output: Tensor) -> dict[int, Tensor]:
        runs: dict[int, int] = {}
        begin = previous = -2
        for sharding, width in zip(self.shardings, self._widths, strict=True):
            if sharding != previous + 1:
                begin = sharding
            runs[begin] = runs.get(begin, 0) + width
            previous = sharding
        return {begin: output} if len(runs) == 1 else dict(zip(runs, output.split(list(runs.values()), dim=1), strict=True))


def next_number(group: SymmetricGroup) -> int:
    """For the name of a workspace."""
    return next(_workspace_numbers.setdefault(group, itertools.count()))


def _no_wider(wire: torch.dtype, output: torch.dtype) -> torch.dtype:
    return output if wire.itemsize > output.itemsize else wire


def _order(module: ShardedEmbeddingBagCollection, shardings: Sequence[int]) -> list[str]:
    order, names = feature_order(module), [name for i in shardings for name in embedding_shardings(module)[i].embedding_names()]
    is_whole = len(shardings) == len(sharding_types(module)) and sorted(order) == sorted(names)
    return order if is_whole and not divides_after_output(module) else []


def _layout(
    module: ShardedEmbeddingBagCollection, shardings: Sequence[int], world_size: int, order: Sequence[str]
) -> ExchangeLayout:
    """Return where the lookups of all ranks put their features: in this order, or else that of the sharding types.

    Shards of columns lie side by side.
    """
    by_rank: list[list[LookupLayout]] = [[] for _ in range(world_size)]
    dims = {
        name: dim
        for i in shardings
        for name, dim in zip(
            embedding_shardings(module)[i].embedding_names(), embedding_shardings(module)[i].embedding_dims(), strict=True
        )
    }
    columns, begin = {}, 0
    for name in order or dims:
        columns[name] = begin
        begin += dims[name]
    for i in shardings:
        sharding = embedding_shardings(module)[i]
        for rank, groups in enumerate(grouped_configs_per_rank(sharding)):
            for group in groups:
                features = [
                    (columns[name] + table.local_metadata.shard_offsets[1], table.local_cols)
                    for table in group.embedding_tables
                    for name in table.embedding_names
                ]
                by_rank[rank].append(
                    LookupLayout(
                        columns=tuple(column for column, _ in features),
                        dims=tuple(dim for _, dim in features),
                        row_wise=sharding_types(module)[i] == ShardingType.ROW_WISE.value,
                    )
                )
    return ExchangeLayout(tuple(tuple(lookups) for lookups in by_rank), begin)


def local_tables(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> LocalTables:
    """FBGEMM's tables, in place."""
    stored = storage(tbe)
    return LocalTables(
        weights=stored.weights,
        offsets=stored.offsets,
        rows=stored.rows,
        dims=stored.dims,
        feature_tables=tuple(tbe.feature_table_map),
        mean=tbe.pooling_mode == PoolingMode.MEAN,
        optimizer=_optimizer(tbe, stored) if stored.is_trained else None,
        stochastic_rounding=tbe.optimizer_args.stochastic_rounding,
    )


def _optimizer(tbe: SplitTableBatchedEmbeddingBagsCodegen, stored: Storage) -> Optimizer:
    """FBGEMM's optimizer, with its states and its learning rate in place, and the numbers that it has now.

    Raises:
        UsageError: for a weight decay that was set after the tables were sharded, and that our kernels do not have.
    """
    rate, given = tbe.learning_rate_tensor, tbe.optimizer_args
    if tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD and given.weight_decay and given.weight_decay_mode:
        raise UsageError(
            f"weight_decay={given.weight_decay} of row-wise Adagrad, set after the tables were sharded: the fused kernels have "
            "none; set it in the sharder's fused_params, so that such tables take TorchRec's own path"
        )
    match tbe.optimizer:
        case EmbOptimType.EXACT_SGD:
            return Sgd(rate)
        case EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            return RowwiseAdagrad(stored.momentum1, rate, given.eps)
        case EmbOptimType.EXACT_ADAGRAD:
            return Adagrad(stored.momentum1, rate, given.eps)
        case EmbOptimType.ADAM | EmbOptimType.PARTIAL_ROWWISE_ADAM as kind:
            of_kind = Adam if kind == EmbOptimType.ADAM else RowwiseAdam
            states = stored.momentum1, stored.momentum2, stored.steps
            return of_kind(*states, rate, given.eps, given.beta1, given.beta2, given.weight_decay)
        case other:
            raise UsageError(f"optimizer={other}: dlrm_fused.sharding.support lets no such tables pass")


def _weights(lookup: Any, module: Any, features: KeyedJaggedTensor) -> Tensor | None:
    """The weights of samples that the lookup reads."""
    weights = features.weights_or_none()
    if weights is None or not weights.is_floating_point():
        return None  # TorchRec's lookups ignore whole numbers as well
    # Their gradients are averaged over ranks by whoever owns them: they must not be divided here.
    return undivided_gradient(lookup, weights) if module.config.is_weighted else weights


def _prepare(
    modules: Sequence[Any], check_indices: bool, indices: Sequence[Tensor], offsets: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Indices and offsets as FBGEMM hands them to its kernels."""
    inputs = [_kernel_inputs(*of_module, None, check_indices) for of_module in zip(modules, indices, offsets, strict=True)]
    return [own_indices for own_indices, _, _ in inputs], [own_offsets for _, own_offsets, _ in inputs]


def _kernel_inputs(
    module: Any, indices: Tensor, offsets: Tensor, weights: Tensor | None, check_indices: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and per-sample weights (empty if there are none).

    Args:
        check_indices: wrong indices are kept for our own check, where FBGEMM replaces them by 0.
    """
    indices, offsets, weights = kernel_inputs(module.emb_module, indices, offsets, weights, checks_bounds=not check_indices)
    return indices, offsets, indices.new_empty(0, dtype=torch.float32) if weights is None else weights
