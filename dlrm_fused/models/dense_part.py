"""The part of a training step that has no tables: from dense features and pooled embeddings to the loss, compiled.

Most of its time in eager mode goes to elementwise kernels, between the matrix products: the cross layers of DCNv2, casts of
``precision=bf16``, the concatenation with the embeddings. The compiler fuses them, forward and backward. Parameters stay
float32, as autocast has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_fused.models.captured import CapturedFunction
from dlrm_fused.models.compiled import CompiledForTraining

# Maps dense features [b, D], pooled embeddings [b, sum of dimensions], and with experts [b] bool, false for padding, to logits
# [b, L] of L labels.
LogitsOf = Callable[..., Tensor]


class DensePart(nn.Module):
    """Logits and cross-entropy of a model without its tables.

    A module of its own, since TorchRec's pipeline traces what contains tables and takes the rest as it is. The layers belong to
    the model, and their parameters have their names there.

    Args:
        uses_bf16: compute under bf16 autocast.
        is_one_graph: compile all for training. A model with experts compiles its parts before and after them.
        has_experts: give ``logits_of`` what is padding.
        layers: returns the modules whose parameters ``logits_of`` uses; as of :class:`CompiledForTraining`.
    """

    def __init__(
        self,
        logits_of: LogitsOf,
        device_type: str,
        uses_bf16: bool,
        is_one_graph: bool,
        has_experts: bool = False,
        layers: Callable[[], Sequence[nn.Module]] | None = None,
        task_weights: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self._logits_of = logits_of
        self._task_weights = task_weights
        self._device_type = device_type
        self._uses_bf16 = uses_bf16
        self._has_experts = has_experts
        self._losses_and_logits = CompiledForTraining(self._compute, is_one_graph, layers)

    @property
    def captured(self) -> CapturedFunction[tuple[Tensor, Tensor]] | None:
        """The captured function of :class:`CompiledForTraining`."""
        return self._losses_and_logits.captured

    def forward(
        self, dense: Tensor, pooled: Tensor, labels: Tensor, weights: Tensor, *sample_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of cross-entropies, [], and the logits, of the labels' shape; both float32.

        Args:
            dense: [b, D].
            pooled: [b, sum of dimensions].
            labels: [b], or [b, L] of several.
            weights: [b]; 0 marks padding.
            sample_weights: [b], what each sample counts; without it, ``weights``.
        """
        return self._losses_and_logits(dense, pooled, labels, weights, *sample_weights)

    def _compute(
        self, dense: Tensor, pooled: Tensor, labels: Tensor, weights: Tensor, sample_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._uses_bf16):
            logits = self._logits_of(dense, pooled, *((weights > 0,) if self._has_experts else ()))
        return cross_entropy(logits, labels, weights if sample_weights is None else sample_weights, self._task_weights)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, task_weights: Sequence[float] = (1.0,)
) -> tuple[Tensor, Tensor]:
    """Return the loss of all labels, from logits of any dtype.

    Args:
        logits: [b, L].
        labels: [b] of one label, [b, L] of several.
        weights: [b], what each sample counts.
        task_weights: L, of the labels; 1 for a single one.

    Returns:
        the sum over labels and samples of both weights times the cross-entropy, [], and the logits, of the labels' shape; both
        float32.
    """
    logits = logits.float()
    if len(task_weights) == 1:
        logits = logits.squeeze(-1)
        return _sum_over_samples(logits, labels, weights), logits
    # Label by label: a tensor of task weights would be copied from the host, which a CUDA graph does not allow.
    losses = [
        weight * _sum_over_samples(logits[:, label], labels[:, label], weights) for label, weight in enumerate(task_weights)
    ]
    return torch.stack(losses).sum(), logits


def _sum_over_samples(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")
