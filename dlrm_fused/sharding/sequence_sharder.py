"""The sharder of sequences that users hand to TorchRec, and the sharded module that it makes of an EmbeddingCollection.

::

    sharders = [FusedEmbeddingCollectionSharder(), FusedEmbeddingBagCollectionSharder()]
    model = DistributedModelParallel(model, sharders=sharders)

TorchRec's plan, input dist, deduplication, lookups, state dict and fused optimizer stay as they are. Only the output dist is
another: rows go from the lookup straight into the output of the rank that asked for them, by
:mod:`dlrm_fused.ops.sequence_all_to_all`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
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
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
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
from dlrm_fused.ops.sequence_all_to_all import (
    Counts,
    SequenceWorkspace,
    numbers_of,
    sequence_all_to_all,
    sequence_lookup_all_to_all,
)
from dlrm_fused.sharding.exchange import next_number
from dlrm_fused.sharding.fbgemm_tables import FbgemmTables
from dlrm_fused.sharding.fused_input_dist import offsets_of
from dlrm_fused.sharding.module_support import ModuleSupport, check_options, tables_of_sequences
from dlrm_fused.sharding.options import FUSED, FusedOptions, chosen_wires, wire_for
from dlrm_fused.sharding.support import ADAMS, TableSettings, output_type, reason_against
from dlrm_fused.sharding.without_tables import receive_the_dtype_of_the_others
from dlrm_fused.symmetric import SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.peer_monitor import name_lost_peer

# The attribute of TorchRec's context that has the ExchangedCounts of its batch.
_COUNTS = "fused_counts"


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
        operations = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
        forward, backward, reason = chosen_wires(qcomm_codecs_registry, operations, forward_wire, backward_wire)
        self.options = FusedOptions(
            strict=strict,
            forward_wire=forward,
            backward_wire=backward,
            reason_against_wire=reason,
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

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send the ids of a batch to the ranks of their tables, and to all ranks how many they are. Collective."""
        awaitable = cast(KJTListSplitsAwaitable[Any], super().input_dist(ctx, features))
        for number, own in self._dists.items():
            if own.has_peers:
                asked = compat.ids_for_ranks(awaitable.awaitables[number])
                keep_counts(ctx.sharding_contexts[number], own.exchange_counts(asked))
        return awaitable

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

    @property
    def has_peers(self) -> bool:
        """Whether there is a rank to deliver to."""
        return self._workspace.world_size > 1

    def exchange_counts(self, asked: Sequence[int]) -> ExchangedCounts:
        """Tell all ranks how many ids this one asks each of them for, [ranks]. Collective."""
        return ExchangedCounts(asked, self._process_group, self._workspace.device)

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
        workspace, features, permutation = self._workspace, self._looked_up, context.unbucketize_permute_tensor
        self._looked_up = None
        if self.has_peers:
            divisor = float(workspace.world_size) if get_gradient_division() else 1.0
            exchanged = _kept_counts(context) or self.exchange_counts(context.input_splits)
            counts, sizes = exchanged.counts, _batch_sizes(context)
            places = None if permutation is None else _inverse(permutation)
            if features is None:
                offsets = _offsets(context, rows.device)
                return NoWait(sequence_all_to_all(workspace, rows, offsets, sizes, counts, divisor, places))
            ids, offsets = self._ids(features)
            return NoWait(sequence_lookup_all_to_all(workspace, ids, offsets, sizes, counts, divisor, places))
        return NoWait(rows if permutation is None else rows.index_select(0, permutation))

    def _ids(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return ids and offsets, as FBGEMM looks them up, of tables as they are now."""
        assert self.tables is not None
        with abort_peers_on_error(self._workspace.channel):
            self.tables.attach_to(self._workspace)
        if self._workspace.table is None:
            none = torch.zeros(1, dtype=torch.int64, device=self._workspace.device)
            return none[:0], none
        (ids,), (offsets,) = self.tables.inputs_without_weights([features.values()], [features.offsets()])
        return ids, offsets


class ExchangedCounts:
    """The ids that ranks ask each other for in one batch: their numbers travel with them, and are read before rows do."""

    def __init__(self, asked: Sequence[int], process_group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective.

        Args:
            asked: [ranks]: ids that this rank asks each one for.
        """
        ranks, rank = process_group.size(), process_group.rank()
        own = torch.tensor(asked, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        self._of_ranks, self._rank = own.new_empty(ranks, ranks), rank
        self._event: torch.cuda.Event | None = None
        # Gloo's own threads go on with it while this one does; on a GPU, the current stream waits.
        is_on_cpu = device.type == "cpu"
        self._work = dist.all_gather_into_tensor(self._of_ranks.view(-1), own, process_group, async_op=is_on_cpu)
        if not is_on_cpu:
            numbers = numbers_of(self._of_ranks, rank)
            on_host = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=True)
            self._numbers = on_host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @cached_property
    def counts(self) -> Counts:
        """The counts of this rank; the host waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            with name_lost_peer():
                self._work.wait()
            self._numbers = numbers_of(self._of_ranks, self._rank)
        return Counts.of(self._numbers.tolist())


def _columns(sharding: Any) -> int:
    """Return the columns of a sharding type's rows, which TorchRec wants to be equal in all tables."""
    return next(
        int(table.local_cols)
        for groups in compat.grouped_configs_per_rank(sharding)
        for group in groups
        for table in group.embedding_tables
    )


def keep_counts(context: SequenceShardingContext, exchanged: ExchangedCounts) -> None:
    """Keep the counts of a batch in its context, for the delivery of its rows."""
    context.__dict__[_COUNTS] = weakref.ref(context), exchanged


def _kept_counts(context: SequenceShardingContext) -> ExchangedCounts | None:
    """Return the counts of a batch; None if there are none, or if they are of the context that this one is a copy of, as
    TorchRec makes for a part of a batch (PECEmbeddingCollection)."""
    owner, exchanged = context.__dict__.get(_COUNTS, (lambda: None, None))
    return exchanged if owner() is context else None


def _batch_sizes(context: SequenceShardingContext) -> list[int]:
    """Return the samples of each rank."""
    lengths, ranks = context.lengths_after_input_dist, len(context.output_splits)
    # After TrainPipelineSparseDist.attach sizes are missing; TorchRec then takes them for equal, too.
    return list(context.batch_size_per_rank) or [0 if lengths is None else lengths.shape[1] // ranks] * ranks


def _inverse(permutation: Tensor) -> Tensor:
    """Return int64 [n]: where each of n numbers is in a permutation of them."""
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(numbers).scatter_(0, permutation.long(), numbers)


def _offsets(context: SequenceShardingContext, device: torch.device) -> Tensor:
    """Return where the ids of each sample begin, feature by feature, and the end."""
    if context.lengths_after_input_dist is None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return offsets_of(context.lengths_after_input_dist.flatten())


def _kernels_read(sharding: Any, tables: Sequence[TableSettings]) -> bool:
    """Return whether our kernels can look up and update the tables of a sharding type, on every rank."""
    are_known = all(reason_against(table, uses_kernels=True) is None for table in tables)
    # FBGEMM counts the steps of Adam by itself.
    counts_steps = any(table.fused_params.get("optimizer") in ADAMS for table in tables)
    return are_known and not counts_steps and all(len(groups) <= 1 for groups in compat.grouped_configs_per_rank(sharding))
