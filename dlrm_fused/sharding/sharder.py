"""The sharder that users hand to TorchRec: its arguments, and the options that they become.

::

    model = DistributedModelParallel(model, sharders=[FusedEmbeddingBagCollectionSharder()])

TorchRec's plan, input dist, lookups, state dict and fused optimizer stay as they are: only what happens between the lookup and
the output changes, in :mod:`~dlrm_fused.sharding.sharded_module`.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import CommOp, ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_fused.compat.torchrec import sharded_module_order
from dlrm_fused.sharding.options import FUSED, FusedOptions, Mode, chosen_wires
from dlrm_fused.sharding.paths import Turns
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with fused lookup and communication where the plan allows it.

    Give one sharder to both the planner and DistributedModelParallel. Ranks of one host store into each other's memory;
    between hosts, slices of results travel as messages.

    Args:
        fused_params: as in TorchRec: arguments of FBGEMM's lookup, such as the optimizer, or ``output_dtype``.
        qcomm_codecs_registry: as in TorchRec. Decides the number formats on the wire unless they are given.
        sharded_module_order_overwrite: as in TorchRec.
        mode: ``fused``, or ``auto``: for each sharding type of a module the faster of fused and TorchRec's path, which take
            turns in the first training steps and are measured.
        strict: refuse what the fused path does not cover, instead of running it on TorchRec's.
        forward_wire: float32, bfloat16 or float16: in which pooled embeddings travel, if not in the output's own 16 bits.
        backward_wire: the same for their gradients.
        timeout_seconds: how long a rank waits for another one.
        check_indices: compare every index with its table's rows before the lookup; slow, for debugging. GPUs only.
        in_feature_order: give every output the columns of the module before it was sharded, in the order of its tables'
            features, which the fused path does without a copy. Otherwise they have TorchRec's order, which the plan decides.
        fixed_shapes: batches of as many samples have as many ids of each feature, on every rank, and no weights: lookups
            between GPUs of several hosts may then be replayed as CUDA graphs. Once they are, a training batch of another shape
            is a UsageError, and so are other numbers of the optimizer but for the learning rate.

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
        in_feature_order: bool = False,
        fixed_shapes: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)
        self._turns = Turns()
        operations = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
        forward, backward, reason = chosen_wires(qcomm_codecs_registry, operations, forward_wire, backward_wire)
        self.options = FusedOptions(
            mode=mode,
            strict=strict,
            forward_wire=forward,
            backward_wire=backward,
            reason_against_wire=reason,
            timeout_seconds=timeout_seconds,
            check_indices=check_indices,
            in_feature_order=in_feature_order,
            fixed_shapes=fixed_shapes,
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
            UsageError: on all ranks, with ``strict`` if the fused path does not cover all of the module, with
                ``in_feature_order`` if a table reads a feature twice.
        """
        return FusedShardedEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=sharded_module_order(self),
            options=self.options,
            turns=self._turns,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        return FusedShardedEmbeddingBagCollection
