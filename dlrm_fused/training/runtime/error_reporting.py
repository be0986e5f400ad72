"""Runs the work of a rank: an error is told to the user once, and to the other ranks, which then end too."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from dlrm_fused.errors import ConfigError, UserError
from dlrm_fused.launcher import end_with_torchrun
from dlrm_fused.symmetric.peer_monitor import name_lost_peer
from dlrm_fused.training.runtime.environment import Rank, configure_logging
from dlrm_fused.training.runtime.error_store import ErrorStore
from dlrm_fused.training.runtime.stop_request import Stopped
from dlrm_fused.training.runtime.watchdog import flush

logger = logging.getLogger("dlrm_fused")
_LONGEST_MESSAGE = 2000
# Errors of the operating system that a user can mend; they are reported in one line with the name of the file.
_MENDABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.EMFILE,
    errno.ENAMETOOLONG,
    errno.ENFILE,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
    errno.ESTALE,
}


def run_with_error_reporting(work: Callable[[Rank, ErrorStore], None]) -> None:
    """Run ``work`` on this rank; if it fails, tell all ranks and end with status 1.

    The first rank that fails tells the user: a :class:`UserError` as one line, anything else with its traceback. On other
    hosts, which may have logs of their own, each rank tells what it has met.

    A run that a signal has stopped ends with status 128 + its number.
    """
    end_with_torchrun()
    try:
        rank = Rank.from_environment()
    except ConfigError as error:  # whom else to tell is not known
        sys.exit(f"{socket.gethostname()} ERROR {error}")
    configure_logging(rank)
    threading.excepthook = _thread_failed
    error_store = ErrorStore(rank)
    try:
        with name_lost_peer():
            work(rank, error_store)
    except Stopped as stopped:
        flush()
        os._exit(stopped.status)  # the time is limited, and the interpreter's end takes seconds on a busy machine
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _report(_as_user_error(error), rank, error_store)
        flush()
        with suppress(RuntimeError, OSError):
            error_store.wait_for_readers()
        # sys.exit would not do: threads of collectives that will never complete would keep the process.
        os._exit(1)


def _as_user_error(error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in _MENDABLE:
        return UserError(f"{error.filename or 'a file'}: {error.strerror}")
    return error


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Leave out the traceback of a full disk in TensorBoard's thread: the main thread meets that error too, and reports it."""
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in _MENDABLE):
        threading.__excepthook__(failure)


def _report(error: BaseException, rank: Rank, error_store: ErrorStore) -> None:
    is_first = error_store.announce(f"{rank} failed: {_one_line(error) or type(error).__name__}")
    if isinstance(error, KeyboardInterrupt):
        return
    if not is_first and isinstance(error, UserError) and _is_told_here(rank, error_store):
        return
    if isinstance(error, UserError):
        logger.error(_one_line(error))
    elif is_first:
        logger.error("%s", "".join(traceback.format_exception(error)).rstrip())


def _is_told_here(rank: Rank, error_store: ErrorStore) -> bool:
    """Return whether the first failure was that of a rank of this host, and so is in the log of this host."""
    try:
        first = error_store.failure_of_another()
    except (RuntimeError, OSError):
        return False  # nobody can be asked any more
    return first is None or f" on {rank.host} failed: " in first


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_MESSAGE]
