"""Row groups that are being read or have lately been used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

_Content = TypeVar("_Content")


class RowGroupCache(Generic[_Content]):
    """Reads row groups in background threads, each once for as long as it is in use; all methods may be called by any thread.

    It holds twice as many row groups as the largest request names, and two more: those that batches are made of, and those
    that follow. What was used last is kept.

    Args:
        read: gives the content of a row group, by its number.
    """

    def __init__(self, read: Callable[[int], _Content], pool: ThreadPoolExecutor) -> None:
        self._read = read
        self._pool = pool
        self._lock = Lock()
        self._held: OrderedDict[int, Future[_Content]] = OrderedDict()
        self._largest_request = 0

    def request(self, numbers: Collection[int]) -> dict[int, Future[_Content]]:
        """Have row groups read, in the order of ``numbers``; does not wait.

        Returns:
            For each number, its content once it is read; or the exception that ``read`` raised.
        """
        with self._lock:
            self._largest_request = max(self._largest_request, len(numbers))
            for number in numbers:
                if number not in self._held:
                    self._held[number] = self._pool.submit(self._read, number)
                self._held.move_to_end(number)
            requested = {number: self._held[number] for number in numbers}
            while len(self._held) > 2 * self._largest_request + 2:
                self._held.popitem(last=False)
            return requested

    def __len__(self) -> int:
        return len(self._held)
