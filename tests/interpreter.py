"""Triton's interpreter, made faster for tests."""

from __future__ import annotations

import time
from typing import Any

from triton.runtime import interpreter

# What a wait of a kernel calls now and then. A rank that waits shares the cores with those that it waits for.
_CALLED_BY_WAITS = "must_stop"
_WAIT_SECONDS = 0.001
_SEEN: set[interpreter.InterpretedFunction] = set()


def quicken() -> None:
    """Replace Triton's language at the first call of each device function only, not at all: it took a sixth of the time.

    The launch of a kernel has replaced ``triton.language`` already. The device functions of Triton itself look into
    ``triton.language.core``, which the interpreter does not put back.
    """
    interpreter.InterpretedFunction.__call__ = _call


def _call(function: interpreter.InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
    if function.fn.__name__ == _CALLED_BY_WAITS:
        time.sleep(_WAIT_SECONDS)
    if function not in _SEEN:
        _SEEN.add(function)
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*arguments, **keywords)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error
