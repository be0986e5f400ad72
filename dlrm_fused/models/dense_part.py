"""The part of a training step that has no tables: from dense features and pooled embeddings to the loss, compiled as a whole.

Most of its time in eager mode goes to elementwise kernels, between the matrix products: the cross layers of DCNv2, casts of
``precision=bf16``, the concatenation with the embeddings. The compiler fuses them, forward and backward. Parameters stay
float32, as autocast has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_fused.compat.torch import one_graph_in_ddp
from dlrm_fused.config import Compile
from dlrm_fused.versions import has_c_compiler

# Maps dense features [b, D] and pooled embeddings [b, F, d] to logits [b, 1].
LogitsOf = Callable[[Tensor, Tensor], Tensor]


class DensePart(nn.Module):
    """Logits and cross-entropy of a model without its tables.

    A module of its own, since TorchRec's pipeline traces what contains tables and takes the rest as it is. The layers belong to
    the model, and their parameters have their names there.

    Args:
        logits_of: the model's.
        uses_bf16: compute under bf16 autocast.
        is_compiled: in training, where all batches have one shape; an evaluation runs in eager mode.
    """

    def __init__(self, logits_of: LogitsOf, device_type: str, uses_bf16: bool, is_compiled: bool) -> None:
        super().__init__()
        self._logits_of = logits_of
        self._device_type = device_type
        self._uses_bf16 = uses_bf16
        self._compiled = torch.compile(self._compute, fullgraph=True, dynamic=False) if is_compiled else None

    def forward(self, dense: Tensor, pooled: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of cross-entropies, [], and the logits, [b]; both float32.

        Args:
            dense: [b, D].
            pooled: [b, F, d].
            labels, weights: [b].
        """
        if self._compiled is None or not self.training:
            return self._compute(dense, pooled, labels, weights)
        with one_graph_in_ddp():
            return self._compiled(dense, pooled, labels, weights)

    def _compute(self, dense: Tensor, pooled: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._uses_bf16):
            logits = self._logits_of(dense, pooled)
        return cross_entropy(logits, labels, weights)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [b, 1] of any dtype to the weighted sum of cross-entropies, [], and logits [b], both float32."""
    logits = logits.squeeze(-1).float()
    return binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum"), logits


def is_compiled(setting: Compile, device: torch.device) -> bool:
    """Whether ``training.compile`` means so on this device: by default on GPUs, where code can be made for them."""
    if setting is not Compile.auto:
        return setting is Compile.always
    return device.type == "cuda" and has_c_compiler()
