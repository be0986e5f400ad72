"""Names of release 0.1 that have another place now: they work until release 0.2, with a warning that says where they are.

A module that users may import from gives its old names by ``__getattr__ = moved_names(__name__)``; one that is gone is there as
long as its package calls :func:`provide_gone_modules`.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

# By old module, by old name, the new place, as module:name.
MOVED = {
    "dlrm_fused.online": {
        "CutTables": "dlrm_fused.inference.online.sharded_tables:ShardedTables",
        "Candidates": "dlrm_fused:Candidates",
        "History": "dlrm_fused.inference.online.scorer:History",
        "OnlineScorer": "dlrm_fused:OnlineScorer",
    },
    "dlrm_fused.ops.exchange": {
        "EmbeddingExchange": "dlrm_fused:EmbeddingWorkspace",
        "ExchangeLayout": "dlrm_fused:ExchangeLayout",
        "LookupLayout": "dlrm_fused:LookupLayout",
    },
    "dlrm_fused.ops.tables": {
        "LocalTables": "dlrm_fused:LocalTables",
        "RowwiseAdagrad": "dlrm_fused:RowwiseAdagrad",
        "Sgd": "dlrm_fused:Sgd",
    },
    "dlrm_fused.ops.pooled_all_to_all": {"pooled_all_to_all": "dlrm_fused:pooled_all_to_all"},
    "dlrm_fused.symmetric": {
        "Arena": "dlrm_fused.symmetric:BlockPool",
        "EqualBlocks": "dlrm_fused.symmetric:BlockPool.with_spare",
        "PeerWatch": "dlrm_fused.symmetric:PeerMonitor",
    },
    "dlrm_fused.ops.gemv_all_reduce": {"GemvExchange": "dlrm_fused:GemvWorkspace"},
    "dlrm_fused.ops.gemm_all_to_all": {"GemmExchange": "dlrm_fused:GemmWorkspace"},
    "dlrm_fused.ops.expert_layer": {
        "expert_layer": "dlrm_fused:expert_layer",
        "expert_memory": "dlrm_fused:expert_memory",
        "reference": "dlrm_fused.ops.moe.reference:reference",
        "ExpertExchange": "dlrm_fused:ExpertWorkspace",
    },
}

# Modules of MOVED that have no file any more.
_GONE = (
    "dlrm_fused.online",
    *(f"dlrm_fused.ops.{name}" for name in ("exchange", "expert_layer", "pooled_all_to_all", "tables")),
)


def provide_gone_modules(package: str) -> None:
    """Make the modules of a package that are gone importable; they hold nothing but names that have moved."""
    for gone in _GONE:
        if gone.rpartition(".")[0] == package:
            module = ModuleType(gone, "Names that have moved: see dlrm_fused/deprecated.py.")
            module.__dict__["__getattr__"] = moved_names(gone)
            sys.modules[gone] = module
            setattr(sys.modules[package], gone.rpartition(".")[2], module)


def moved_names(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module some of whose names have moved, as :data:`MOVED` says."""

    def get(name: str) -> Any:
        if name not in MOVED[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place = MOVED[module][name]
        shown = f"{module}.{name} is {place.replace(':', '.')} now; the old name goes with release 0.2"
        warnings.warn(shown, DeprecationWarning, stacklevel=2)
        return pkgutil.resolve_name(place)

    return get
