"""One writer at a time in a run's folder, also where hosts share it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from dlrm_fused.errors import ConfigError
from dlrm_fused.training.runtime.watchdog import flush

logger = logging.getLogger("dlrm_fused")

_HELD = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_SECONDS_BETWEEN_BEATS = 2.0
_BEATS_OF_SILENCE = 5  # after so many, a writer that no lock speaks for is dead


@dataclass(frozen=True)
class _Writer:
    """The writer, as the lock's file names it; ``beat`` grows as long as it lives."""

    host: str
    pid: int
    since: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} has been writing there since {self.since}"

    def is_same(self, other: _Writer | None) -> bool:
        return other is not None and (self.host, self.pid, self.since) == (other.host, other.pid, other.since)


class RunLock:
    """The right to write a run's folder, which lies in the file ``.<name>.lock`` beside it.

    A lock of the file (POSIX ``fcntl``, which NFS 4 and Lustre have, too) tells writers apart, and is free as soon as its
    process has ended, however that happened. Some file systems have none, or one that other hosts do not see. So the file also
    says who writes, with a number that grows every two seconds: a writer on another host is alive if it does.

    Args:
        folder: of the run; it may be moved while the lock is held.
        wait_seconds: for another writer to end, as one does whose launcher was killed.
    """

    def __init__(self, folder: Path, wait_seconds: float = 40.0) -> None:
        self._folder = folder
        # A link leads to a folder that others may know by another name.
        real = folder.resolve() if folder.is_symlink() else folder
        self._path = real.with_name(f".{real.name}.lock")
        self._wait_seconds = wait_seconds
        self._writer = _Writer(socket.gethostname(), os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds"))
        self._file: int | None = None
        self._dead: _Writer | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def acquire(self) -> None:
        """Become the writer, unless this process is already, after another one has ended.

        Raises:
            ConfigError: if another one writes for longer than ``wait_seconds``, or the file cannot be written.
        """
        if self._file is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ConfigError(f"output_dir={self._path.parent}: {self._path} cannot be written: {error.strerror}") from None
        self._thread.start()

    def _acquire(self) -> None:
        until = time.monotonic() + self._wait_seconds
        has_told = False
        while (other := self._try()) is not None:
            if time.monotonic() > until:
                raise ConfigError(f"{self._folder}: {other}; stop it first, or choose another name=")
            if not has_told:
                logger.info("%s: %s; waiting for its end", self._folder, other)
                has_told = True
            time.sleep(0.2)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._ends.set()
            self._thread.join()
            with suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)  # frees the lock
            self._file = None

    def _try(self) -> _Writer | str | None:
        """Try to become the writer: return the one that writes instead, or None if this process does from now on."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        has_locks, other = _lock(file), _read(file)
        if has_locks is False:
            os.close(file)
            return other or "another process writes there"
        speaks_for_itself = not has_locks or (other is not None and other.host != self._writer.host)
        if speaks_for_itself and other is not None and other != self._dead:
            os.close(file)  # watching opens and closes the file again, which would free the lock unnoticed
            alive = self._seen_alive(other)
            self._dead = other
            return alive or self._try()
        _write(file, self._writer)
        if not has_locks:
            time.sleep(_SECONDS_BETWEEN_BEATS)  # of two that begin at once, the later one writes
            if not self._writer.is_same(now := _read(file)):
                os.close(file)
                return now
        self._file = file
        return None

    def _seen_alive(self, other: _Writer) -> _Writer | None:
        """Wait for a sign of life: return the writer if its number grows, else None."""
        for _ in range(_BEATS_OF_SILENCE):
            time.sleep(_SECONDS_BETWEEN_BEATS)
            now = self._read_anew()
            if now != other:
                return now
        return None

    def _read_anew(self) -> _Writer | None:
        """Read the writer from a newly opened file: at opening, a network file system asks its server."""
        with self._path.open("rb") as file:
            return _read(file.fileno())

    def _beat(self) -> None:
        beat = 0
        while not self._ends.wait(_SECONDS_BETWEEN_BEATS):
            assert self._file is not None
            with suppress(OSError):
                now = _read(self._file)
                if now is not None and not self._writer.is_same(now):
                    logger.error("%s: %s, who took this process for dead; it ends", self._folder, now)
                    flush()
                    os._exit(1)
                beat += 1
                _write(self._file, _Writer(self._writer.host, self._writer.pid, self._writer.since, beat))


def _lock(file: int) -> bool | None:
    """Return whether this process has the lock now; None if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read(file: int) -> _Writer | None:
    try:
        return _Writer(**json.loads(os.pread(file, 1000, 0)))
    except (ValueError, TypeError):
        return None  # empty, or being written


def _write(file: int, writer: _Writer) -> None:
    """Write in place, always the same number of bytes, so that a reader never sees a part."""
    os.pwrite(file, json.dumps(asdict(writer)).encode().ljust(500), 0)
    os.ftruncate(file, 500)
    os.fsync(file)
