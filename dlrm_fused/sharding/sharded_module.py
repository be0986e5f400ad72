"""TorchRec's sharded EmbeddingBagCollection, with the lookup and the All-to-All of pooled embeddings in one operator.

A module has one path at a time (:mod:`~dlrm_fused.sharding.paths`). A fused one looks up and delivers all table-, column- and
row-wise tables together. Tables and batches that this does not cover
(:mod:`~dlrm_fused.sharding.support`) take TorchRec's own path, in the same module and step.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.auto_choice import BothWays
from dlrm_fused.compat import torchrec as compat
from dlrm_fused.compat.fbgemm import read_steps_anew
from dlrm_fused.errors import UsageError
from dlrm_fused.sharding.distinct_bags import BatchKeys, finds_distinct_rows
from dlrm_fused.sharding.exchange import BatchContext
from dlrm_fused.sharding.fused_input_dist import FusedInputDist, covers
from dlrm_fused.sharding.module_support import ModuleSupport, check_options, tables_of_bags
from dlrm_fused.sharding.options import AUTO, FUSED, FusedOptions
from dlrm_fused.sharding.paths import FusedSettings, MeasuringPath, Path, TorchRecPath, Turns, fused_path
from dlrm_fused.sharding.support import output_type
from dlrm_fused.sharding.without_tables import check_that_ranks_have_rows, receive_the_dtype_of_the_others
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.peer_monitor import name_lost_peer


class FusedShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """The sharded module that :class:`FusedEmbeddingBagCollectionSharder` makes of an EmbeddingBagCollection.

    Attributes:
        reasons: by table, why it runs on TorchRec's path; None for the others.
    """

    def __init__(self, *args: Any, options: FusedOptions, turns: Turns, **kwargs: Any) -> None:
        """Arguments but the options and the turns of ``mode="auto"`` as in TorchRec. Collective.

        Raises:
            UsageError: on all ranks, as :meth:`FusedEmbeddingBagCollectionSharder.shard`.
        """
        super().__init__(*args, **kwargs)
        self.options, self._turns = options, turns
        order = compat.feature_order(self)
        self._repeated = next((name for name in order if order.count(name) > 1), None)
        if options.in_feature_order and self._repeated is not None:
            raise UsageError(
                f"{compat.path(self)}: in_feature_order=True, but a table reads {self._repeated} twice; give a table each of "
                "its features once"
            )
        self._order = order if options.in_feature_order else []
        self._features_read = {
            name
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
            for name in info.embedding_config.feature_names
        }
        self._set_up_paths()

    def _set_up_paths(self) -> None:
        """Decide which tables take the fused path, say so, and prepare it. Collective."""
        self._measured: dict[str, BothWays] = {}  # by sharding type, with mode="auto": seconds of a step
        self._against_caller: str | None = None  # why its last call could not be fused
        self._path: Path = TorchRecPath()
        self._input_dist: FusedInputDist | None = None
        self._has_features_of_input_dist = covers(self)
        check_options(self, self.options, "FusedEmbeddingBagCollectionSharder")
        tables = tables_of_bags(self)
        receive_the_dtype_of_the_others(self, tables)
        check_that_ranks_have_rows(self)
        self._support = ModuleSupport(
            self,
            self.options,
            tables,
            by_kernels=uses_kernels(compat.device(self)),
            against_module=None if self._repeated is None else f"a table reads {self._repeated} twice",
        )
        self.reasons, self._group = self._support.reasons, self._support.group
        finds_distinct = self._group is not None and finds_distinct_rows(self._group)
        self._batch_keys = BatchKeys(self) if finds_distinct else None
        self._path = self._choose_path()

    def _choose_path(self) -> Path:
        """Collective."""
        covered = [i for i, kind in enumerate(compat.sharding_types(self)) if self._support.covers(kind)]
        if not covered or self._group is None:
            return TorchRecPath()
        infos = next(iter(self.sharding_type_to_sharding_infos.values()))
        output_dtype = output_type(infos[0].fused_params or {})
        assert output_dtype is not None
        keyed = None if self._batch_keys is None else self._batch_keys.features
        settings = FusedSettings(self.options, self._group, output_dtype, keyed)
        if self.options.mode == AUTO:
            return MeasuringPath(settings, covered, self._turns)
        return fused_path(self, settings, covered)

    @property
    def _fuses_input_dist(self) -> bool:
        """Whether the features of later batches go to their ranks without the host."""
        is_whole = bool(self._path.shardings) and len(self._path.shardings) == len(compat.sharding_types(self))
        has_kernels = self._group is not None and uses_kernels(self._group.device)
        return is_whole and has_kernels and self._has_features_of_input_dist

    @property
    def paths(self) -> dict[str, str]:
        """The path of each table: ``fused``, ``torchrec: <why>``, or ``auto`` before it is measured.

        After a measurement the faster path has both times, of a step: ``fused: 1.711 ms, TorchRec 1.788 ms``.
        """
        return {
            info.embedding_config.name: self._path_of(kind, self.reasons[info.embedding_config.name])
            for kind, infos in self.sharding_type_to_sharding_infos.items()
            for info in infos
        }

    def _path_of(self, kind: str, reason: str | None) -> str:
        if reason or self._against_caller:
            return f"torchrec: {reason or self._against_caller}"
        if isinstance(self._path, MeasuringPath):
            return AUTO
        both = self._measured.get(kind)
        if both is None:
            return FUSED
        fused, torchrec = f"{both.fused * 1e3:.3f} ms", f"{both.unfused * 1e3:.3f} ms"
        return f"fused: {fused}, TorchRec {torchrec}" if both.fused_is_faster else f"torchrec: {torchrec}, fused {fused}"

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[KeyedTensor]:
        """Look up the pooled embeddings of a batch. Collective.

        Raises:
            UsageError, CommunicationError: as :meth:`input_dist` and :meth:`compute_and_output_dist`.
        """
        # TorchRec's own collectives name no rank.
        with name_lost_peer():
            return cast(LazyAwaitable[KeyedTensor], super().forward(*input, **kwargs))

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return the context of a batch, with room for the state of our own."""
        return BatchContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send the features to the ranks of their tables. Collective.

        Raises:
            UsageError: if the features of some table are missing.
        """
        keys = cast(list[str], list(features.keys()))
        missing = self._features_read.difference(keys)
        if missing:
            raise UsageError(
                f"{compat.path(self)}: the batch has no feature {', '.join(sorted(missing))}; it has {', '.join(keys)}"
            )
        if not isinstance(features, KeyedJaggedTensor):  # a TensorDict
            return cast(Awaitable[Awaitable[KJTList]], super().input_dist(ctx, features))
        if self._batch_keys is not None and self._path.reads_keys and isinstance(ctx, BatchContext):
            ctx.own_keys = self._batch_keys.of(features)
        is_fused = self._fuses_input_dist
        if is_fused and self._input_dist is not None and self._input_dist.takes(features):
            return self._input_dist(ctx, features)
        sent = cast(Awaitable[Awaitable[KJTList]], super().input_dist(ctx, features))
        if is_fused and self._input_dist is None:
            assert self._group is not None
            self._input_dist = FusedInputDist(self, self._group, features, self.options.timeout_seconds)
        return sent

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver the pooled embeddings of a batch whose features have been distributed. Collective.

        Raises:
            UsageError: with ``strict``, if this batch is not covered.
            CommunicationError: if a peer is lost, or was waited for too long.
        """
        output = self._path_of_batch(ctx, input).deliver(self, ctx, input)
        if self._order:
            compat.put_in_order(output, self._order)
        return output

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Look up a batch on TorchRec's path, for a caller that delivers it by :meth:`output_dist`.

        TorchRec's sharder of managed collisions calls the two, and other callers may change embeddings in between.

        Raises:
            UsageError: with ``strict``.
        """
        if self._path.shardings or isinstance(self._path, MeasuringPath):
            self._against_caller = "a lookup by compute() and a delivery by output_dist()"
            self._leave_to_torchrec(self._against_caller)
        return cast(list[Tensor], super().compute(ctx, dist_input))

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Deliver what :meth:`compute` has looked up. Collective."""
        delivered = cast(LazyAwaitable[KeyedTensor], super().output_dist(ctx, output))
        if self._order:
            compat.put_in_order(delivered, self._order)
        return delivered

    def _path_of_batch(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> Path:
        """Return the module's path, or TorchRec's for a batch that fused communication does not cover.

        Training batches that are covered decide what ``mode="auto"`` has left open. Collective.
        """
        reason = self._reason_against_batch(ctx)
        if reason is None:
            self._against_caller = None
            if isinstance(self._path, MeasuringPath) and self.training and torch.is_grad_enabled():
                self._continue_measurement(self._path)
            return self._path
        if self._path.shardings:
            self._leave_to_torchrec(reason)
        return TorchRecPath()

    def _leave_to_torchrec(self, reason: str) -> None:
        """Say once why batches take TorchRec's path; raises UsageError with ``strict``."""
        if self.options.strict:
            raise UsageError(
                f"strict fused communication (strict=True, comm_strict=true) does not cover {reason}; let such batches run "
                "on TorchRec's own path with strict=False, comm_strict=false"
            )
        self._support.log_once(
            logging.WARNING, f"batches with {reason} run on TorchRec's own path, without fused communication"
        )
        read_steps_anew(compat.fbgemm_lookups(self))

    def _continue_measurement(self, measuring: MeasuringPath) -> None:
        """Begin a training batch of a measurement, which may be at its end. Collective."""
        self._path, self._measured = measuring.next_batch(self), measuring.measured
        # The last turn was TorchRec's: nothing is on its way.
        if self._path is not measuring and self._input_dist is not None and not self._fuses_input_dist:
            self._input_dist.release()
            self._input_dist = None

    def _reason_against_batch(self, ctx: EmbeddingBagCollectionContext) -> str | None:
        if ctx.variable_batch_per_feature:
            return "a batch size of its own for each feature"
        if self.post_lookup_tracker_fn is not None or self.post_odist_tracker_fn is not None:
            return "a tracker of lookups or outputs"
        if any(getattr(lookup, "optim_state_tracker_fn", None) is not None for lookup in compat.lookups(self)):
            return "a tracker of optimizer states"
        if MemoryStashingManager.is_enabled():
            return "memory stashing"
        return None

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Move tables to other ranks, as DistributedModelParallel.reshard asks for. Collective.

        Outputs of before stay what they are, but gradients do not go back through them any more.
        """
        self._path.release()
        if self._input_dist is not None:
            self._input_dist.release()
        self._path, self._input_dist = TorchRecPath(), None  # the old ones keep the present tables alive
        super().update_shards(*args, **kwargs)
        self._turns = Turns()  # at once, beside other modules that still have theirs
        self._set_up_paths()
