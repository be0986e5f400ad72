"""Reads rows from the body of a request, or answers with the status that says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from fastapi import HTTPException, Request
from numpy.typing import NDArray

from dlrm_fused.inference.export.loader import InputError, Inputs, Model
from dlrm_fused.inference.http.limits import Limits

_BODY_SECONDS = 30  # for a body to arrive
_HISTORY = "past interactions, oldest first: all, or more than the model reads, since the time before the oldest read counts"


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body.

    Raises:
        HTTPException: 413 if it is too large, 408 if it does not arrive.
    """
    size, parts = 0, []
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            # A body that is too large is read to its end, and forgotten: clients that are still sending see no answer.
            async for part in request.stream():
                size += len(part)
                if size <= limits.max_body_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        raise HTTPException(408, f"the body has not arrived within {_BODY_SECONDS} s") from None
    if size > limits.max_body_bytes:
        raise HTTPException(413, f"the body has {size} bytes; allowed: {limits.max_body_bytes}; send fewer rows at a time")
    return b"".join(parts)


def parse(body: bytes, model: Model, limits: Limits) -> Inputs:
    """Return the model's inputs for the rows in a body.

    Raises:
        HTTPException: 400 if it is no JSON, 413 if it has too many rows, 422 if rows cannot be used.
    """
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {str(error)[:200] or type(error).__name__}") from None
    rows = content.get("rows") if isinstance(content, dict) and content.keys() == {"rows"} else None
    if not isinstance(rows, list):
        raise HTTPException(422, 'the body must be an object with a list of rows: {"rows": [{...}]}')
    if len(rows) > limits.max_rows:
        raise HTTPException(413, f"{len(rows)} rows; allowed: {limits.max_rows} in a request")
    try:
        return model.encode(rows)
    except InputError as error:
        raise HTTPException(422, str(error)) from None


def by_row(probabilities: NDArray[np.float32], labels: Sequence[str]) -> list[Any]:
    """Return the answer for each row: a number, or for several labels a number by the name of each."""
    rows: list[Any] = probabilities.tolist()
    return rows if len(labels) == 1 else [dict(zip(labels, row, strict=True)) for row in rows]


def request_schema(model: Model) -> dict[str, Any]:
    """Return the description of a request in /docs: the features of a row."""
    features: dict[str, dict[str, Any]] = {name: {} for name in sorted(model.rows.features())}
    for number in model.rows.numbers:
        features[number.name] = {"description": number.allowed}
    named = {**{name: value for name, value in model.rows.tokens.items() if name in features}, **model.rows.categories}
    for name, values in named.items():
        features[name] = {"description": f"a list of {values.allowed}" if values.is_list else values.allowed}
    if model.rows.time is not None:
        features[model.rows.time.name] = {"description": model.rows.time.allowed}
    if model.rows.tokens:
        features[model.rows.history] = {"description": _HISTORY, "type": "array"}
    row = {"type": "object", "properties": features, "required": list(features), "additionalProperties": False}
    body = {"type": "object", "properties": {"rows": {"type": "array", "items": row}}, "required": ["rows"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
