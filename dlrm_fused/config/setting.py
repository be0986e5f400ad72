"""A setting of a group: its default, and the values that are allowed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dlrm_fused.errors import ConfigError

_BOUND, _USED = "bound", "used"


@dataclass(frozen=True)
class Bound:
    """The values that a setting may have, as a test and in words."""

    allows: Callable[[Any], bool]
    words: str


def setting(default: Any, bound: Bound | None = None, *, used: Callable[[Any], bool] | None = None) -> Any:
    """Return a field of a dataclass of settings.

    Args:
        default: its value; a list or a group is copied for each owner.
        bound: holds for every value, of numbers by name for each of them; None allows all of its type.
        used: asked of the whole config, whether the setting means something there; otherwise its bound does not hold.
    """
    metadata = {_BOUND: bound, _USED: used}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_bounds(config: Any) -> None:
    """Compare every setting of a config with its bound; numbers must be finite too.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    for key, value, bound, used in _bounded(config, ""):
        require(not isinstance(value, float) or math.isfinite(value), key, value, "a finite number")
        if bound is not None and (used is None or used(config)):
            require(bound.allows(value), key, value, bound.words)


def _bounded(group: Any, prefix: str) -> Iterator[tuple[str, Any, Bound | None, Callable[[Any], bool] | None]]:
    """(name, value, bound, used) of the settings of a group and of the groups in it, which may be members of a dict."""
    for each in fields(group):
        key, value = f"{prefix}{each.name}", getattr(group, each.name)
        if is_dataclass(value):
            yield from _bounded(value, f"{key}.")
        elif isinstance(value, dict):
            for name, member in value.items():
                if is_dataclass(member):
                    yield from _bounded(member, f"{key}.{name}.")
                else:
                    yield f"{key}.{name}", member, each.metadata.get(_BOUND), each.metadata.get(_USED)
        else:
            yield key, value, each.metadata.get(_BOUND), each.metadata.get(_USED)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Refuse the value of a setting.

    Raises:
        ConfigError: without the condition.
    """
    if not condition:
        raise ConfigError(f"{key}={value}: allowed: {allowed}")


def at_least(minimum: int, unit: str = "") -> Bound:
    return Bound(lambda value: value >= minimum, f"{minimum} {unit} or more" if unit else f"{minimum} or more")


def between(minimum: int, maximum: int) -> Bound:
    return Bound(lambda value: minimum <= value <= maximum, f"{minimum} to {maximum}")


def multiple_of(factor: int) -> Bound:
    return Bound(lambda value: value > 0 and value % factor == 0, f"a positive multiple of {factor}")


def one_of(*choices: str) -> Bound:
    return Bound(lambda value: value in choices, ", ".join(choices))


def each_positive(words: str, *, minimum_length: int = 0) -> Bound:
    """Return the bound of a list of int: each is 1 or more, and there are ``minimum_length`` of them or more."""
    return Bound(lambda values: len(values) >= minimum_length and all(value >= 1 for value in values), words)


POSITIVE = Bound(lambda value: value > 0, "a positive number")
BELOW_ONE = Bound(lambda value: 0 <= value < 1, "0 to below 1")
