"""Operators' benchmarks: each declares its cells and contestants (case.py); one runner measures them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.operators.case import Operator

# Each has a module of its name here.
OPERATORS = (
    "embedding_all_to_all",
    "sequence_all_to_all",
    "gemv_all_reduce",
    "gemm_all_to_all",
    "expert_layer",
    "all_gather_gemm",
    "hstu_attention",
)


def load(name: str) -> Operator:
    """The declaration of an operator."""
    declared: Operator = importlib.import_module(f"benchmarks.operators.{name}").OPERATOR
    return declared
