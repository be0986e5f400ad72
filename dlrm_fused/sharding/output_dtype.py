"""Choose the number format of pooled embeddings, by the config and the device."""

from __future__ import annotations

import torch

from dlrm_fused.config import Config, OutputDtype, Precision, WireDtype
from dlrm_fused.errors import ConfigError


def pooled_dtype(config: Config, device: torch.device) -> OutputDtype:
    """Return the number format that ``embedding.output_dtype`` means on this device; never ``auto``.

    Raises:
        ConfigError: if the device lacks it, or it contradicts the format on the wire or ``training.precision``.
    """
    embedding = config.embedding
    chosen, wires = embedding.output_dtype, (embedding.forward_wire, embedding.backward_wire)
    if chosen is OutputDtype.auto:
        is_half = config.training.precision is Precision.bf16 and device.type == "cuda" and set(wires) == {WireDtype.fp32}
        return OutputDtype.bf16 if is_half else OutputDtype.fp32
    if device.type == "cpu" and chosen is OutputDtype.bf16:
        raise ConfigError("embedding.output_dtype=bf16: FBGEMM has it on GPUs only; on the CPU: auto, fp32, fp16")
    if chosen is OutputDtype.fp16 and config.training.precision is Precision.bf16:
        raise ConfigError(
            "embedding.output_dtype=fp16: allowed: auto, fp32, bf16 with training.precision=bf16, whose autocast takes no fp16"
        )
    for key, wire in zip(("forward_wire", "backward_wire"), wires, strict=True):
        if chosen is not OutputDtype.fp32 and wire is not WireDtype.fp32:
            raise ConfigError(
                f"embedding.{key}={wire.name}: allowed: fp32 with embedding.output_dtype={chosen.name}, in which they are sent"
            )
    return chosen
