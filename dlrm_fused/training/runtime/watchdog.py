"""Ends the process of a rank when another rank of the run that it has joined has failed or vanished."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import torch

from dlrm_fused.config import Config
from dlrm_fused.training.runtime.environment import Rank, apply_numerics, choose_device
from dlrm_fused.training.runtime.error_store import STORE_TIMEOUT, ErrorStore
from dlrm_fused.training.runtime.rendezvous import process_group

logger = logging.getLogger("dlrm_fused")
_HEARTBEAT_SECONDS = 1.0


class Watchdog:
    """Ends this process when another rank has failed or vanished.

    Use as a context around all that other ranks take part in, and call :meth:`peers_have_joined` when the process group is up:
    before that, a rank may be silent because it still starts.

    One thread talks to the store; a call of it may hang as long as the network does. A second one ends the process when the
    first has heard nothing for too long. Both count their own beats, not the time of day: a pause of the whole run (Ctrl-Z, a
    frozen container) is no silence.
    """

    def __init__(self, rank: Rank, error_store: ErrorStore, peer_timeout_seconds: float) -> None:
        self._rank = rank
        self._error_store = error_store
        self._timeout = peer_timeout_seconds
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
        """Take ranks that give no sign of life for lost from now on."""
        self._expects_signs = True
        self._start()  # now, where the store began with the process group

    def _start(self) -> None:
        if self._rank.world_size > 1 and self._error_store.store() is not None and not self._threads[0].is_alive():
            for thread in self._threads:
                thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            return  # the process is about to end, and must, even if the store cannot be told
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=STORE_TIMEOUT.total_seconds())

    def _exchange_signs(self) -> None:
        store = self._error_store.store()
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
                failure = self._error_store.failure_of_another()
                new_sign = store.get(watched).decode() if store.check([watched]) else ""
            except (RuntimeError, OSError):
                continue  # the other thread counts how long this goes on
            self._contacts += 1
            if failure is not None:
                # A warning: that rank itself has told the user what is wrong.
                logger.warning("stopping, because %s", failure)
                return _end_process(None)
            if new_sign != sign or new_sign.startswith("done") or not self._expects_signs:
                sign, silence = new_sign, 0.0
                continue
            silence += _HEARTBEAT_SECONDS
            if silence > self._timeout:
                message = self._silence_of(watched, sign)
                self._error_store.announce(message)
                return _end_process(message)

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
                return _end_process(
                    f"the rendezvous store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} has not answered "
                    f"for {self._timeout:.0f} s (runtime.peer_timeout_seconds): its host or the network is down"
                )


@contextmanager
def join_run(config: Config, rank: Rank, error_store: ErrorStore) -> Iterator[torch.device]:
    """Join the default process group, for the time of the context; gives this rank's device. Collective.

    Raises:
        ConfigError: if the host has fewer GPUs than ranks.
    """
    device = choose_device(config.runtime.device, rank)
    apply_numerics(config)
    with Watchdog(rank, error_store, config.runtime.peer_timeout_seconds) as watchdog, process_group(rank, device):
        watchdog.peers_have_joined()
        yield device


def _end_process(reason: str | None) -> None:
    """End the process after logging the reason; None if another rank tells it."""
    if reason is not None:
        logger.error(reason)
    flush()
    os._exit(1)


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
