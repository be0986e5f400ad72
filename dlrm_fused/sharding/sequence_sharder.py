"""The sharder of sequences that users hand to TorchRec, and the sharded module that it makes of an EmbeddingCollection.

::

    sharders = [FusedEmbeddingCollectionSharder(), FusedEmbeddingBagCollectionSharder()]
    model = DistributedModelParallel(model, sharders=sharders)

TorchRec's plan, input dist, deduplication, lookups, state dict and fused optimizer stay as they are. Only the output dist is
another: rows go from the lookup straight into the output of the rank that asked for them, by
:mod:`dlrm_fused.ops.sequence_all_to_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    CommOp,
    LazyAwaitable,
    NoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_all_to_all, sequence_lookup_all_to_all
from dlrm_fused.sharding.exchange import next_number
from dlrm_fused.sharding.fbgemm_tables import FbgemmTables
from dlrm_fused.sharding.module_support import ModuleSupport, check_options, tables_of_sequences
from dlrm_fused.sharding.options import FUSED, FusedOptions, wire_for
from dlrm_fused.sharding.support import ADAMS, TableSettings, output_type, reason_against
from dlrm_fused.sharding.without_tables import receive_the_dtype_of_the_others
from dlrm_fused.symmetric import SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.peer_monitor import name_lost_peer


class FusedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, whose rows and gradients go straight to their places in other ranks' memory.

    Give one sharder to both the planner and DistributedModelParallel.

    Args:
        fused_params, qcomm_codecs_registry, use_index_dedup: as in TorchRec.
        strict, forward_wire, backward_wire, timeout_seconds: as of
            :class:`~dlrm_fused.sharding.sharder.FusedEmbeddingBagCollectionSharder`.

    Raises:
        UsageError: for a wrong argument.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        strict: bool = False,
        forward_wire: torch.dtype | None = None,
        backward_wire: torch.dtype | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        self._with_index_dedup = use_index_dedup
        self.options = FusedOptions.of(
            qcomm_codecs_registry,
            (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,),
            strict=strict,
            forward_wire=forward_wire,
            backward_wire=backward_wire,
            timeout_seconds=timeout_seconds,
        )

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedEmbeddingCollection:
        """Called by DistributedModelParallel. Collective.

        Raises:
            UsageError: on all ranks, with ``strict`` if fused communication does not cover all of the module.
        """
        return FusedShardedEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._with_index_dedup,
            module_fqn=module_fqn,
            options=self.options,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        return FusedShardedEmbeddingCollection


class FusedShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """The sharded module that :class:`FusedEmbeddingCollectionSharder` makes of an EmbeddingCollection.

    Attributes:
        reasons: by table, why TorchRec delivers its rows; None for the others.
    """

    def __init__(self, *args: Any, options: FusedOptions, **kwargs: Any) -> None:
        """Arguments but the options as in TorchRec. Collective.

        Raises:
            UsageError: on all ranks, as :meth:`FusedEmbeddingCollectionSharder.shard`.
        """
        super().__init__(*args, **kwargs)
        check_options(self, options, "FusedEmbeddingCollectionSharder")
        tables = tables_of_sequences(self)
        receive_the_dtype_of_the_others(self, tables)
        support = ModuleSupport(self, options, tables, by_kernels=False)
        self.reasons = support.reasons
        self._dists: dict[int, FusedSequenceDist] = {}
        for number, (kind, sharding) in enumerate(
            zip(compat.sharding_types(self), compat.sequence_shardings(self), strict=True)
        ):
            if support.group is not None and support.covers(kind):
                self._dists[number] = self._new_dist(support.group, options, number, sharding, tables[kind])
                compat.set_output_dist(self, number, self._dists[number])

    def _new_dist(
        self, group: SymmetricGroup, options: FusedOptions, number: int, sharding: Any, tables: Sequence[TableSettings]
    ) -> FusedSequenceDist:
        """Collective."""
        output_dtype = output_type(tables[0].fused_params)
        assert output_dtype is not None
        workspace = SequenceWorkspace(
            group,
            _columns(sharding),
            name=f"{compat.path(self)} ({next_number(group)})",
            output_dtype=output_dtype,
            forward_wire=wire_for(options.forward_wire, output_dtype, group.world_size),
            backward_wire=wire_for(options.backward_wire, output_dtype, group.world_size),
            timeout_seconds=options.timeout_seconds,
        )
        process_group = cast(dist.ProcessGroup, compat.environment(self).process_group)
        modules = compat.embedding_modules(compat.lookups(self)[number])
        can_look_up = uses_kernels(group.device) and group.world_size > 1 and _kernels_read(sharding, tables)
        of_kernels = FbgemmTables([own.emb_module for own in modules], checks_bounds=True) if can_look_up else None
        return FusedSequenceDist(workspace, process_group, of_kernels)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and deliver the rows of a batch whose features have been distributed. Collective.

        Raises:
            CommunicationError: if a peer is lost, or was waited for too long.
        """
        # Who watches lookups, or moves their tables, needs TorchRec's.
        is_watched = self.post_lookup_tracker_fn is not None or MemoryStashingManager.is_enabled()
        is_watched |= any(getattr(lookup, "optim_state_tracker_fn", None) is not None for lookup in compat.lookups(self))
        by_kernels = {} if is_watched else {i: own.look_up for i, own in self._dists.items() if own.tables is not None}
        with compat.lookups_replaced(self, by_kernels):
            return cast(LazyAwaitable[dict[str, JaggedTensor]], super().compute_and_output_dist(ctx, input))

    @property
    def paths(self) -> dict[str, str]:
        """The way of each table's rows: ``fused`` or ``torchrec: <why>``."""
        return {name: FUSED if reason is None else f"torchrec: {reason}" for name, reason in self.reasons.items()}

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up a batch. Collective.

        Raises:
            CommunicationError: if a peer is lost, or was waited for too long.
        """
        # TorchRec's own collectives name no rank.
        with name_lost_peer():
            return cast(LazyAwaitable[dict[str, JaggedTensor]], super().forward(*input, **kwargs))


class FusedSequenceDist(nn.Module):
    """The output dist of a sharding type, in place of TorchRec's.

    Args:
        tables: those that kernels look up and update, of which :meth:`look_up` replaces TorchRec's lookup; None: FBGEMM does.
    """

    def __init__(
        self, workspace: SequenceWorkspace, process_group: dist.ProcessGroup, tables: FbgemmTables | None = None
    ) -> None:
        super().__init__()
        self._workspace, self._process_group, self.tables = workspace, process_group, tables
        self._looked_up: KeyedJaggedTensor | None = None
        # On a GPU the host waits for the counts, but not for what the model computes meanwhile.
        self._stream = torch.cuda.Stream(workspace.device) if workspace.device.type == "cuda" else None

    def look_up(self, features: KeyedJaggedTensor) -> Tensor:
        """Have kernels look these ids up when they are delivered, in the call that follows; return no rows, [0, columns]."""
        self._looked_up = features
        return torch.empty(0, self._workspace.width, device=self._workspace.device)

    def forward(self, rows: Tensor, context: SequenceShardingContext) -> Awaitable[Tensor]:
        """Deliver rows to the ranks that asked for them, and return those that this one asked for. Collective.

        Args:
            rows: [n, columns], of the ids of all ranks, feature by feature and of each rank by rank; those of
                :meth:`look_up`, if that has been called.
            context: of the batch, after its input dist.

        Returns:
            [ids that this rank asked for, columns], in the order that they had here before the input dist.
        """
        workspace, features = self._workspace, self._looked_up
        self._looked_up = None
        if workspace.world_size > 1:
            divisor = float(workspace.world_size) if get_gradient_division() else 1.0
            order, counts = _order(context, rows.device), self._counts(context)
            if features is None:
                rows = sequence_all_to_all(workspace, rows, order, counts, divisor)
            else:
                rows = sequence_lookup_all_to_all(workspace, self._indices(features), order, counts, divisor)
        permutation = context.unbucketize_permute_tensor
        return NoWait(rows if permutation is None else rows.index_select(0, permutation))

    def _indices(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the rows of the ids, int64 [n], counted on over all tables, of tables as they are now."""
        assert self.tables is not None
        with abort_peers_on_error(self._workspace.channel):
            self.tables.attach_to(self._workspace)
        if self._workspace.table is None:
            return torch.empty(0, dtype=torch.int64, device=self._workspace.device)
        (ids,), (offsets,) = self.tables.inputs_without_weights([features.values()], [features.offsets()])
        of_features = offsets[:: max(1, features.stride())].diff()
        first_rows = torch.repeat_interleave(self._workspace.feature_first_rows, of_features, output_size=len(ids))
        return first_rows + ids

    def _counts(self, context: SequenceShardingContext) -> list[list[int]]:
        """Return how many ids each rank asks each other one for. Collective."""
        ranks = self._workspace.world_size
        with torch.cuda.stream(self._stream):
            own = torch.tensor(context.input_splits, device=self._workspace.device)
            of_ranks = own.new_empty(ranks * ranks)
            dist.all_gather_into_tensor(of_ranks, own, self._process_group)
            return cast(list[list[int]], of_ranks.view(ranks, ranks).tolist())


