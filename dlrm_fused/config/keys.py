"""The dotted names of settings, their types, and in words what those allow."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from dlrm_fused.config.schema import Config, TableConfig

TABLES = "embedding.tables"
# Types of settings that have a member for each table or label, and those of their members.
_BY_NAME: dict[Any, Any] = {dict[str, TableConfig]: TableConfig, dict[str, float]: float}

_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of whole numbers, such as [64,32]",
    list[str]: "a list of texts, such as [clicked,bought]",
    dict[str, TableConfig]: "a group of settings for each table, by its name",
    dict[str, float]: "a number for each label, by its name",
}


def known_keys() -> list[str]:
    """Dotted names of all settings, in the order of the schema."""
    return [key for key, _ in leaves(Config())]


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a group, and of the groups in it, by its dotted name; members by name as a whole."""
    for each in fields(group):
        value = getattr(group, each.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", value


def member_type(group: Any, name: str) -> Any:
    """Return the type of a setting of a group; None for a name that the group does not have."""
    return _BY_NAME[group] if group in _BY_NAME else _types(group).get(name)


@cache
def _types(group: Any) -> dict[str, Any]:
    return get_type_hints(group)


def type_of(key: str) -> Any:
    """Return the type of a known setting; ``key`` may name a member of a list."""
    kind: Any = Config
    for part in key.partition("[")[0].split("."):
        kind = member_type(kind, part)
    return kind


def is_group(kind: Any) -> bool:
    """Return whether a setting of this type has settings of its own."""
    return is_dataclass(kind) or kind in _BY_NAME


def allowed(kind: Any) -> str:
    """Return the values that a setting of this type may have, in words."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(member.name for member in kind)
    if is_dataclass(kind):
        return "a group of settings: " + ", ".join(each.name for each in fields(kind))
    return _IN_WORDS[kind]


def nearest(unknown: str) -> str:
    """Return the setting that an unknown name may have been meant for, by its whole path; those of single tables included."""
    parts = unknown.split(".")
    candidates = [] if unknown.startswith(f"{TABLES}.") else known_keys()
    if len(parts) >= 4:
        candidates += [f"{TABLES}.{parts[2]}.{each.name}" for each in fields(TableConfig)]
    return difflib.get_close_matches(unknown, candidates, n=1, cutoff=0.0)[0]
