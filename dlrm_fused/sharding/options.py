"""The arguments of the fused sharders, as the modules that they shard get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from dlrm_fused.errors import UsageError
from dlrm_fused.sharding.support import reason_against_wire

Mode = Literal["fused", "auto"]
FUSED: Final = "fused"
AUTO: Final = "auto"

Codecs = Mapping[str, QuantizedCommCodecs] | None


@dataclass(frozen=True, kw_only=True)
class FusedOptions:
    """The arguments of a fused sharder, such as :class:`FusedEmbeddingBagCollectionSharder`, for the modules that it shards.

    Attributes:
        reason_against_wire: why the sharder's number formats are not covered; None if they are.

    Raises:
        UsageError: for a wrong argument.
    """

    mode: Mode = FUSED
    strict: bool
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    reason_against_wire: str | None
    timeout_seconds: float
    check_indices: bool = False
    in_feature_order: bool = False
    fixed_shapes: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (FUSED, AUTO):
            raise UsageError(f"mode={self.mode!r}: allowed: {FUSED!r}, {AUTO!r}")
        if not self.timeout_seconds > 0:
            raise UsageError(f"timeout_seconds={self.timeout_seconds}: allowed: a positive number")


def wire_for(wire: torch.dtype, output: torch.dtype, ranks: int) -> torch.dtype:
    """Return the format that travels: no wider than the output. On one rank nothing travels, and so nothing is rounded."""
    return output if ranks == 1 or wire.itemsize > output.itemsize else wire


def chosen_wires(
    codecs: Codecs, operations: Sequence[CommOp], forward: torch.dtype | None, backward: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, str | None]:
    """Return the number formats of communication, forward and backward, and why they are not covered; None if they are.

    Args:
        codecs: TorchRec's, which decide the number formats that are not given.
        operations: those of TorchRec that fused communication replaces.

    Raises:
        UsageError: for a format that is given and not covered.
    """
    for key, dtype in (("forward_wire", forward), ("backward_wire", backward)):
        if dtype is not None and reason_against_wire(key, dtype):
            raise UsageError(f"{key}={dtype}: allowed: torch.float32, torch.bfloat16, torch.float16")
    of_forward, of_backward, reason = _wires_of_codecs(codecs, operations)
    return forward or of_forward, backward or of_backward, reason if forward is None or backward is None else None


def _wires_of_codecs(registry: Codecs, operations: Sequence[CommOp]) -> tuple[torch.dtype, torch.dtype, str | None]:
    """Number formats of TorchRec's quantized communication, forward and backward, and why they are not covered."""
    wires = {"forward": torch.float32, "backward": torch.float32}
    for operation in operations:
        codecs = (registry or {}).get(operation.name)
        for direction in wires:
            codec = getattr(codecs, direction, None)
            dtype = getattr(codec, "quantized_dtype", torch.float32)
            dtype = dtype() if callable(dtype) else dtype  # a method in TorchRec's codec that does nothing
            if operation is operations[0]:
                wires[direction] = dtype
            reason = reason_against_wire(f"{direction}_wire", dtype)
            if dtype != wires[direction]:
                reason = f"{direction} communication in {wires[direction]} for All-to-All, but {dtype} for ReduceScatter"
            if getattr(codec, "_loss_scale", None) is not None:
                reason = f"{direction} communication with a loss scale"
            if reason:
                return torch.float32, torch.float32, reason
    return wires["forward"], wires["backward"], None