def _columns(sharding: Any) -> int:
    """Return the columns of a sharding type's rows, which TorchRec wants to be equal in all tables."""
    return next(
        int(table.local_cols)
        for groups in compat.grouped_configs_per_rank(sharding)
        for group in groups
        for table in group.embedding_tables
    )


def _order(context: SequenceShardingContext, device: torch.device) -> Tensor:
    """Return the numbers of a rank's rows, which lie feature by feature, by the rank that asked for them."""
    lengths, ranks, count = context.lengths_after_input_dist, len(context.output_splits), sum(context.output_splits)
    if not count or lengths is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    # After TrainPipelineSparseDist.attach sizes are missing; TorchRec then takes them for equal, too.
    sizes = list(context.batch_size_per_rank) or [lengths.shape[1] // ranks] * ranks
    of_parts = torch.stack([part.sum(dim=1) for part in lengths.long().split(sizes, dim=1)], dim=1)  # [features, ranks]
    begins = (of_parts.flatten().cumsum(0) - of_parts.flatten()).view_as(of_parts)
    by_rank = of_parts.T.flatten()
    shifts = begins.T.flatten() - (by_rank.cumsum(0) - by_rank)
    return torch.repeat_interleave(shifts, by_rank, output_size=count) + torch.arange(count, device=device)


def _kernels_read(sharding: Any, tables: Sequence[TableSettings]) -> bool:
    """Return whether our kernels can look up and update the tables of a sharding type, on every rank."""
    are_known = all(reason_against(table, uses_kernels=True) is None for table in tables)
    # FBGEMM counts the steps of Adam by itself.
    counts_steps = any(table.fused_params.get("optimizer") in ADAMS for table in tables)
    return are_known and not counts_steps and all(len(groups) <= 1 for groups in compat.grouped_configs_per_rank(sharding))
