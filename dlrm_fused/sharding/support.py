"""Find the embedding tables that the fused path covers, and why it does not cover the others.

All rules are here. A table that breaks one runs on TorchRec's own lookup and output dist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType

from dlrm_fused.ops.common.dtypes import DTYPES

# Sharding types under which a rank looks up either all bags of a feature or none.
OF_WHOLE_FEATURES = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
SHARDINGS = (*OF_WHOLE_FEATURES, ShardingType.ROW_WISE)
_DTYPES = (DataType.FP32, DataType.FP16, DataType.BF16)
# By the name of FBGEMM's SparseType, or TorchRec's DataType.
_OUTPUT_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
ADAMS = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)
_OPTIMIZERS = (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD, *ADAMS)
_PLAIN_DECAY_MODES = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
# Arguments of FBGEMM's lookup that our kernels follow, or that mean nothing for tables in device memory with these optimizers.
_FOLLOWED = ("optimizer", "learning_rate", "eps", "beta1", "beta2", "stochastic_rounding", "output_dtype", "weights_precision")
_FOLLOWED_INPUTS = ("bounds_check_mode", "embedding_table_index_type", "embedding_table_offset_type")
_OF_OTHER_OPTIMIZERS = ("weight_decay_mode", "momentum", "eta", "max_gradient")
_OF_OTHER_MEMORY = ("enforce_hbm", "prefetch_pipeline", "multipass_prefetch_config", "uvm_host_mapped")
_OF_CACHES = ("cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory", "cache_precision")
_OF_STATISTICS = ("record_cache_metrics", "gather_uvm_cache_stats", "stats_reporter_config")
_OF_TORCHREC = ("use_one_tbe_per_table", "_batch_key")
# Known ones that must be off: our kernels have no such feature.
_WEIGHT_DECAY = "weight_decay"  # but of Adam: FBGEMM's is always decoupled, whatever the mode
_OF_STATES = ("optimizer_state_dtypes", "uvm_non_rowwise_momentum")
_ARGUMENTS_OFF = ("max_norm", "gradient_clipping", *_OF_STATES, "enable_raw_embedding_streaming")
# A line of the log names so many tables; plan.txt of a run, and the module's `paths`, name all.
_MOST_NAMED = 20
# Advice for the reasons that users meet most.
_SHARDED_OTHERWISE = (
    "for fused communication give it ParameterConstraints(sharding_types=['table_wise']) for each, or this trainer "
    "embedding.sharding=table_wise and, of a table with a setting of its own, embedding.tables.<name>.sharding=table_wise"
)
_ADVICE = {
    f"sharding type {ShardingType.DATA_PARALLEL.value}": f"TorchRec's planner replicates small tables; {_SHARDED_OTHERWISE}",
    f"sharding type {ShardingType.TABLE_ROW_WISE.value}": f"the planner may choose others; {_SHARDED_OTHERWISE}",
    f"sharding type {ShardingType.GRID_SHARD.value}": f"the planner may choose others; {_SHARDED_OTHERWISE}",
    f"compute kernel {EmbeddingComputeKernel.DENSE.value}": (
        "their optimizer does not run in backward; call torchrec.optim.apply_optimizer_in_backward before the plan is made, or "
        "plan them with compute_kernel='fused'"
    ),
}
_MEANINGLESS = (*_OF_OTHER_OPTIMIZERS, *_OF_OTHER_MEMORY, *_OF_CACHES, *_OF_STATISTICS, *_OF_TORCHREC)
_KNOWN_ARGUMENTS = {*_FOLLOWED, *_FOLLOWED_INPUTS, *_MEANINGLESS, *_ARGUMENTS_OFF, _WEIGHT_DECAY}


@dataclass(frozen=True)
class TableSettings:
    """The settings of a table that decide whether it can be fused.

    Attributes:
        sharding_type: TorchRec's name, such as ``row_wise``.
        compute_kernel: TorchRec's name, such as ``fused``.
        fused_params: arguments of FBGEMM's lookup, as TorchRec passes them.
        has_feature_processor: whether weights are computed from the features.
        is_virtual: whether rows are made when they first occur (zero-collision hashing).
    """

    name: str
    sharding_type: str
    compute_kernel: str
    data_type: DataType = DataType.FP32
    fused_params: Mapping[str, Any] = field(default_factory=dict)
    has_feature_processor: bool = False
    is_virtual: bool = False


def reason_against(table: TableSettings, uses_kernels: bool) -> str | None:
    """Why the fused path does not cover a table; None if it does.

    Args:
        uses_kernels: our kernels look up and update the tables (GPUs); else FBGEMM does, with whatever optimizer.
    """
    given = table.fused_params
    rules: list[tuple[bool, str]] = [
        (table.sharding_type in [s.value for s in SHARDINGS], f"sharding type {table.sharding_type}"),
        (table.compute_kernel == EmbeddingComputeKernel.FUSED.value, f"compute kernel {table.compute_kernel}"),
        (not table.has_feature_processor, "it has a feature processor"),
        (not table.is_virtual, "it is a virtual table"),
        (table.data_type in _DTYPES, f"weights of type {table.data_type.name}"),
        (output_type(given) is not None, f"output_dtype={_shown(given.get('output_dtype'))}"),
    ]
    if uses_kernels:
        optimizer = given.get("optimizer", EmbOptimType.EXACT_SGD)
        decay_mode = given.get("weight_decay_mode", WeightDecayMode.NONE)
        unknown = sorted(set(given) - _KNOWN_ARGUMENTS)
        off = _ARGUMENTS_OFF if optimizer in ADAMS else (_WEIGHT_DECAY, *_ARGUMENTS_OFF)
        rules += [
            (optimizer in _OPTIMIZERS, f"optimizer {_shown(optimizer)}"),
            *((not given.get(key), f"{key}={given.get(key)}") for key in off),
            (decay_mode in _PLAIN_DECAY_MODES, f"weight_decay_mode={_shown(decay_mode)}"),
            (not unknown, f"argument {', '.join(unknown)} of FBGEMM's lookup"),
        ]
    return next((reason for holds, reason in rules if not holds), None)


def output_type(fused_params: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of pooled embeddings, by the arguments of FBGEMM's lookup; None if the fused path does not cover it."""
    return _OUTPUT_DTYPES.get(_shown(fused_params.get("output_dtype", SparseType.FP32)))


