"""Does every other rank name a rank that is killed, soon, and do their devices work on?

The processes are started by the script itself: torchrun would end those that are left. Each survivor writes
``<output>.rank<r>.json``: its error, after how many seconds it came, and whether its device still works off what it is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.common.environment import command_line
from benchmarks.common.harness import World, start_ranks, synchronize
from benchmarks.common.results import write_results
from dlrm_fused.errors import CommunicationError

ERROR_LIMIT_SECONDS = 30.0
_START_LIMIT_SECONDS = 300.0


def add_kill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a rank that is killed."""
    parser.add_argument("--kill-rank", type=int, help="this rank kills itself")
    parser.add_argument("--kill-after", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 3, help="with --kill-rank")


def survive(world: World, options: argparse.Namespace, step: Callable[[int], None]) -> NoReturn:
    """Make steps until the rank that is to be killed is gone; write what this rank saw of it.

    Args:
        step: is called with 0, 1, ..., and raises what its workspace has seen of a lost rank.
    """
    step(0)
    synchronize(world.device)
    dist.barrier()
    when = _of_rank(options.output, options.kill_rank).with_suffix(".killed")
    if world.rank == options.kill_rank:
        threading.Thread(target=_kill_this_process, args=(options.kill_after, when), daemon=True).start()
    error: BaseException | None = None
    deadline = time.monotonic() + options.kill_after + 2 * ERROR_LIMIT_SECONDS
    for number in itertools.count():
        try:
            step(number)
        except Exception as raised:
            error = raised
            break
        if time.monotonic() > deadline:
            break
    seconds = time.time() - float(when.read_text()) if when.exists() else None
    seen = {
        "rank": world.rank,
        "kind": type(error).__name__,
        "error": str(error),
        "is_communication_error": isinstance(error, CommunicationError),
        "seconds_from_kill_to_error": seconds,
        "device_works_on": _works_on(world.device),
    }
    write_results(_of_rank(options.output, world.rank), seen)
    sys.stdout.flush()
    os._exit(0)  # the process group would wait for the rank that is gone


def _of_rank(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.stem}.rank{rank}.json")


def _kill_this_process(seconds: float, when: Path) -> None:
    time.sleep(seconds)
    when.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _works_on(device: torch.device) -> bool:
    """Whether the device ends what it was given, and something new, within some seconds."""
    done = threading.Event()

    def work() -> None:
        torch.ones(1000, device=device).sum().item()
        synchronize(device)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    return done.wait(10.0)


def kill_and_judge(options: argparse.Namespace) -> bool:
    """Start the ranks, and look at what is left; whether every survivor has raised the right error in time."""
    for path in options.output.parent.glob(f"{options.output.stem}.rank*"):
        path.unlink()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start_ranks([sys.executable, *sys.orig_argv[1:]], options.ranks, store)
    deadline = time.monotonic() + _START_LIMIT_SECONDS + options.kill_after
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
    seen = [json.loads(path.read_text()) for rank in range(options.ranks) if (path := _of_rank(options.output, rank)).exists()]
    passed = len(seen) == options.ranks - 1 and all(_is_right(own, options.kill_rank) for own in seen)
    verdict = {
        "command": command_line(),
        "killed_rank": options.kill_rank,
        "exit_status_of_ranks": [process.poll() for process in processes],
        "survivors": seen,
        "limit_seconds": ERROR_LIMIT_SECONDS,
        "passed": passed,
    }
    write_results(options.output, verdict)
    for own in seen:
        print(f"rank {own['rank']}: {own['seconds_from_kill_to_error']} s after the kill: {own['kind']}: {own['error']}")
    print(f"rank {options.kill_rank} was killed; every other rank has named it within {ERROR_LIMIT_SECONDS:.0f} s: {passed}")
    return passed


def _is_right(seen: dict[str, Any], killed: int) -> bool:
    seconds = seen["seconds_from_kill_to_error"]
    return (
        bool(seen["is_communication_error"])
        and f"rank {killed} on" in seen["error"]
        and "is lost" in seen["error"]
        and seconds is not None
        and seconds < ERROR_LIMIT_SECONDS
        and bool(seen["device_works_on"])
    )
