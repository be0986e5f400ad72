"""torchrun that ends without a traceback after a signal, and ranks that end when their torchrun has been killed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

# Statuses of a rank that SIGINT or SIGTERM has stopped.
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
_SECONDS_BETWEEN_LOOKS = 0.5
_is_watched = False


def torchrun(arguments: Sequence[str]) -> int:
    """torchrun, except that a run which a signal has stopped ends without a traceback, and with 128 + the signal's number.

    Args:
        arguments: those of torchrun.

    Returns:
        the exit code.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(arguments)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        if statuses <= STOPPED:
            return max(statuses)
        raise
    return 0


def end_with_torchrun() -> None:
    """End this process when torchrun, its parent, has ended without ending it, as happens when torchrun is killed.

    To be called first, before imports that take seconds. Does nothing in a process that torchrun has not started.
    """
    global _is_watched
    if _is_watched or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _is_watched = True
    if _has_lost_its_store():
        _end()
    threading.Thread(target=_watch, args=(os.getppid(),), name="torchrun-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _end()


def _has_lost_its_store() -> bool:
    """Return whether torchrun ended before this process saw who its parent is: its store is there before its ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # nothing is known
    return False


def _end() -> None:
    sys.stderr.write(f"rank {os.environ.get('RANK')} on {socket.gethostname()}: torchrun has ended, so this process ends\n")
    sys.stderr.flush()
    os._exit(1)
