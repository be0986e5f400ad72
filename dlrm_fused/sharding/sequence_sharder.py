"""The sharder of sequences that users hand to TorchRec, and the sharded module that it makes of an EmbeddingCollection.

::

    sharders = [FusedEmbeddingCollectionSharder(), FusedEmbeddingBagCollectionSharder()]
    model = DistributedModelParallel(model, sharders=sharders)

TorchRec's plan, input dist, deduplication, lookups, state dict and fused optimizer stay as they are. Only the output dist is
another: rows go from the lookup straight into the output of the rank that asked for them, by
:mod:`dlrm_fused.ops.sequence_all_to_all`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
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
from torchrec.sparse.jagged_tensor import JaggedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_all_to_all
from dlrm_fused.sharding.exchange import next_number
from dlrm_fused.sharding.module_support import ModuleSupport, check_options, tables_of_sequences
from dlrm_fused.sharding.options import FUSED, FusedOptions, wire_for
from dlrm_fused.sharding.support import output_type
from dlrm_fused.sharding.without_tables import receive_the_dtype_of_the_others
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
        for number, (kind, sharding) in enumerate(
            zip(compat.sharding_types(self), compat.sequence_shardings(self), strict=True)
        ):
            if support.group is not None and support.covers(kind):
                output_dtype = output_type(tables[kind][0].fused_params)
                assert output_dtype is not None
                workspace = SequenceWorkspace(
                    support.group,
                    _columns(sharding),
                    name=f"{compat.path(self)} ({next_number(support.group)})",
                    output_dtype=output_dtype,
                    forward_wire=wire_for(options.forward_wire, output_dtype, support.group.world_size),
                    backward_wire=wire_for(options.backward_wire, output_dtype, support.group.world_size),
                    timeout_seconds=options.timeout_seconds,
                )
                process_group = cast(dist.ProcessGroup, compat.environment(self).process_group)
                compat.set_output_dist(self, number, FusedSequenceDist(workspace, process_group))

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
    """The output dist of a sharding type, in place of TorchRec's."""

    def __init__(self, workspace: SequenceWorkspace, process_group: dist.ProcessGroup) -> None:
        super().__init__()
        self._workspace, self._process_group = workspace, process_group
        # On a GPU the host waits for the counts, but not for what the model computes meanwhile.
        self._stream = torch.cuda.Stream(workspace.device) if workspace.device.type == "cuda" else None

    def forward(self, rows: Tensor, context: SequenceShardingContext) -> Awaitable[Tensor]:
        """Deliver rows to the ranks that asked for them, and return those that this one asked for. Collective.

        Args:
            rows: [n, columns], of the ids of all ranks, feature by feature and of each rank by rank.
            context: of the batch, after its input dist.

        Returns:
            [ids that this rank asked for, columns], in the order that they had here before the input dist.
        """
        workspace = self._workspace
        if workspace.world_size > 1:
            divisor = float(workspace.world_size) if get_gradient_division() else 1.0
            rows = sequence_all_to_all(workspace, rows, _order(context, rows.device), self._counts(context), divisor)
        permutation = context.unbucketize_permute_tensor
        return NoWait(rows if permutation is None else rows.index_select(0, permutation))

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
