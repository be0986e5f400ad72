"""Records in JSON files: dataclasses, read with a check of every field's type."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dlrm_fused.errors import UserError

Record = TypeVar("Record")
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON, as :func:`replace_text` does."""
    replace_text(path, json.dumps(asdict(record), indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 that is complete and on disk when this returns; a failure leaves the one before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path, error: type[UserError], remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        error: what is raised.
        remedy: what to do about a file that cannot be read; ends the message.

    Raises:
        error: names the file; it is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise error(f"{path}: missing; {remedy}") from None
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason.strerror}); {remedy}") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path}: damaged ({reason}); {remedy}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: damaged: holds {_shown(content)}, expected an object; {remedy}")
    return content


def read_record(path: Path, kind: type[Record], error: type[UserError], remedy: str, version: int | None = None) -> Record:
    """Return a dataclass from its JSON file. Fields that the file lacks have their defaults.

    Args:
        version: what ``format_version`` must be, of records that have one.

    Raises:
        error: as :func:`read_json`; or a field is unknown, missing or of another type. The message names file and field.
    """
    content = read_json(path, error, remedy)
    if version is not None and content.get("format_version") != version:
        found = _shown(content.get("format_version"))
        raise error(f"{path}: format version {found}, this release reads {version}; {remedy}")
    try:
        return parse_record(content, kind)
    except ValueError as reason:
        raise error(f"{path}: damaged: {reason}; {remedy}") from None


def parse_record(content: Any, kind: type[Record]) -> Record:
    """Return a dataclass from what :mod:`json` has read.

    Raises:
        ValueError: names the field.
    """
    return cast(Record, _parse(content, kind, "the record"))


def _parse(value: Any, kind: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return value
    if is_dataclass(kind):
        return _parse_fields(value, cast(type, kind), name)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        [other] = [each for each in arguments if each is not type(None)]
        return _parse(value, other, name)
    if origin in (dict, Mapping):
        if isinstance(value, dict):
            return {key: _parse(each, arguments[1], f"{name}[{key!r}]") for key, each in value.items()}
        raise _wrong(value, "an object", name)
    if origin in (list, tuple, Sequence):
        if isinstance(value, list):
            items = (_parse(each, arguments[0], f"{name}[{at}]") for at, each in enumerate(value))
            return list(items) if origin is list else tuple(items)
        raise _wrong(value, "a list", name)
    # A bool is an int to Python, and 1 is a number that may be written without a point.
    is_right = type(value) is kind or (kind is float and type(value) is int)
    if not is_right:
        raise _wrong(value, _NAMES[kind], name)
    return value


def _parse_fields(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(value, "an object", name)
    types_of, known = get_type_hints(kind), {field.name: field for field in fields(kind) if field.init}
    prefix = "" if name == "the record" else f"{name}."
    for unknown in value.keys() - known.keys():
        raise ValueError(f"{prefix}{unknown} is unknown")
    for field in known.values():
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**{key: _parse(each, types_of[key], f"{prefix}{key}") for key, each in value.items()})


def _wrong(value: Any, expected: str, name: str) -> ValueError:
    return ValueError(f"{name} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