def reason_against_wire(key: str, dtype: torch.dtype | None) -> str | None:
    """Why a number format of communication is not covered; None if it is."""
    return None if dtype in DTYPES else f"{key}={dtype}"


def by_table(groups: Mapping[str, list[TableSettings]], uses_kernels: bool) -> dict[str, str | None]:
    """The reason against each table, by name; None for those that are covered.

    Tables of one sharding type share their lookups and output dist, so all of them are covered, or none. All tables of a module
    share its output.

    Args:
        groups: the tables of each sharding type of a module.
    """
    outputs = {output_type(table.fused_params) for tables in groups.values() for table in tables}
    if len(outputs) > 1:
        return {table.name: "tables of one module differ in output_dtype" for tables in groups.values() for table in tables}
    reasons: dict[str, str | None] = {}
    for sharding_type, tables in groups.items():
        own = {table.name: reason_against(table, uses_kernels) for table in tables}
        first = next((name for name, reason in own.items() if reason), None)
        for name, reason in own.items():
            shared = f"it shares the {sharding_type} lookups with table {first} ({own[first]})" if first else None
            reasons[name] = reason or shared
    return reasons


def summary(reasons: Mapping[str, str | None]) -> str:
    """Return one line: how many tables the fused path covers, and for each reason the others and what to do about it.

    Args:
        reasons: by table, as :func:`by_table` gives them.
    """
    others: dict[str, list[str]] = {}
    for table, reason in reasons.items():
        if reason:
            others.setdefault(reason, []).append(table)
    uncovered = sum(map(len, others.values()))
    line = f"fused communication for {len(reasons) - uncovered} of {len(reasons)} embedding tables"
    for reason, tables in sorted(others.items(), key=lambda item: -len(item[1])):
        advice = _ADVICE.get(reason)
        line += f"; not for {len(tables)}: {reason} [{_listed(tables)}]" + (f" ({advice})" if advice else "")
    return line


def _listed(tables: list[str]) -> str:
    more = len(tables) - _MOST_NAMED
    return ", ".join(tables[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    return str(getattr(value, "name", value))
