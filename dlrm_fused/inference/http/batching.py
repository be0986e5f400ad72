"""Makes the next batch of the requests that arrive while the model computes: no request waits for others to come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.inference.export.loader import Inputs
from dlrm_fused.inference.http.limits import Limits

Score = Callable[[Inputs], NDArray[np.float32]]


class Overloaded(Exception):  # noqa: N818 - reads as what happened
    """Raised when more rows wait than the limits allow."""


class _Waiting(NamedTuple):
    inputs: Inputs
    answer: asyncio.Future[NDArray[np.float32]]


class Batcher:
    """Scores the inputs of concurrent requests together, a batch after the other, on a thread of its own.

    Args:
        score: maps the inputs of n rows to probabilities, [n] or [n, L] of several labels.
    """

    def __init__(self, score: Score, limits: Limits, observe: Callable[[int], None]) -> None:
        self._score, self._limits, self._observe = score, limits, observe
        self._waiting: deque[_Waiting] = deque()
        self.waiting_rows = 0
        self._thread = ThreadPoolExecutor(1, "score")
        self._work: asyncio.Task[None] | None = None

    async def score(self, inputs: Inputs) -> NDArray[np.float32]:
        """Return the probabilities of at most ``max_rows`` rows: [n] or [n, L].

        Raises:
            Overloaded: if too many rows wait already.
        """
        if self.waiting_rows + len(inputs) > self._limits.max_waiting_rows:
            raise Overloaded
        answer: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(inputs, answer))
        self.waiting_rows += len(inputs)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score_all())
        return await answer

    async def close(self) -> None:
        """Score the requests that wait, and end the thread."""
        if self._work is not None:
            await self._work
        self._thread.shutdown()

    async def _score_all(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            self._observe(sum(len(each.inputs) for each in batch))
            try:
                inputs = Inputs.join([each.inputs for each in batch])
                results = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, inputs)
            except Exception as error:
                for each in batch:
                    if not each.answer.done():
                        each.answer.set_exception(error)
                continue
            ends = np.cumsum([len(each.inputs) for each in batch])[:-1]
            for each, result in zip(batch, np.split(results, ends), strict=True):
                if not each.answer.done():  # its client may have gone
                    each.answer.set_result(result)

    def _next_batch(self) -> list[_Waiting]:
        """Take the first requests that wait, up to ``max_rows`` rows together."""
        batch: list[_Waiting] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0].inputs) <= self._limits.max_rows):
            batch.append(self._waiting.popleft())
            rows += len(batch[-1].inputs)
        self.waiting_rows -= rows
        return batch
