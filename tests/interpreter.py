"""Triton's interpreter, made faster for tests: kernels of tests are small, so its bookkeeping is nearly all of their time."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import dlrm_fused

# What a wait of a kernel calls now and then. A rank that waits shares the cores with those that it waits for.
_CALLED_BY_WAITS = "must_stop"
_WAIT_SECONDS = 0.001
_SEEN: set[interpreter.InterpretedFunction] = set()
_check_operands = TritonSemantic.binary_op_type_checking_impl
_find_np_dtype = interpreter._get_np_dtype
_dot_of_numbers = interpreter.InterpreterBuilder.create_dot


def quicken() -> None:
    """Replace the interpreter's slowest functions by equal ones that compute once what never changes, and its product of bf16,
    which multiplies bits as integers.

    That no int32 overflows, for which the interpreter computes each sum in int64 once more, is checked where CHECK_OVERFLOW=1.
    """
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._patch_builtin = _patch_builtin
    for holder in (language, language.math, core, core.tensor, core.tensor_descriptor_base):
        _builtins(holder)
    interpreter._get_np_dtype = _np_dtype
    checks_overflow = os.environ.get("CHECK_OVERFLOW") == "1"
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=checks_overflow)
    TritonSemantic.binary_op_type_checking_impl = _operands
    interpreter.InterpreterBuilder.create_dot = _dot
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")


def rewrite_all() -> None:
    """Parse all kernels of the package once: ranks that are forked later need not."""
    for module in pkgutil.walk_packages(dlrm_fused.__path__, "dlrm_fused."):
        for value in list(vars(importlib.import_module(module.name)).values()):
            if isinstance(value, interpreter.InterpretedFunction):
                value.rewrite()


def _call(function: interpreter.InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
    """Replaces the language at the first call of each device function only.

    The launch of a kernel has replaced ``triton.language`` already. The device functions of Triton itself look into
    ``triton.language.core``, which the interpreter does not put back.
    """
    if function.fn.__name__ == _CALLED_BY_WAITS:
        time.sleep(_WAIT_SECONDS)
    if function not in _SEEN:
        _SEEN.add(function)
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*arguments, **keywords)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _patch_builtin(holder: Any, _builder: Any, scope: Any) -> None:
    for name, with_semantic in _builtins(holder):
        scope.set_attr(holder, name, with_semantic)


@cache
def _builtins(holder: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of a module or class, as the interpreter calls them. Not to be asked first while they are replaced."""
    members = ((name, member) for name, member in inspect.getmembers(holder) if core.is_builtin(member))
    # What `@builtin` has wrapped: the wrapper only checks that `_semantic` is there.
    return [(name, _with_semantic(getattr(member, "__wrapped__", member))) for name, member in members]


def _with_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **keywords)

    return call


def _np_dtype(dtype: core.dtype) -> np.dtype[Any]:
    element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    return _np_dtype_of_name(element.name) if not element.is_ptr() else np.dtype(np.uint64)


@cache
def _np_dtype_of_name(name: str) -> np.dtype[Any]:
    return _find_np_dtype(next(value for value in vars(core).values() if isinstance(value, core.dtype) and value.name == name))


def _operands(
    semantic: TritonSemantic,
    left: Any,
    right: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Operands of one type stay as they are, except in a division, which may convert."""
    if type(left) is type(right) is core.tensor and not div_or_mod and not left.dtype.is_ptr() and left.type == right.type:
        return left, right
    return _check_operands(semantic, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _dot(builder: Any, left: Any, right: Any, added: Any, *options: Any) -> Any:
    return _dot_of_numbers(builder, _widened(left), _widened(right), added, *options)


def _widened(operand: Any) -> Any:
    """An operand of bf16 in float32, whose upper half it is."""
    if operand.dtype.scalar != core.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), core.float32)


def _init_tensor(tensor: core.tensor, handle: Any, type: core.dtype) -> None:
    tensor.handle = handle
    tensor.type = type
    tensor.dtype = type.scalar
    tensor.shape, tensor.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(int(np.prod(sizes)))


def _init_block_type(block: core.block_type, element: core.dtype, shape: Sequence[Any]) -> None:
    sizes = shape.values if isinstance(shape, core.tuple) else shape
    block.element_ty = element
    block.shape, block.numel = _block_shape(tuple([getattr(size, "value", size) for size in sizes]))


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[core.tuple, int]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), core.validate_block_shape(sizes)
