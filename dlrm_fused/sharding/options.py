"""The arguments of FusedEmbeddingBagCollectionSharder, as the modules that it shards get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

Mode = Literal["fused", "auto"]
FUSED: Final = "fused"
AUTO: Final = "auto"


@dataclass(frozen=True)
class FusedOptions:
    """The arguments of :class:`FusedEmbeddingBagCollectionSharder` for the modules that it shards."""

    mode: Mode
    strict: bool
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    reason_against_wire: str | None
    timeout_seconds: float
    check_indices: bool
    in_feature_order: bool
