"""End-to-end training of deep learning recommendation models (DLRM) on TorchRec, with communication fused into kernels.

The names below are the public API. Each is imported when it is first used, so that ``import dlrm_fused`` costs nothing, and
the operators need torch and Triton alone. docs/reference/api.md says what each is.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_fused.cli import evaluate as evaluate
    from dlrm_fused.cli import train as train
    from dlrm_fused.errors import CommunicationError as CommunicationError
    from dlrm_fused.errors import UsageError as UsageError
    from dlrm_fused.errors import UserError as UserError
    from dlrm_fused.inference.online.model import OnlineModel as OnlineModel
    from dlrm_fused.inference.online.scorer import Candidates as Candidates
    from dlrm_fused.inference.online.scorer import OnlineScorer as OnlineScorer
    from dlrm_fused.ops.all_gather_gemm.op import all_gather_gemm as all_gather_gemm
    from dlrm_fused.ops.all_gather_gemm.op import gemm_reduce_scatter as gemm_reduce_scatter
    from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace as ShardWorkspace
    from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout as ExchangeLayout
    from dlrm_fused.ops.embedding_all_to_all.layout import LookupLayout as LookupLayout
    from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all as embedding_all_to_all
    from dlrm_fused.ops.embedding_all_to_all.pooled import pooled_all_to_all as pooled_all_to_all
    from dlrm_fused.ops.embedding_all_to_all.tables import Adagrad as Adagrad
    from dlrm_fused.ops.embedding_all_to_all.tables import Adam as Adam
    from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables as LocalTables
    from dlrm_fused.ops.embedding_all_to_all.tables import RowwiseAdagrad as RowwiseAdagrad
    from dlrm_fused.ops.embedding_all_to_all.tables import RowwiseAdam as RowwiseAdam
    from dlrm_fused.ops.embedding_all_to_all.tables import Sgd as Sgd
    from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace as EmbeddingWorkspace
    from dlrm_fused.ops.gemm_all_to_all.op import gemm_all_to_all as gemm_all_to_all
    from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace as GemmWorkspace
    from dlrm_fused.ops.gemv_all_reduce.op import gemv_all_reduce as gemv_all_reduce
    from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace as GemvWorkspace
    from dlrm_fused.ops.hstu_attention.op import hstu_attention as hstu_attention
    from dlrm_fused.ops.hstu_attention.reference import JaggedQueries as JaggedQueries
    from dlrm_fused.ops.hstu_attention.reference import RelativeBias as RelativeBias
    from dlrm_fused.ops.moe.op import expert_layer as expert_layer
    from dlrm_fused.ops.moe.workspace import ExpertWorkspace as ExpertWorkspace
    from dlrm_fused.ops.moe.workspace import expert_memory as expert_memory
    from dlrm_fused.ops.sequence_all_to_all.lookup import sequence_lookup_all_to_all as sequence_lookup_all_to_all
    from dlrm_fused.ops.sequence_all_to_all.op import sequence_all_to_all as sequence_all_to_all
    from dlrm_fused.ops.sequence_all_to_all.workspace import SequenceWorkspace as SequenceWorkspace
    from dlrm_fused.sharding.estimates import fused_enumerator as fused_enumerator
    from dlrm_fused.sharding.sequence_sharder import FusedEmbeddingCollectionSharder as FusedEmbeddingCollectionSharder
    from dlrm_fused.sharding.sharder import FusedEmbeddingBagCollectionSharder as FusedEmbeddingBagCollectionSharder
    from dlrm_fused.symmetric.factory import symmetric_group as symmetric_group

__version__ = "0.1.0"

# Modules, each with the names that it defines.
_OFFERS = (
    # Training with this trainer.
    ("cli", "train", "evaluate"),
    # Its communication in a TorchRec trainer of one's own.
    ("sharding.sharder", "FusedEmbeddingBagCollectionSharder"),
    ("sharding.sequence_sharder", "FusedEmbeddingCollectionSharder"),
    ("sharding.estimates", "fused_enumerator"),
    # Operators.
    ("symmetric.factory", "symmetric_group"),
    ("ops.embedding_all_to_all.op", "embedding_all_to_all"),
    ("ops.embedding_all_to_all.pooled", "pooled_all_to_all"),
    ("ops.embedding_all_to_all.workspace", "EmbeddingWorkspace"),
    ("ops.embedding_all_to_all.layout", "ExchangeLayout", "LookupLayout"),
    ("ops.embedding_all_to_all.tables", "LocalTables", "RowwiseAdagrad", "Adagrad", "Adam", "RowwiseAdam", "Sgd"),
    ("ops.gemv_all_reduce.op", "gemv_all_reduce"),
    ("ops.gemv_all_reduce.workspace", "GemvWorkspace"),
    ("ops.gemm_all_to_all.op", "gemm_all_to_all"),
    ("ops.gemm_all_to_all.workspace", "GemmWorkspace"),
    ("ops.all_gather_gemm.op", "all_gather_gemm", "gemm_reduce_scatter"),
    ("ops.all_gather_gemm.workspace", "ShardWorkspace"),
    ("ops.moe.op", "expert_layer"),
    ("ops.moe.workspace", "ExpertWorkspace", "expert_memory"),
    ("ops.sequence_all_to_all.op", "sequence_all_to_all"),
    ("ops.sequence_all_to_all.lookup", "sequence_lookup_all_to_all"),
    ("ops.sequence_all_to_all.workspace", "SequenceWorkspace"),
    ("ops.hstu_attention.op", "hstu_attention"),
    ("ops.hstu_attention.reference", "JaggedQueries", "RelativeBias"),
    # Online scoring.
    ("inference.online.model", "OnlineModel"),
    ("inference.online.scorer", "OnlineScorer", "Candidates"),
    # Errors.
    ("errors", "UserError", "UsageError", "CommunicationError"),
)
_DEFINED_IN = {name: f"dlrm_fused.{module}" for module, *names in _OFFERS for name in names}

__all__ = list(_DEFINED_IN)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
