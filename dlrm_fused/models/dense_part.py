"""The part of a training step that has no tables: from dense features and embeddings to the loss, compiled or captured.

Most of its time in eager mode goes to elementwise kernels, between the matrix products: the cross layers of DCNv2, casts of
``precision=bf16``, the concatenation with the embeddings. The compiler fuses them, forward and backward. Parameters stay
float32, as autocast has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_fused.compat.torch import one_graph_in_ddp
from dlrm_fused.config import Compile
from dlrm_fused.models.captured import CapturedFunction
from dlrm_fused.models.jagged import NUMBERS_OF_ROWS
from dlrm_fused.versions import has_c_compiler

# Maps dense features [b, D], pooled embeddings [b, sum of dimensions], and with experts [b] bool, false for padding, or with
# histories their rows, to logits [b, L] of L labels.
LogitsOf = Callable[..., Tensor]
R = TypeVar("R", Tensor, tuple[Tensor, Tensor])
# Tensor cores of GPUs want rows of so many elements, of 16 bits; narrower matrices than that are not worth a copy.
_ALIGNED_ELEMENTS, _NARROW = 8, 64


class CompiledForTraining(Generic[R]):
    """A function of tensors that runs as one compiled graph where gradients are wanted, otherwise in eager mode.

    Args:
        function: returns one tensor, or two of which the first is differentiable.
        is_compiled: false for a function that always runs in eager mode.
        layers: returns the modules whose parameters the function uses. With it, what is compiled is captured as CUDA graphs on
            GPUs.

    Attributes:
        captured: gives the gradients of all parameters at once; None where autograd does.
    """

    def __init__(
        self, function: Callable[..., R], is_compiled: bool, layers: Callable[[], Sequence[nn.Module]] | None = None
    ) -> None:
        self._function: Callable[..., R] = function
        self._is_compiled, self._layers = is_compiled, layers
        self.captured: CapturedFunction[R] | None = None
        if is_compiled and layers is not None:
            self.captured = CapturedFunction(self._run_compiled, layers)

    def __call__(self, *arguments: Tensor) -> R:
        if not self._is_compiled or not torch.is_grad_enabled():
            return self._function(*arguments)
        return self._run_compiled(*arguments) if self.captured is None else self.captured(*arguments)

    def _run_compiled(self, *arguments: Tensor) -> R:
        with one_graph_in_ddp():
            return self._compiled(*arguments)

    @cached_property
    def _compiled(self) -> Callable[..., R]:
        # Otherwise the compiler measures how to divide sums, and a run that goes on later may add in another order. It does not
        # measure either, then, where to fill up matrices on GPUs.
        options: dict[str, str | int | bool | Callable[..., Any]]
        options = {"deterministic": True, "force_shape_pad": self._layers is not None and has_odd_widths(self._layers())}
        return torch.compile(self._function, fullgraph=True, dynamic=False, options=options)


def has_odd_widths(layers: Sequence[nn.Module]) -> bool:
    """Return whether a large matrix has rows or columns of a number for which tensor cores take several times as long.

    DLRM's interactions have any number of columns, such as 479 with 26 tables of 128. Where only a narrow matrix has such, as
    the one of 13 dense features, copies take as long as they save.
    """
    weights = [p for layer in layers for p in layer.parameters() if p.dim() == 2]
    uses_tensor_cores = torch.get_float32_matmul_precision() != "highest"  # as of all precisions but fp32
    return uses_tensor_cores and any(size > _NARROW and size % _ALIGNED_ELEMENTS for p in weights for size in p.shape)


class DensePart(nn.Module):
    """Logits and cross-entropy of a model without its tables.

    A module of its own, since TorchRec's pipeline traces what contains tables and takes the rest as it is. The layers belong to
    the model, and their parameters have their names there.

    Args:
        uses_bf16: compute under bf16 autocast.
        is_one_graph: compile all for training. A model with experts compiles its parts before and after them.
        has_experts: give ``logits_of`` what is padding.
        layers: returns the modules whose parameters ``logits_of`` uses; as of :class:`CompiledForTraining`.
        rows_of: maps the histories of a batch to the rows that ``logits_of`` takes, in at most ``NUMBERS_OF_ROWS`` numbers.
            With it ``logits_of`` is not compiled, but GPUs capture it for each number of rows.
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
        rows_of: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__()
        self._logits_of, self._rows_of = logits_of, rows_of
        self._task_weights = task_weights
        self._device_type = device_type
        self._uses_bf16 = uses_bf16
        self._has_experts = has_experts
        self._losses_and_logits: CompiledForTraining[tuple[Tensor, Tensor]] | CapturedFunction[tuple[Tensor, Tensor]]
        if rows_of is not None and layers is not None:
            self._losses_and_logits = CapturedFunction(self._compute, layers, NUMBERS_OF_ROWS)
        else:
            self._losses_and_logits = CompiledForTraining(self._compute, is_one_graph, layers)

    @property
    def captured(self) -> CapturedFunction[tuple[Tensor, Tensor]] | None:
        """The function that GPUs capture; None if none is."""
        function = self._losses_and_logits
        return function if isinstance(function, CapturedFunction) else function.captured

    def forward(
        self,
        dense: Tensor,
        pooled: Tensor,
        labels: Tensor,
        weights: Tensor,
        sample_weights: Tensor | None = None,
        histories: Sequence[Any] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of cross-entropies, [], and the logits, of the labels' shape; both float32.

        Args:
            dense: [b, D].
            pooled: [b, sum of dimensions].
            labels: [b], or [b, L] of several.
            weights: [b]; 0 marks padding.
            sample_weights: [b], what each sample counts; without it, ``weights``. To be given with histories.
            histories: what ``rows_of`` takes.
        """
        inputs = [dense, pooled, labels, weights]
        if sample_weights is not None:
            inputs.append(sample_weights)
        if self._rows_of is not None:
            inputs += self._rows_of(*histories)
        return self._losses_and_logits(*inputs)

    def _compute(
        self,
        dense: Tensor,
        pooled: Tensor,
        labels: Tensor,
        weights: Tensor,
        sample_weights: Tensor | None = None,
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._uses_bf16):
            logits = self._logits_of(dense, pooled, *((weights > 0,) if self._has_experts else ()), *rows)
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


def is_compiled(setting: Compile, device: torch.device) -> bool:
    """Return whether ``training.compile`` means so on this device: by default on GPUs, where code can be made for them."""
    if setting is not Compile.auto:
        return setting is Compile.always
    return device.type == "cuda" and has_c_compiler()
