"""Launches of kernels that come again, in a fraction of the host's time.

Triton looks at each argument of each launch to find the code that it has compiled for such arguments, which takes the host
several times as long as the launch itself. Where a caller knows that all is as before, the code is started at once, as in
Triton's tutorial "Fused Softmax".
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

V = TypeVar("V")

_ALIGNMENT = 16  # bytes, of addresses that the compiler makes wide loads of
_MOST_OF_32_BITS = 2**31 - 1
_MOST_REMEMBERED = 1024


def ceil_div(size: int, unit: int) -> int:
    """Return how many units hold the size; ``triton.cdiv``, which takes a microsecond or more, is for kernels as well."""
    return -(-size // unit)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is not less than the size, which is at least 1."""
    return 1 << (size - 1).bit_length()


class Remembered(dict[Hashable, V]):
    """A memory by key. Where keys never come again, all is forgotten from time to time."""

    def __setitem__(self, key: Hashable, value: V) -> None:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        super().__setitem__(key, value)


def layout_of(*tensors: Tensor | None) -> Hashable:
    """Return the properties of tensors by which they are checked and kernels compiled; equal ones can be treated alike."""
    # Checks refuse what is no tensor.
    return tuple([(t.shape, t.stride(), *_kind_of(t)) if isinstance(t, Tensor) else type(t) for t in tensors])


def kinds_of(*tensors: Tensor | None) -> Hashable:
    """Return the properties of tensors by which kernels are compiled that get shapes and strides as numbers."""
    return tuple([t if t is None else _kind_of(t) for t in tensors])


def _kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.device, bool]:
    return tensor.dtype, tensor.device, tensor.data_ptr() % _ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its memory does not begin at a multiple of 16 bytes: kernels load so many at once.

    A view of a larger tensor, such as one of all parameters, may begin anywhere.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


class Launches:
    """Launches of kernels by layout. Triton's interpreter compiles nothing, and so nothing is kept for it."""

    def __init__(self) -> None:
        self._compiled: Remembered[tuple[Any, Any, list[str]]] = Remembered()

    def __call__(
        self, layout: Hashable, kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants_and_options: Any
    ) -> None:
        """Launch a kernel on the current stream, as ``kernel[programs](*arguments, **constants_and_options)`` does.

        Args:
            layout: all launches with one have in common what the kernel's code is compiled for: constants and options; dtypes
                of tensors, and whether their addresses are multiples of 16; and numbers that the kernel does not name in
                ``do_not_specialize``.
            kernel: of ``triton.jit``.
            programs: the grid.
            arguments: of the kernel, but for the constants, which come last in its signature.
            constants_and_options: the constants by name, and options of the launch, such as ``num_warps``.
        """
        # Other numbers are of 32 bits to the code, or of 64.
        key = id(kernel), layout, *[argument > _MOST_OF_32_BITS for argument in arguments if type(argument) is int]
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel[programs](*arguments, **constants_and_options)
            if compiled is not None:
                self._compiled[key] = compiled, kernel, kernel.arg_names[len(arguments) :]  # the kernel keeps its id
            return
        compiled, _, constants = found
        compiled[(*programs, 1, 1)[:3]](*arguments, *[constants_and_options[name] for name in constants])


# Kernels that have no channel are launched by this, on any device.
launch_again = Launches()
