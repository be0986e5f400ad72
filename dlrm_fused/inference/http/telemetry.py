"""Metrics of the service for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """Counts requests, their times and the rows of batches.

    Attributes:
        seconds: seconds from the first byte of a request to its answer.
    """

    def __init__(self, waiting_rows: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("dlrm_requests", "Requests for predictions", ["status"], registry=self.registry)
        self.seconds = Histogram("dlrm_request_seconds", "Time to answer", buckets=_SECONDS, registry=self.registry)
        self.batch_rows = Histogram("dlrm_batch_rows", "Rows scored at once", buckets=_ROWS, registry=self.registry)
        waiting = Gauge("dlrm_waiting_rows", "Rows that wait for their batch", registry=self.registry)
        waiting.set_function(waiting_rows)
