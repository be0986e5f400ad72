"""FBGEMM's tables and optimizers, for our kernels, which read and update them in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from dlrm_fused.compat.fbgemm import Storage, kernel_inputs, storage, what_is_copied
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all import Adagrad, Adam, EmbeddingWorkspace, LocalTables, RowwiseAdagrad, RowwiseAdam, Sgd
from dlrm_fused.ops.embedding_all_to_all.tables import Optimizer
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace


class FbgemmTables:
    """The tables that this rank's lookups read.

    Args:
        lookups: FBGEMM's, in the order of the workspace's.
        checks_bounds: FBGEMM replaces wrong indices by 0, as each lookup's ``bounds_check_mode`` says; false keeps them for
            the workspace's own check.
    """

    def __init__(self, lookups: Sequence[SplitTableBatchedEmbeddingBagsCodegen], *, checks_bounds: bool) -> None:
        self._lookups = lookups
        self._checks_bounds = checks_bounds
        self._attached: list[tuple[object, ...]] | None = None

    def attach_to(self, workspace: EmbeddingWorkspace | SequenceWorkspace) -> None:
        """Let the workspace's kernels see the tables as they are now, as FBGEMM does in every forward pass."""
        copied = [what_is_copied(lookup) for lookup in self._lookups]
        if copied != self._attached:
            workspace.attach_tables([local_tables(lookup) for lookup in self._lookups])
            self._attached = copied

    def inputs(
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return indices, offsets and weights of samples as FBGEMM hands them to its kernels.

        A lookup without weights has [0] of them; if no lookup has weights, their list is empty.
        """
        found = [
            kernel_inputs(*of_lookup, checks_bounds=self._checks_bounds)
            for of_lookup in zip(self._lookups, indices, offsets, weights, strict=True)
        ]
        given = (
            []
            if all(own is None for own in weights)
            else [own_indices.new_empty(0, dtype=torch.float32) if own is None else own for own_indices, _, own in found]
        )
        return [own for own, _, _ in found], [own for _, own, _ in found], given

    def inputs_without_weights(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return indices and offsets as FBGEMM hands them to its kernels; waits for nothing, and may be captured."""
        return self.inputs(indices, offsets, [None] * len(self._lookups))[:2]


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
    """FBGEMM's optimizer, with its states and its learning rate in place, and the numbers that it has now."""
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
