"""Two processes, and a word of memory that they share."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time

import pytest

from dlrm_fused.symmetric.futex import wait_for_change, wake

LIMIT_SECONDS = 20.0


@pytest.fixture
def word() -> ctypes.c_uint32:
    return ctypes.c_uint32.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))


def seconds_to_wait(word: ctypes.c_uint32, value: int, limit: float) -> float:
    began = time.monotonic()
    wait_for_change(ctypes.addressof(word), value, limit)
    return time.monotonic() - began


def test_who_waits_is_woken_by_a_change_in_another_process(word: ctypes.c_uint32) -> None:
    def change() -> None:
        time.sleep(0.2)
        word.value = 2**32 - 1
        wake(ctypes.addressof(word))

    process = multiprocessing.get_context("fork").Process(target=change)
    process.start()
    assert seconds_to_wait(word, 0, LIMIT_SECONDS) < LIMIT_SECONDS / 2
    assert word.value == 2**32 - 1
    process.join()


def test_who_comes_after_the_change_does_not_wait(word: ctypes.c_uint32) -> None:
    word.value = 7
    assert seconds_to_wait(word, 6, LIMIT_SECONDS) < LIMIT_SECONDS / 2


def test_without_a_change_it_ends_after_the_limit(word: ctypes.c_uint32) -> None:
    assert 0.04 < seconds_to_wait(word, 0, 0.05) < LIMIT_SECONDS / 2
