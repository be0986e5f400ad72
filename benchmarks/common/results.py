"""Results as JSON: compact, and still a line for each record, so that a change of one shows as a change of one line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Lists and objects of records are divided into lines down to this depth.
_DEPTH = 2


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """``--output`` and ``--commit``, of a benchmark that writes a report."""
    parser.add_argument("--output", type=Path, required=True, help="the report, as JSON")
    parser.add_argument("--commit", help="of this code, where there is no git repository")


def as_json(content: Any) -> str:
    """The content as JSON; each entry of it, and each record of a list or object of records, on a line of its own."""
    return _text(content, _DEPTH) + "\n"


def write_results(path: Path, content: Any) -> None:
    """Write the content as :func:`as_json`, whole or not at all, so that no reader sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(as_json(content))
    unfinished.replace(path)


def _text(value: Any, depth: int) -> str:
    if depth and isinstance(value, dict) and _has_records(value.values(), depth):
        # json.dumps makes text of a key that is a number.
        pairs = (f"{json.dumps({key: 0})[1:-4]}:{_text(entry, depth - 1)}" for key, entry in value.items())
        return "{\n" + ",\n".join(pairs) + "\n}"
    if depth and isinstance(value, (list, tuple)) and _has_records(value, depth):
        return "[\n" + ",\n".join(_text(entry, depth - 1) for entry in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


def _has_records(values: Iterable[Any], depth: int) -> bool:
    return depth == _DEPTH or any(isinstance(value, (dict, list, tuple)) for value in values)
