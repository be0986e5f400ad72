"""Defines the paths of the service, their answers, and its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from dlrm_fused.inference.export.loader import Model
from dlrm_fused.inference.http.batching import Batcher, Overloaded
from dlrm_fused.inference.http.limits import Limits
from dlrm_fused.inference.http.requests import by_row, parse, read_body, request_schema

logger = logging.getLogger("uvicorn.error")

_LARGE_BODY_BYTES = 2**16  # reading such a body may take seconds, which other requests do not wait for
_CLIENT_GONE = 499  # nginx's status, for the metrics alone: nobody reads the answer

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def build_service(model: Model, limits: Limits) -> FastAPI:
    """Return the ASGI application that predicts with a model."""
    registry = CollectorRegistry()
    requests = Counter("dlrm_requests", "Requests for predictions", ["status"], registry=registry)
    seconds = Histogram("dlrm_request_seconds", "Time to answer", buckets=_SECONDS, registry=registry)  # from the first byte on
    batch_rows = Histogram("dlrm_batch_rows", "Rows scored at once", buckets=_ROWS, registry=registry)
    batcher = Batcher(model.score, limits, batch_rows.observe)
    waiting = Gauge("dlrm_waiting_rows", "Rows that wait for their batch", registry=registry)
    waiting.set_function(lambda: batcher.waiting_rows)
    reader = ThreadPoolExecutor(1, "read")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await batcher.close()
        reader.shutdown()

    service = FastAPI(title=f"dlrm_fused: {model.info['run']}, step {model.info['step']}", lifespan=lifespan)

    @service.post("/predict", openapi_extra=request_schema(model), summary="Probabilities of rows")
    async def predict(request: Request) -> Response:
        began = time.perf_counter()
        try:
            body = await read_body(request, limits)
            if len(body) < _LARGE_BODY_BYTES:
                inputs = parse(body, model, limits)
            else:
                inputs = await asyncio.get_running_loop().run_in_executor(reader, parse, body, model, limits)
            answer = JSONResponse({"probabilities": by_row(await batcher.score(inputs), model.labels)})
        except HTTPException as error:
            answer = _refusal(error.status_code, error.detail)
        except Overloaded:
            answer = _refusal(503, f"{batcher.waiting_rows} rows are waiting; try again later")
            answer.headers["Retry-After"] = "1"
        except ClientDisconnect:
            answer = _refusal(_CLIENT_GONE, "")
        except Exception:
            logger.exception("a batch could not be scored")
            answer = _refusal(500, "internal error; the log of the service has the reason")
        requests.labels(answer.status_code).inc()
        seconds.observe(time.perf_counter() - began)
        return answer

    @service.get("/health", summary="The model that is served")
    async def health() -> dict[str, Any]:
        return {name: model.info[name] for name in ("run", "step", "table_dtype")}

    @service.get("/metrics", summary="For Prometheus", response_class=Response)
    async def prometheus() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return service


def _refusal(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"detail": reason}, status)
