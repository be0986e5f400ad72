"""One writer at a time in a run's folder: by a lock, and by a sign of life where locks say nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrm_fused.errors import ConfigError
from dlrm_fused.training import run_lock
from dlrm_fused.training.run_lock import RunLock

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_SECONDS_BETWEEN_BEATS", 0.05)


@contextmanager
def writer(folder: Path) -> Iterator[int]:
    """Another process that holds the lock; gives its id."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with RunLock(folder) as lock:
            lock.acquire()
            ready.set()
            signal.pause()

    process = context.Process(target=hold)
    process.start()
    assert ready.wait(30)
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with writer(folder) as pid, pytest.raises(ConfigError, match=f"process {pid} on {HERE} has been writing there since"):
        RunLock(folder, wait_seconds=0.3).acquire()


def test_a_folder_has_one_lock_by_whatever_name(tmp_path: Path) -> None:
    folder, link = tmp_path / "large/run", tmp_path / "run"
    folder.mkdir(parents=True)
    link.symlink_to(folder)
    with writer(folder) as pid, pytest.raises(ConfigError, match=f"process {pid} on {HERE}"):
        RunLock(link, wait_seconds=0.3).acquire()


def test_a_killed_writer_leaves_the_folder_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with writer(folder) as pid:
        os.kill(pid, signal.SIGKILL)
        with RunLock(folder, wait_seconds=10) as lock:
            lock.acquire()


def test_a_writer_that_is_done_leaves_the_folder_free(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLock(tmp_path / "run", wait_seconds=0) as lock:
            lock.acquire()


def record(folder: Path, beat: int) -> None:
    """As a writer on another host leaves it, whose lock is not seen here."""
    content = {"host": "elsewhere", "pid": 7, "since": "2026-11-25T16:00:00+00:00", "beat": beat}
    (folder.parent / f".{folder.name}.lock").write_text(json.dumps(content))


def test_a_dead_writer_of_another_host_leaves_the_folder_free(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    with RunLock(tmp_path / "run", wait_seconds=0) as lock:
        lock.acquire()


def test_a_writer_of_another_host_whose_lock_is_not_seen_is_known_by_its_signs_of_life(tmp_path: Path) -> None:
    folder, beats = tmp_path / "run", iter(range(1000))
    record(folder, next(beats))
    lock = RunLock(folder, wait_seconds=0.2)
    read = lock._read_anew

    def read_while_it_lives() -> object:
        record(folder, next(beats))
        return read()

    lock._read_anew = read_while_it_lives  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="process 7 on elsewhere"):
        lock.acquire()


@pytest.mark.parametrize("is_alive", [True, False])
def test_without_locks_a_sign_of_life_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    folder = tmp_path / "run"
    with writer(folder) as pid:
        lock = RunLock(folder, wait_seconds=0.2)
        if is_alive:
            with pytest.raises(ConfigError, match=f"process {pid} on {HERE}"):
                lock.acquire()
            return
        os.kill(pid, signal.SIGKILL)
        with lock:
            lock.acquire()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir="):
        RunLock(tmp_path / "file" / "run").acquire()
