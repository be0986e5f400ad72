"""Maps over worker processes and over threads whose results come in order, with a bounded number of them under way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from typing import Protocol, TypeVar

from dlrm_fused.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


class OrderedMap(Protocol):
    """Map as the built-in ``map`` does."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]: ...


@contextmanager
def ordered_map(workers: int) -> Iterator[OrderedMap]:
    """A function like the built-in ``map``, run by ``workers`` processes, or by this one if ``workers`` is 1.

    At most ``workers + 2`` items are under way or waiting to be taken, so memory does not grow with their number.

    Raises:
        DataError: if a worker is killed, as happens when memory runs out.
    """
    if workers == 1:
        yield map
        return
    with _one_polars_thread():
        # Not forked: polars' threads would be missing in the child.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
        try:
            yield lambda function, items: _in_order(pool, function, items, workers + 2)
        except BrokenProcessPool:
            raise DataError(f"one of --workers={workers} was killed; if memory ran out, use fewer workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def map_on_threads(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Map as the built-in ``map`` does: for work that NumPy and Arrow do without the interpreter lock.

    At most ``workers + 1`` items are under way or waiting to be taken.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield from _in_order(pool, function, items, workers + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], most: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) == most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _one_polars_thread() -> Iterator[None]:
    """Processes started inside use one thread each; there are as many of them as cores."""
    before = os.environ.get("POLARS_MAX_THREADS")
    os.environ["POLARS_MAX_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["POLARS_MAX_THREADS"]
        if before is not None:
            os.environ["POLARS_MAX_THREADS"] = before


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """End this process when its parent does, however that ends."""
    connection.wait([sentinel])
    os._exit(1)
