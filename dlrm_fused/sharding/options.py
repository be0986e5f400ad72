"""The arguments of the fused sharders, as the modules that they shard get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import torch
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from dlrm_fused.errors import UsageError
from dlrm_fused.sharding.support import reason_against_wire

Mode = Literal["fused", "auto"]
FUSED: Final = "fused"
AUTO: Final = "auto"

Codecs = Mapping[str, QuantizedCommCodecs] | None


@dataclass(frozen=True)
class FusedOptions:
    """The arguments of a fused sharder, such as :class:`FusedEmbeddingBagCollectionSharder`, for the modules that it shards.

    Attributes:
        reason_against_wire: why the sharder's number formats are not covered; None if they are.
    """

    mode: Mode
    strict: bool
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    reason_against_wire: str | None
    timeout_seconds: float
    check_indices: bool = False
    in_feature_order: bool = False
    fixed_shapes: bool = False

    @classmethod
    def of(
        cls,
        codecs: Codecs,
        operations: Sequence[CommOp],
        *,
        mode: Mode = FUSED,
        strict: bool,
        forward_wire: torch.dtype | None,
        backward_wire: torch.dtype | None,
        timeout_seconds: float,
        check_indices: bool = False,
        in_feature_order: bool = False,
        fixed_shapes: bool = False,
    ) -> Self:
        """Return the options of a sharder's arguments.

        Args:
            codecs: TorchRec's, which decide the number formats that are not given.
            operations: those of TorchRec that fused communication replaces.

        Raises:
            UsageError: for a wrong argument.
        """
        if mode not in (FUSED, AUTO):
            raise UsageError(f"mode={mode!r}: allowed: {FUSED!r}, {AUTO!r}")
        if not timeout_seconds > 0:
            raise UsageError(f"timeout_seconds={timeout_seconds}: allowed: a positive number")
        for key, dtype in (("forward_wire", forward_wire), ("backward_wire", backward_wire)):
            if dtype is not None and reason_against_wire(key, dtype):
                raise UsageError(f"{key}={dtype}: allowed: torch.float32, torch.bfloat16, torch.float16")
        codec_forward, codec_backward, reason = _wires_of_codecs(codecs, operations)
        return cls(
            mode=mode,
            strict=strict,
            forward_wire=forward_wire or codec_forward,
            backward_wire=backward_wire or codec_backward,
            reason_against_wire=reason if forward_wire is None or backward_wire is None else None,
            timeout_seconds=timeout_seconds,
            check_indices=check_indices,
            in_feature_order=in_feature_order,
            fixed_shapes=fixed_shapes,
        )


def wire_for(wire: torch.dtype, output: torch.dtype, ranks: int) -> torch.dtype:
    """Return the format that travels: no wider than the output. On one rank nothing travels, and so nothing is rounded."""
    return output if ranks == 1 or wire.itemsize > output.itemsize else wire


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
