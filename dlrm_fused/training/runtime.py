"""What surrounds the work of one process: its rank and device, process groups, log lines, and failing together.

A run ends on all ranks when it ends on one. Every rank reports a failure to a key-value store that all ranks can reach
(that of torchrun's rendezvous), and a thread of each rank, the :class:`Watchdog`, looks there once a second; it also gives
signs of life, and watches those of the next rank, so that a host that has vanished is noticed. The main thread may be blocked
in a collective that will never complete; hence the watchdog ends the process itself.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import logging
import os
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from dlrm_fused.config import Config, Precision
from dlrm_fused.errors import ConfigError, UserError

logger = logging.getLogger("dlrm_fused")

_FAILURE_KEY = "failure"
_LONGEST_MESSAGE = 2000
# Failures of the operating system that a user can mend: the message names the file.
_MENDABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_HEARTBEAT_SECONDS = 1.0
_STORE_TIMEOUT = timedelta(seconds=10)
# A collective that outlasts this was caused by something the watchdog did not see.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Rank:
    """This process among all processes of the run, as torchrun states it; a process without torchrun is alone."""

    index: int
    world_size: int
    local_index: int
    host: str

    @staticmethod
    def from_environment() -> Rank:
        return Rank(
            index=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_index=int(os.environ.get("LOCAL_RANK", "0")),
            host=socket.gethostname(),
        )

    def __str__(self) -> str:
        return f"rank {self.index} on {self.host}"


def configure_logging(rank: Rank) -> None:
    """Log lines say when, which host and which rank; ranks above 0 only say what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank.host} rank {rank.index} %(levelname)s %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank.index == 0 else logging.WARNING)
    # Deprecations inside torch and torchrec, repeated by every rank, are nothing a user can mend.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics|tensordict)\b")
    for library in ("torch", "torchrec"):
        logging.getLogger(library).setLevel(logging.ERROR)


class ArgumentParser(argparse.ArgumentParser):
    """Of a program whose work is run by :func:`run_with_error_reporting`, so that one rank tells the user what is wrong, not
    each."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")


class ErrorStore:
    """Where the first failure of a run is written, for all ranks to see."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store: dist.Store | None = None

    def store(self) -> dist.Store | None:
        """The store of the rendezvous, through a connection of its own.

        None for a process without torchrun, and as long as there is no store: one that is not torchrun's own begins with the
        process group.
        """
        if self._store is None and (_is_agents_store() or (self._rank.world_size > 1 and dist.is_initialized())):
            self._store = dist.PrefixStore("dlrm_fused", _rendezvous_store(_STORE_TIMEOUT))
        return self._store

    def announce(self, message: str) -> bool:
        """Post a failure; True if it is the first, so that this rank is the one to tell the user."""
        try:
            store = self.store()
            if store is None:
                return True
            posted = f"{self._rank.index} {message}".encode()
            return bool(store.compare_set(_FAILURE_KEY, "", posted.decode()) == posted)
        except (RuntimeError, OSError):
            return True  # nobody else can be asked

    def failure_of_another(self) -> str | None:
        """The posted failure, unless it is this rank's own."""
        store = self.store()
        if store is None or not store.check([_FAILURE_KEY]):
            return None
        index, message = store.get(_FAILURE_KEY).decode().split(" ", 1)
        return None if int(index) == self._rank.index else message


