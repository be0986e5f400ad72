"""Functions of a model that ``torch.compile`` compiles for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dlrm_fused.compat.torch import one_graph_in_ddp
from dlrm_fused.config import Compile
from dlrm_fused.models.captured import CapturedFunction
from dlrm_fused.versions import has_c_compiler

R = TypeVar("R", Tensor, tuple[Tensor, Tensor])
# Tensor cores of GPUs want rows of so many elements, of 16 bits; narrower matrices than that are not worth a copy.
_ALIGNED_ELEMENTS, _NARROW = 8, 64


class CompiledForTraining(Generic[R]):
    """A function of tensors that runs as one compiled graph where gradients are wanted, otherwise in eager mode.

    Args:
        function: returns tensors; with ``layers`` one, or two of which the first is differentiable.
        is_compiled: false for a function that always runs in eager mode.
        layers: returns the modules whose parameters the function uses. With it, what is compiled is captured as CUDA graphs on
            GPUs.
        rows_vary: whether the first dimensions of arguments differ from call to call, as of jagged batches: then the second
            number of rows compiles one graph for all.

    Attributes:
        captured: gives the gradients of all parameters at once; None where autograd does.
    """

    def __init__(
        self,
        function: Callable[..., R],
        is_compiled: bool,
        layers: Callable[[], Sequence[nn.Module]] | None = None,
        rows_vary: bool = False,
    ) -> None:
        self._function: Callable[..., R] = function
        self._is_compiled, self._layers, self._rows_vary = is_compiled, layers, rows_vary
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
        return torch.compile(self._function, fullgraph=True, dynamic=None if self._rows_vary else False, options=options)


def has_odd_widths(layers: Sequence[nn.Module]) -> bool:
    """Return whether a large matrix has rows or columns of a number for which tensor cores take several times as long.

    DLRM's interactions have any number of columns, such as 479 with 26 tables of 128. Where only a narrow matrix has such, as
    the one of 13 dense features, copies take as long as they save.
    """
    weights = [p for layer in layers for p in layer.parameters() if p.dim() == 2]
    uses_tensor_cores = torch.get_float32_matmul_precision() != "highest"  # as of all precisions but fp32
    return uses_tensor_cores and any(size > _NARROW and size % _ALIGNED_ELEMENTS for p in weights for size in p.shape)


def is_compiled(setting: Compile, device: torch.device) -> bool:
    """Return whether ``training.compile`` means so on this device: by default on GPUs, where code can be made for them."""
    if setting is not Compile.auto:
        return setting is Compile.always
    return device.type == "cuda" and has_c_compiler()
