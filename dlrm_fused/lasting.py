"""State that outlives the call which makes it: tensors that any later call may read, change, or differentiate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def lasting(make: Callable[P, T]) -> Callable[P, T]:
    """Decorates what makes such tensors: they do not depend on the modes under which it happens to be called first.

    Tensors made under ``torch.inference_mode()`` could not be changed by a training step, nor saved for its backward pass.
    Tensors for which no device is named lie on the CPU, whatever ``torch.set_default_device`` was given.
    """

    @wraps(make)
    def made(*arguments: P.args, **keywords: P.kwargs) -> T:
        # Outside of inference mode gradients would be recorded again.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            return make(*arguments, **keywords)

    return made


class lasting_property(cached_property[T]):  # noqa: N801 - as the one that it extends
    """A cached property that is :func:`lasting`."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(lasting(make))