def _rendezvous_store(timeout: timedelta) -> dist.Store:
    """A connection of its own to torchrun's store, where nothing is left of an attempt before this one."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    if not _is_agents_store():
        return store  # that of this attempt's rank 0
    # The agent's outlives attempts. Their count is that of one agent: on many nodes it differs, hence
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Watchdog:
    """Ends this process when another rank has failed or vanished.

    Use as a context around all that other ranks take part in, and call :meth:`peers_have_joined` when the process group is up:
    before that, a rank may be silent because it still starts.

    One thread talks to the store; a call of it may hang as long as the network does. A second one ends the process when the
    first has heard nothing for too long. Both count their own beats, not the time of day: a pause of the whole run (Ctrl-Z, a
    frozen container) is no silence.

    Args:
        peer_timeout_seconds: how long a rank may give no sign of life.
        end: called with the reason, None if another rank tells it; the default logs it and ends the process.
    """

    def __init__(
        self, rank: Rank, board: ErrorStore, peer_timeout_seconds: float, end: Callable[[str | None], None] | None = None
    ) -> None:
        self._rank = rank
        self._board = board
        self._timeout = peer_timeout_seconds
        self._end = end or _end_process
        self._stop = threading.Event()
        self._contacts = 0
        self._expects_signs = False
        self._threads = [
            threading.Thread(target=work, name=f"watchdog-{work.__name__.strip('_')}", daemon=True)
            for work in (self._exchange_signs, self._watch_contact)
        ]

    def __enter__(self) -> Watchdog:
        self._start()
        return self

    def peers_have_joined(self) -> None:
        """From now on a rank that gives no sign of life is taken for lost."""
        self._expects_signs = True
        self._start()  # now, where the store began with the process group

    def _start(self) -> None:
        if self._rank.world_size > 1 and self._board.store() is not None and not self._threads[0].is_alive():
            for thread in self._threads:
                thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            return  # the process is about to end, and must, even if the store cannot be told
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=_STORE_TIMEOUT.total_seconds())

    def _exchange_signs(self) -> None:
        store = self._board.store()
        assert store is not None
        own, watched = f"alive/{self._rank.index}", f"alive/{(self._rank.index + 1) % self._rank.world_size}"
        sign, silence = "", 0.0
        for beat in itertools.count():
            if self._stop.wait(_HEARTBEAT_SECONDS):
                # The rank that watches this one must not take its end for a loss.
                with suppress(RuntimeError, OSError):  # unless it has ended already, and the store with it
                    store.set(own, f"done {self._rank.host}")
                return
            try:
                store.set(own, f"{beat} {self._rank.host}")
                failure = self._board.failure_of_another()
                new_sign = store.get(watched).decode() if store.check([watched]) else ""
            except (RuntimeError, OSError):
                continue  # the other thread counts how long this goes on
            self._contacts += 1
            if failure is not None:
                # A warning: that rank itself has told the user what is wrong.
                logger.warning("stopping, because %s", failure)
                return self._end(None)
            if new_sign != sign or new_sign.startswith("done") or not self._expects_signs:
                sign, silence = new_sign, 0.0
                continue
            silence += _HEARTBEAT_SECONDS
            if silence > self._timeout:
                message = self._silence_of(watched, sign)
                self._board.announce(message)
                return self._end(message)

    def _silence_of(self, watched: str, last_sign: str) -> str:
        host = last_sign.split(" ", 1)[1] if last_sign else "an unknown host"
        return (
            f"rank {watched.removeprefix('alive/')} on {host} has given no sign of life for {self._timeout:.0f} s "
            "(runtime.peer_timeout_seconds): its host or the network is down"
        )

    def _watch_contact(self) -> None:
        contacts, silence = self._contacts, 0.0
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            silence = silence + _HEARTBEAT_SECONDS if contacts == self._contacts else 0.0
            contacts = self._contacts
            if silence > self._timeout:
                return self._end(
                    f"the rendezvous store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} has not answered "
                    f"for {self._timeout:.0f} s (runtime.peer_timeout_seconds): its host or the network is down"
                )


def _end_process(reason: str | None) -> None:
    if reason is not None:
        logger.error(reason)
    _flush()
    os._exit(1)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_MESSAGE]


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def run_with_error_reporting(work: Callable[[Rank, ErrorStore], None]) -> None:
    """Run ``work`` on this rank; if it fails, tell all ranks and end with status 1.

    The first rank that fails tells the user: a :class:`UserError` as one line, anything else with its traceback.
    """
    rank = Rank.from_environment()
    configure_logging(rank)
    threading.excepthook = _thread_failed
    board = ErrorStore(rank)
    try:
        work(rank, board)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _report(_as_user_error(error), rank, board)
        # Not sys.exit: threads of collectives that will never complete would keep the process.
        _flush()
        os._exit(1)


def _as_user_error(error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in _MENDABLE:
        return UserError(f"{error.filename or 'a file'}: {error.strerror}")
    return error


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread tells the main one of a full disk, which tells the user."""
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in _MENDABLE):
        threading.__excepthook__(failure)


def _report(error: BaseException, rank: Rank, board: ErrorStore) -> None:
    is_first = board.announce(f"{rank} failed: {_one_line(error) or type(error).__name__}")
    if isinstance(error, KeyboardInterrupt):
        return
    if not is_first and isinstance(error, UserError):
        return
    if isinstance(error, UserError):
        logger.error(_one_line(error))
    elif is_first:
        logger.error("%s", "".join(traceback.format_exception(error)).rstrip())


def choose_device(setting: str, rank: Rank) -> torch.device:
    """The device of this rank: ``cpu``, ``cuda``, or ``auto`` for cuda where there is one.

    Raises:
        ConfigError: if the host has fewer GPUs than ranks.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"runtime.device={setting}: PyTorch finds no GPU on this host; allowed here: cpu")
    if rank.local_index >= count:
        raise ConfigError(
            f"runtime.device={setting}: {rank} is local rank {rank.local_index}, but the host has {count} GPUs; "
            "start fewer processes with --nproc-per-node"
        )
    device = torch.device("cuda", rank.local_index)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(rank: Rank, device: torch.device) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for those on GPUs."""
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), LOCAL_WORLD_SIZE="1")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        # torch itself would meet the addresses of an earlier attempt in an agent's store, and wait for them.
        store=_rendezvous_store(_COLLECTIVE_TIMEOUT) if _is_agents_store() else None,
        rank=rank.index,
        world_size=rank.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    yield
    # Not in a finally: after a failure other ranks may never join, and the process is about to end anyway.
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def apply_numerics(config: Config) -> None:
    """Set the random seed and the arithmetic of fp32 matrix products."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("highest" if config.training.precision is Precision.fp32 else "high")


def raise_together(error: UserError | None) -> None:
    """Raise on all ranks if any rank has an error, so that none waits for another. Collective.

    Raises:
        UserError: that of the first rank that has one; the same on all ranks, since any may be the one that tells the user.
    """
    errors: list[UserError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for first in errors:
        if first is not None:
            raise first
