"""Failing together: what ends one rank ends all, soon, and is said once."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.errors import ConfigError, DataError
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.runtime import (
    ErrorStore,
    Rank,
    StopRequest,
    Watchdog,
    logger,
    process_group,
    run_with_error_reporting,
)
from tests.distributed.launch import Ended, run_program, run_ranks

CPU = torch.device("cpu")
# Longer than a busy machine keeps a thread waiting: a store that does not answer has an error of its own.
PEER_TIMEOUT_SECONDS = 5.0
Work = Callable[[Rank], None]


def run(folder: Path, work: Work, ranks: int = 2) -> Ended:
    return run_program(ranks, folder, 120, together, work)


def together(work: Work) -> None:
    def in_group(rank: Rank, error_store: ErrorStore) -> None:
        with Watchdog(rank, error_store, PEER_TIMEOUT_SECONDS) as watchdog, process_group(rank, CPU):
            watchdog.peers_have_joined()
            work(rank)

    run_with_error_reporting(in_group)


def errors(ended: Ended) -> list[str]:
    """The lines of the log that say ERROR, without time and host."""
    return re.findall(r"^\d\d:\d\d:\d\d \S+ (rank \d+ ERROR .*)$", ended.output, re.MULTILINE)


def log_on_all_ranks(_: Rank) -> None:
    logger.info("for information")
    logger.warning("look at this")


def test_log_lines_say_when_which_host_and_which_rank(tmp_path):
    ended = run(tmp_path, log_on_all_ranks)
    assert ended.statuses == [0, 0]
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in ended.output.splitlines()]
    host = os.uname().nodename
    assert lines == [
        f"{host} rank 0 INFO for information",
        f"{host} rank 0 WARNING look at this",
        f"{host} rank 1 WARNING look at this",
    ]


def fail_on_all_ranks(_: Rank) -> None:
    raise ConfigError("seed=x: allowed:\na number")


def test_an_error_that_all_ranks_meet_is_told_once_as_one_line(tmp_path):
    ended = run(tmp_path, fail_on_all_ranks)
    assert ended.statuses == [1, 1]
    told = [line for line in errors(ended) if "stopping, because" not in line]
    assert [line.split("ERROR ")[1] for line in told] == ["seed=x: allowed: a number"]
    assert "Traceback" not in ended.output


def fail_on_rank_1(error: Exception, rank: Rank) -> None:
    if rank.index == 1:
        raise error
    dist.barrier()


def test_an_error_of_one_rank_ends_a_rank_that_waits_for_it(tmp_path):
    ended = run(tmp_path, partial(fail_on_rank_1, DataError("file.txt: line 3 is malformed")))
    assert ended.statuses == [1, 1]
    assert "rank 1 ERROR file.txt: line 3 is malformed" in errors(ended)
    assert "Traceback" not in ended.output
    assert ended.seconds < 60


def test_what_the_operating_system_refuses_is_one_line_with_the_file(tmp_path):
    ended = run(tmp_path, partial(fail_on_rank_1, OSError(errno.ENAMETOOLONG, "File name too long", "runs/aaa")))
    assert "rank 1 ERROR runs/aaa: File name too long" in errors(ended)
    assert "Traceback" not in ended.output


def test_an_error_that_is_nobodys_input_comes_with_its_traceback_once(tmp_path):
    ended = run(tmp_path, partial(fail_on_rank_1, ZeroDivisionError("a mistake of ours")))
    assert ended.statuses == [1, 1]
    assert ended.output.count("Traceback") == 1
    assert "ZeroDivisionError: a mistake of ours" in ended.output
    assert "in fail_on_rank_1" in ended.output


def end_by_sigkill_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_ends_a_rank_that_waits_for_it(tmp_path):
    ended = run(tmp_path, end_by_sigkill_on_rank_1)
    assert ended.statuses == [1, -signal.SIGKILL]
    assert ended.seconds < 60


def hang_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        time.sleep(2)  # gives a sign of life
        process = os.getpid()
        if os.fork() == 0:
            deadline = time.monotonic() + 60
            while "no sign of life" not in Path("output_of_rank_0").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(process, signal.SIGKILL)
            os._exit(0)
        os.kill(process, signal.SIGSTOP)
    dist.barrier()


def test_a_rank_without_signs_of_life_is_named(tmp_path):
    """It is stopped, so its connections are open, and nobody else would notice."""
    ended = run(tmp_path, hang_on_rank_1)
    assert ended.statuses == [1, -signal.SIGKILL]
    expected = (
        rf"rank 0 ERROR rank 1 on {os.uname().nodename} has given no sign of life for 5 s \(runtime.peer_timeout_seconds\)"
    )
    assert any(re.match(expected, line) for line in errors(ended)), ended.output


def pause(_: Rank) -> None:
    time.sleep(2)  # all ranks have given a sign of life
    process = os.getpid()
    if os.fork() == 0:
        time.sleep(PEER_TIMEOUT_SECONDS + 2)
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)
    time.sleep(2)


def test_a_pause_of_all_ranks_is_not_taken_for_a_loss(tmp_path):
    ended = run(tmp_path, pause)
    assert ended.statuses == [0, 0], ended.output
    assert ended.output == ""


def end_early_on_rank_0(rank: Rank) -> None:
    if rank.index == 1:
        time.sleep(PEER_TIMEOUT_SECONDS + 2)


def test_a_rank_that_is_done_is_not_missed(tmp_path):
    ended = run(tmp_path, end_early_on_rank_0)
    assert ended.statuses == [0, 0], ended.output
    assert ended.output == ""


def fail_above_rank_0(rank: Rank) -> None:
    if rank.index:
        raise DataError(f"file.txt: rank {rank.index} finds it empty")


def raise_the_error_of_rank_1() -> str:
    rank = Rank.from_environment()
    with process_group(rank, CPU):
        assert gather_or_raise(lambda: rank.index) == [0, 1, 2]
        try:
            gather_or_raise(partial(fail_above_rank_0, rank))
        except DataError as error:
            return str(error)
    raise AssertionError


def test_all_ranks_raise_the_error_of_the_first_rank_that_has_one():
    assert run_ranks(3, raise_the_error_of_rank_1) == ["file.txt: rank 1 finds it empty"] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_success_has_status_0(tmp_path, ranks):
    assert run(tmp_path, barrier, ranks).statuses == [0] * ranks


def barrier(_: Rank) -> None:
    dist.barrier()


def work_until_told_to_stop(seconds_apart: float) -> None:
    """Rank 0 is told twice, so many seconds apart, and comes to its next step three seconds after the first time."""

    def work(rank: Rank, error_store: ErrorStore) -> None:
        with process_group(rank, CPU), StopRequest(rank, error_store) as stop_request:
            assert not stop_request.is_due()
            dist.barrier()
            if rank.index == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(seconds_apart)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(3.0 - seconds_apart)
            steps = 1
            while not stop_request.is_due():
                steps += 1
                dist.barrier()
            logger.warning("stopped after step %d", steps)
        raise stop_request.stopped()

    run_with_error_reporting(work)


def test_all_ranks_stop_after_one_step_by_a_signal_to_one_that_may_come_twice(tmp_path):
    ended = run_program(2, tmp_path, 60, work_until_told_to_stop, 0.1)
    assert ended.statuses == [128 + signal.SIGTERM] * 2, ended.output
    steps = re.findall(r"stopped after step (\d+)", ended.output)
    assert len(steps) == 2
    assert len(set(steps)) == 1


def test_a_second_signal_ends_its_rank_at_once(tmp_path):
    ended = run_program(1, tmp_path, 60, work_until_told_to_stop, 2.5)
    assert ended.statuses == [128 + signal.SIGTERM]
    assert "a second SIGTERM: ending without a checkpoint" in ended.output
    assert "stopped after step" not in ended.output
