"""Names that features may have, and the names of the modules that belong to them in a model.

A feature keeps the name of its column everywhere but in modules, whose names cannot have a dot nor be those of an attribute of
``torch.nn.ModuleDict``, such as ``type`` and ``items``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import quote, unquote

from dlrm_fused.errors import DataError

_ESCAPED = "escaped%"  # before the names of modules that are not those of their features
_TABLES = "embedding_bags"  # TorchRec's module; its name tells parameters of tables from others


def check_names(names: Iterable[str], where: str, remedy: str) -> None:
    """
    Args:
        where: begins the message.
        remedy: ends it.

    Raises:
        DataError: if a feature cannot have its name: empty, or with characters that a line of text cannot show.
    """
    for name in names:
        if not name or any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name):
            raise DataError(f"{where} {name!r}: allowed: a name that is not empty and has no control characters; {remedy}")


def module_name(feature: str) -> str:
    """Return the module of a feature: its name, unless a module cannot have that."""
    is_free = feature and "." not in feature and not hasattr(_module_dict(), feature)
    if is_free and feature != _TABLES and not feature.startswith(_ESCAPED):
        return feature
    return _ESCAPED + quote(feature, safe="").replace(".", "%2E")


def feature_name(module: str) -> str:
    """Return the feature of a module that :func:`module_name` has named."""
    return unquote(module.removeprefix(_ESCAPED)) if module.startswith(_ESCAPED) else module


@cache
def _module_dict() -> Any:
    from torch import nn  # here, since data/prepare.py does without torch

    return nn.ModuleDict()
