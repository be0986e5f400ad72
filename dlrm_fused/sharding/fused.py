"""TorchRec's EmbeddingBagCollection with the lookup and the All-to-All of pooled embeddings in one operator.

::

    model = DistributedModelParallel(model, sharders=[FusedEmbeddingBagCollectionSharder()])

TorchRec's plan, input dist, lookups, state dict and fused optimizer stay as they are: only what happens between the lookup and
the output changes. Every table-, column- and row-wise table of a module takes part in one exchange, which writes the output
[local batch, columns] in the order of the module's keys, so that nothing is permuted or concatenated afterwards. What this does
not cover (:mod:`dlrm_fused.sharding.support`) runs on TorchRec's own path, beside it.

This file holds all uses of TorchRec's and FBGEMM's private names; it runs with torchrec 1.6 to 1.8.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_lookup import CommOpGradientScaling
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _apply_mean_pooling,
)
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.types import (
    Awaitable,
    CommOp,
    LazyAwaitable,
    NoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.common.auto_choice import fused_is_faster
from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all.pooled import pooled_all_to_all
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables, RowwiseAdagrad, Sgd
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.sharding.support import TableSettings, by_table, reason_against_wire
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.symmetric.device import uses_kernels

logger = logging.getLogger("dlrm_fused")

Mode = Literal["fused", "auto"]
FUSED: Final = "fused"
AUTO: Final = "auto"

# Names of exchanges must be unique within a group and equal on its ranks, which make the same modules in the same order.
_exchange_numbers: weakref.WeakKeyDictionary[SymmetricGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class FusedOptions:
    """What :class:`FusedEmbeddingBagCollectionSharder` tells the modules that it shards; its arguments of these names."""

    mode: Mode
    strict: bool
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    reason_against_wire: str | None
    timeout_seconds: float
    check_indices: bool


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with fused lookup and communication where the plan allows it.

    The same sharder goes to the planner and to DistributedModelParallel. All ranks must lie on one host and reach each
    other's memory; otherwise everything runs on TorchRec's path.

    Args:
        fused_params: as in TorchRec: arguments of FBGEMM's lookup, such as the optimizer.
        qcomm_codecs_registry: as in TorchRec. Decides the number formats on the wire unless they are given.
        sharded_module_order_overwrite: as in TorchRec.
        mode: ``fused``, or ``auto``: for each sharding type of a module the faster of fused and TorchRec's path, measured
            forward on the first training batch.
        strict: refuse what the fused path does not cover, instead of running it on TorchRec's.
        forward_wire: float32, bfloat16 or float16: in which pooled embeddings travel. The output is float32.
        backward_wire: the same for their gradients.
        timeout_seconds: how long a rank waits for another one.
        check_indices: compare every index with its table's rows before the lookup; slow, for debugging. GPUs only.

    Raises:
        UsageError: for a wrong argument.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
        *,
        mode: Mode = FUSED,
        strict: bool = False,
        forward_wire: torch.dtype | None = None,
        backward_wire: torch.dtype | None = None,
        timeout_seconds: float = 600.0,
        check_indices: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        if mode not in (FUSED, AUTO):
            raise UsageError(f"mode={mode!r}: allowed: {FUSED!r}, {AUTO!r}")
        if not timeout_seconds > 0:
            raise UsageError(f"timeout_seconds={timeout_seconds}: allowed: a positive number")
        for key, dtype in (("forward_wire", forward_wire), ("backward_wire", backward_wire)):
            if dtype is not None and reason_against_wire(key, dtype):
                raise UsageError(f"{key}={dtype}: allowed: torch.float32, torch.bfloat16, torch.float16")
        codec_forward, codec_backward, reason = _wires_of_codecs(qcomm_codecs_registry)
        self.options = FusedOptions(
            mode=mode,
            strict=strict,
            forward_wire=forward_wire or codec_forward,
            backward_wire=backward_wire or codec_backward,
            reason_against_wire=reason if forward_wire is None or backward_wire is None else None,
            timeout_seconds=timeout_seconds,
            check_indices=check_indices,
        )

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedEmbeddingBagCollection:
        """Called by DistributedModelParallel. Collective.

        Raises:
            UsageError: with ``strict``, on all ranks, if the fused path does not cover all of the module.
        """
        return FusedShardedEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
            options=self.options,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        return FusedShardedEmbeddingBagCollection


def _wires_of_codecs(registry: Mapping[str, QuantizedCommCodecs] | None) -> tuple[torch.dtype, torch.dtype, str | None]:
    """Number formats of TorchRec's quantized communication, forward and backward, and why they are not covered."""
    wires = {"forward": torch.float32, "backward": torch.float32}
    for operation in (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER):
        codecs = (registry or {}).get(operation.name)
        for direction in wires:
            codec = getattr(codecs, direction, None)
            dtype = getattr(codec, "quantized_dtype", torch.float32)
            dtype = dtype() if callable(dtype) else dtype  # a method in TorchRec's codec that does nothing
            if operation is CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL:
                wires[direction] = dtype
            reason = reason_against_wire(f"{direction}_wire", dtype)
            if dtype != wires[direction]:
                reason = f"{direction} communication in {wires[direction]} for All-to-All, but {dtype} for ReduceScatter"
            if getattr(codec, "_loss_scale", None) is not None:
                reason = f"{direction} communication with a loss scale"
            if reason:
                return torch.float32, torch.float32, reason
    return wires["forward"], wires["backward"], None


class FusedShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """What :class:`FusedEmbeddingBagCollectionSharder` makes of an EmbeddingBagCollection.

    Attributes:
        reasons: by table, why it runs on TorchRec's path; None for the others.
    """

    def __init__(self, *args: Any, options: FusedOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options
        self._features_read = {
            name
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
            for name in info.embedding_config.feature_names
        }
        self._set_up_paths()

    def _set_up_paths(self) -> None:
        """Decide which tables take the fused path, say so, and prepare it. Collective."""
        self._said: set[str] = set()
        self._undecided = False
        self._fused: FusedLookups | None = None
        self._check_options()
        self.reasons, self._group = self._coverage()
        self._announce_coverage()
        covered = [i for i, kind in enumerate(self._sharding_types) if self._is_covered(kind)]
        if covered and self._group is not None:
            if self.options.mode == AUTO:
                self._undecided = True
            else:
                self._fused = FusedLookups(self, self._group, covered)

    def _check_options(self) -> None:
        """Ranks with other options would make other collective calls, and wait for each other."""
        group = self._env.process_group
        if group is None or dist.get_backend(group) == "fake":
            return
        options = gather_or_raise(lambda: self.options, group, self._device)
        first = asdict(options[0])
        for rank, other in enumerate(options):
            for key, value in asdict(other).items():
                if value != first[key]:
                    raise UsageError(
                        f"FusedEmbeddingBagCollectionSharder: {key} differs between ranks: {first[key]} on rank 0, {value} on "
                        f"rank {rank}; all ranks must give the same"
                    )

    @property
    def paths(self) -> dict[str, str]:
        """By table: ``fused``, ``auto`` before it is measured, or ``torchrec: <why>``."""
        taken = set() if self._fused is None else {self._sharding_types[i] for i in self._fused.shardings}
        paths = {}
        for kind, infos in self.sharding_type_to_sharding_infos.items():
            for name in [info.embedding_config.name for info in infos]:
                covered = AUTO if self._undecided else FUSED if kind in taken else "torchrec: measured faster"
                reason = self.reasons[name]
                paths[name] = f"torchrec: {reason}" if reason else covered
        return paths

    def _coverage(self) -> tuple[dict[str, str | None], SymmetricGroup | None]:
        groups = {
            kind: [
                TableSettings(
                    name=info.embedding_config.name,
                    sharding_type=kind,
                    compute_kernel=info.param_sharding.compute_kernel,
                    data_type=info.embedding_config.data_type,
                    fused_params=info.fused_params or {},
                    has_feature_processor=info.embedding_config.has_feature_processor,
                    is_virtual=bool(info.embedding_config.use_virtual_table),
                )
                for info in infos
            ]
            for kind, infos in self.sharding_type_to_sharding_infos.items()
        }
        device = self._device or torch.device("cpu")
        reasons = by_table(groups, uses_kernels(device))
        of_module, group = self._reason_against_module(device), None
        if of_module is None and None in reasons.values():
            try:
                group = symmetric_group(self._env.process_group, device)
            except CommunicationError as error:  # raised by all ranks
                of_module = str(error)
        return {name: reason or of_module for name, reason in reasons.items()}, group

    def _reason_against_module(self, device: torch.device) -> str | None:
        if isinstance(self._env, ShardingEnv2D):
            return "2D parallelism"
        if self._env.process_group is None or dist.get_backend(self._env.process_group) == "fake":
            return "there is no process group"
        if device.type not in ("cpu", "cuda"):
            return f"device {device}"
        return self.options.reason_against_wire

    def _is_covered(self, kind: str) -> bool:
        return all(self.reasons[info.embedding_config.name] is None for info in self.sharding_type_to_sharding_infos[kind])

    def _announce_coverage(self) -> None:
        uncovered = {name: reason for name, reason in self.reasons.items() if reason}
        if uncovered and self.options.strict:
            listed = "; ".join(f"{name}: {reason}" for name, reason in uncovered.items())
            raise UsageError(
                f"strict fused communication (strict=True, comm_strict=true) does not cover all tables: {listed}; change their "
                "plan, or let them run on TorchRec's own path with strict=False, comm_strict=false"
            )
        for name, reason in uncovered.items():
            self.warn_once(f"table {name} runs on TorchRec's own path, without fused communication: {reason}")

    def warn_once(self, message: str) -> None:
        if message not in self._said and self._env.rank == 0:
            logger.warning(message)
        self._said.add(message)

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send the features to the ranks of their tables. Collective.

        Raises:
            UsageError: if the features of some table are missing.
        """
        missing = self._features_read - set(features.keys())
        if missing:
            raise UsageError(
                f"{self._module_fqn}: the batch has no feature {', '.join(sorted(missing))}; "
                f"it has {', '.join(features.keys())}"
            )
        return cast(Awaitable[Awaitable[KJTList]], super().input_dist(ctx, features))

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver the pooled embeddings of a batch whose features have been distributed. Collective.

        Raises:
            UsageError: with ``strict``, if this batch is not covered.
            CommunicationError: if a peer is lost, or was waited for too long.
        """
        if self._undecided and self.training and torch.is_grad_enabled() and self._reason_against_batch(ctx) is None:
            self._choose_faster(ctx, input)
        if self._fused is None:
            return super().compute_and_output_dist(ctx, input)
        reason = self._reason_against_batch(ctx)
        if reason:
            if self.options.strict:
                raise UsageError(
                    f"strict fused communication (strict=True, comm_strict=true) does not cover {reason}; let such batches run "
                    "on TorchRec's own path with strict=False, comm_strict=false"
                )
            self.warn_once(f"batches with {reason} run on TorchRec's own path, without fused communication")
            return super().compute_and_output_dist(ctx, input)
        return self._compute_and_output_dist(self._fused, ctx, input)

    def _reason_against_batch(self, ctx: EmbeddingBagCollectionContext) -> str | None:
        if ctx.variable_batch_per_feature:
            return "a batch size of its own for each feature"
        if self.post_lookup_tracker_fn is not None or self.post_odist_tracker_fn is not None:
            return "a tracker of lookups or outputs"
        if any(getattr(lookup, "optim_state_tracker_fn", None) is not None for lookup in self._lookups):
            return "a tracker of optimizer states"
        if MemoryStashingManager.is_enabled():
            return "memory stashing"
        return None

    def _compute_and_output_dist(
        self, fused: FusedLookups, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        # TorchRec's collectives first: they run beside the fused ones.
        parts: dict[int, Awaitable[Tensor]] = {
            i: self._output_dist_of(i, ctx, input) for i in range(len(self._lookups)) if i not in fused.shardings
        }
        parts.update({i: NoWait(part) for i, part in fused(ctx, input).items()})
        order = sorted(parts)
        awaitable = EmbeddingBagCollectionAwaitable(
            awaitables=[parts[i] for i in order],
            embedding_dims=self._embedding_dims,
            embedding_names=self._embedding_names,
            module_fqn=self._module_fqn,
            sharding_types=[self._sharding_types[i] for i in order],
        )
        if self._has_mean_pooling_callback:
            awaitable.callbacks.append(partial(_apply_mean_pooling, divisor=ctx.divisor))
        return awaitable

    def _output_dist_of(self, sharding: int, ctx: EmbeddingBagCollectionContext, input: KJTList) -> Awaitable[Tensor]:
        """TorchRec's own path of one sharding type."""
        embeddings = self._lookups[sharding](input[sharding])
        return cast(Awaitable[Tensor], self._output_dists[sharding](embeddings, ctx.sharding_contexts[sharding]))

    def _choose_faster(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> None:
        """Measure both paths of every covered sharding type on this batch, and keep the faster ones. Collective."""
        assert self._group is not None
        self._undecided = False
        candidates = [
            FusedLookups(self, self._group, [i]) for i, kind in enumerate(self._sharding_types) if self._is_covered(kind)
        ]
        chosen = []
        for candidate in candidates:
            (sharding,) = candidate.shardings
            with torch.no_grad():
                is_faster = fused_is_faster(
                    partial(candidate, ctx, input),
                    lambda i=sharding: self._output_dist_of(i, ctx, input).wait(),  # type: ignore[misc]
                    cast(dist.ProcessGroup, self._env.process_group),
                    self._group.device,
                    work=f"{self._module_fqn}: {self._sharding_types[sharding]} tables",
                    unfused_name="TorchRec",
                )
            if is_faster:
                chosen.append(candidate)
        if len(chosen) == 1:
            self._fused = chosen[0]
        elif chosen:
            self._fused = FusedLookups(self, self._group, [i for candidate in chosen for i in candidate.shardings])

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Move tables to other ranks, as DistributedModelParallel.reshard asks for. Collective."""
        super().update_shards(*args, **kwargs)
        self._set_up_paths()


class FusedLookups:
    """Lookup and delivery of some sharding types of a module, in one exchange. Making one is collective.

    Args:
        shardings: numbers of the sharding types in the module, ascending.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection, group: SymmetricGroup, shardings: Sequence[int]) -> None:
        self.shardings = tuple(shardings)
        self._lookups = [cast(Any, module._lookups[i]) for i in shardings]
        self._widths = [sum(module._embedding_shardings[i].embedding_dims()) for i in shardings]
        self._uses_kernels = uses_kernels(group.device)
        options = cast(FusedShardedEmbeddingBagCollection, module).options
        number = next(_exchange_numbers.setdefault(group, itertools.count()))
        self._workspace = EmbeddingWorkspace(
            group,
            _layout(module, shardings, group.world_size),
            name=f"{module._module_fqn or 'embeddings'} ({number})",
            forward_wire=options.forward_wire,
            backward_wire=options.backward_wire,
            timeout_seconds=options.timeout_seconds,
            check_indices=options.check_indices,
        )
        if self._uses_kernels:
            modules = [module for lookup in self._lookups for module in lookup._emb_modules]
            self._workspace.attach_tables([_local_tables(module.emb_module) for module in modules])
        self._check_indices = options.check_indices

    def __call__(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> dict[int, Tensor]:
        """Pooled embeddings of the local batch, by the number of the first of neighbouring sharding types. Collective."""
        # TorchRec divides by what is set when the collective runs.
        self._workspace.gradient_scale = 1 / self._workspace.world_size if get_gradient_division() else 1.0
        features = [input[i] for i in self.shardings]
        batch_sizes = self._batch_sizes(ctx, features[0].stride())
        output = self._in_kernels(features, batch_sizes) if self._uses_kernels else self._on_host(features, batch_sizes)
        return self._split(output)

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

    def _on_host(self, features: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> Tensor:
        pooled = [
            result
            for lookup, of_sharding in zip(self._lookups, features, strict=True)
            if len(lookup._emb_modules)
            for result in lookup._forward(of_sharding.split(lookup._feature_splits))
        ]
        return pooled_all_to_all(self._workspace, pooled, batch_sizes)

    def _in_kernels(self, features: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> Tensor:
        inputs = [
            _kernel_inputs(lookup, module, of_lookup, self._check_indices)
            for lookup, of_sharding in zip(self._lookups, features, strict=True)
            if len(lookup._emb_modules)
            for module, of_lookup in zip(lookup._emb_modules, of_sharding.split(lookup._feature_splits), strict=True)
        ]
        indices, offsets, weights = zip(*inputs, strict=True) if inputs else ((), (), ())
        is_weighted = any(weight.numel() for weight in weights)
        return embedding_all_to_all(self._workspace, indices, offsets, weights if is_weighted else (), batch_sizes)

    def _split(self, output: Tensor) -> dict[int, Tensor]:
        runs: dict[int, int] = {}
        begin = previous = -2
        for sharding, width in zip(self.shardings, self._widths, strict=True):
            if sharding != previous + 1:
                begin = sharding
            runs[begin] = runs.get(begin, 0) + width
            previous = sharding
        return {begin: output} if len(runs) == 1 else dict(zip(runs, output.split(list(runs.values()), dim=1), strict=True))


def _layout(module: ShardedEmbeddingBagCollection, shardings: Sequence[int], world_size: int) -> ExchangeLayout:
    """Where the lookups of all ranks put their features: in the order of the module's keys, shards of columns side by side."""
    by_rank: list[list[LookupLayout]] = [[] for _ in range(world_size)]
    begin = 0
    for i in shardings:
        sharding = cast(Any, module._embedding_shardings[i])
        names, dims = sharding.embedding_names(), sharding.embedding_dims()
        columns = dict(zip(names, itertools.accumulate(dims[:-1], initial=begin), strict=True))
        for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
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
                        row_wise=module._sharding_types[i] == ShardingType.ROW_WISE.value,
                    )
                )
        begin += sum(dims)
    return ExchangeLayout(tuple(tuple(lookups) for lookups in by_rank), begin)


def _local_tables(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> LocalTables:
    """FBGEMM's tables, in place."""
    place = "host" if tbe.use_cpu else "dev"
    rate = tbe.learning_rate_tensor
    momentum = getattr(tbe, f"momentum1_{place}", None)
    optimizer = (
        RowwiseAdagrad(cast(Tensor, momentum).detach(), rate, tbe.optimizer_args.eps)
        if tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        else Sgd(rate)
    )
    return LocalTables(
        weights=getattr(tbe, f"weights_{place}").detach(),
        offsets=tuple(tbe.weights_physical_offsets),
        rows=tuple(rows for rows, *_ in tbe.embedding_specs),
        dims=tuple(dim for _, dim, *_ in tbe.embedding_specs),
        feature_tables=tuple(tbe.feature_table_map),
        mean=tbe.pooling_mode == PoolingMode.MEAN,
        optimizer=optimizer,
        stochastic_rounding=tbe.stochastic_rounding,
    )


def _kernel_inputs(lookup: Any, module: Any, features: KeyedJaggedTensor, check_indices: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and per-sample weights (empty if there are none).

    FBGEMM's own check of indices has replaced the wrong ones by 0, unless ours is to find them.
    """
    weights = features.weights_or_none()
    if weights is not None and not weights.is_floating_point():
        weights = None  # TorchRec's lookups ignore them as well
    if weights is not None and module.config.is_weighted:
        # The weights' gradients are averaged over ranks by whoever owns them: they must not be divided here.
        weights = CommOpGradientScaling.apply(weights, lookup._scale_gradient_factor)
    tbe = module.emb_module
    mode = tbe.bounds_check_mode_int
    if check_indices:
        tbe.bounds_check_mode_int = BoundsCheckMode.NONE.value
    try:
        indices, offsets, weights, _ = tbe.prepare_inputs(features.values(), features.offsets(), weights)
    finally:
        tbe.bounds_check_mode_int = mode
    return indices, offsets, indices.new_empty(0, dtype=torch.float32) if weights is None else weights
