"""Training over two hosts with two ranks each: as on one host, and what happens when one of them fails or is cut off."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.common.network import Hosts
from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import assert_same_outcome, kill_at_step, kill_in_checkpoint, last_step, wait_for
from tests.distributed.launch import SMALL, losses, summary
from tests.distributed.network import needs_hosts

pytestmark = needs_hosts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d"]
FUSED = ["comm=fused", "comm_strict=true"]
A_MINUTE = 60.0
# How many moments the run of test_a_run_whose_ranks_are_killed... is killed at.
KILLS = int(os.environ.get("KILLS", "3"))
# The number of times the run of test_sigterm_stops... is stopped, and the time that its ranks may take.
STOPS = int(os.environ.get("KILLS", "1"))
SECONDS_TO_STOP = 20.0


def start(
    hosts: Hosts, arguments: Sequence[str], log: Path, *options: str, has_own_store: bool = False
) -> list[subprocess.Popen[str]]:
    """Start the trainer on both hosts, with these options of torchrun; host i's output goes to ``<log><i>``."""
    return [start_on(hosts, host, arguments, log, *options, has_own_store=has_own_store) for host in range(2)]


def start_on(
    hosts: Hosts, host: int, arguments: Sequence[str], log: Path, *options: str, has_own_store: bool = False
) -> subprocess.Popen[str]:
    """``has_own_store``: ranks meet at a store of rank 0, as docs/many_nodes.md has it, not at that of torchrun's agent."""
    output = Path(f"{log}{host}").open("w")  # noqa: SIM115 - the process keeps it
    command = [*TORCHRUN, *options, f"--rdzv-endpoint={hosts.names[0]}:29400", "train.py", *arguments]
    environment = {"OMP_NUM_THREADS": "1"}
    if options or has_own_store:  # agents that meet again need it
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return hosts.popen(host, command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def ranks_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks that an agent has started, in their order."""
    found = {}
    for process in psutil.Process(agent.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RANK" in (environment := process.environ()) and process.ppid() == agent.pid:
                found[int(environment["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


def wait_for_end(ranks: Sequence[psutil.Process], seconds: float) -> None:
    """An agent that hangs has not collected a rank that has ended, which stays as a zombie."""
    deadline = time.monotonic() + seconds
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait(agents: list[subprocess.Popen[str]], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    return [agent.wait(timeout=max(0.1, deadline - time.monotonic())) for agent in agents]


class Agents:
    """The agents of both hosts and the ranks that they have started, any of which may be killed."""

    def __init__(self, agents: Sequence[subprocess.Popen[str]], seed: random.Random | None = None) -> None:
        self._agents, self._seed = agents, seed or random.Random(0)
        self.killed: psutil.Process | None = None

    def alive(self) -> bool:
        return all(agent.poll() is None for agent in self._agents)

    def ranks(self) -> list[psutil.Process]:
        return [process for agent in self._agents for process in ranks_of(agent)]

    def kill(self) -> None:
        """SIGKILL to one rank."""
        number = self._seed.randrange(4)
        self.killed = self.ranks()[number]
        print(f"killed rank {number}")
        self.killed.kill()

    def wait_for_ranks_other_than(self, before: Sequence[psutil.Process]) -> list[psutil.Process]:
        """The ranks of the next attempt, when all of them have been started."""
        ranks: list[psutil.Process] = []

        def are_new() -> bool:
            nonlocal ranks
            ranks = self.ranks()
            return len(ranks) == 4 and not set(ranks) & set(before)

        wait_for(are_new, self)
        return ranks

    def wait(self) -> list[int]:
        return wait(list(self._agents), 240)


def arguments(folder: Path, *overrides: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "small.yaml"
    config.write_text(json.dumps(SMALL))
    return ["--config", str(config), f"output_dir={folder}", "embedding.sharding=table_wise", *overrides]


@pytest.mark.slow
def test_losses_are_those_of_one_host_with_four_ranks(hosts: Hosts, tmp_path: Path) -> None:
    steps = "training.max_steps=50"
    assert wait(start(hosts, arguments(tmp_path / "two", steps), tmp_path / "log"), 240) == [0, 0]
    one = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]
    subprocess.run([*one, *arguments(tmp_path / "one", steps)], check=True, capture_output=True, timeout=240)
    on_two_hosts, on_one_host = losses(tmp_path / "two/run"), losses(tmp_path / "one/run")
    assert len(on_two_hosts) == 50
    assert on_two_hosts == pytest.approx(on_one_host, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("lacking", "has_own_store"), [(1, False), (1, True), (0, True)])
def test_what_only_one_host_lacks_ends_both_with_one_message(
    hosts: Hosts, tmp_path: Path, lacking: int, has_own_store: bool
) -> None:
    there = arguments(tmp_path)
    given = [there, there]
    given[lacking] = ["--config", str(tmp_path / "missing.yaml"), *there[2:]]
    agents = [start_on(hosts, host, given[host], tmp_path / "log", has_own_store=has_own_store) for host in range(2)]
    # Rank 0 may serve the store, and stays 30 s for ranks that their host's agent has ended before they read from it; to
    # start four ranks takes half a minute on a busy machine.
    assert all(code != 0 for code in wait(agents, 3 * A_MINUTE))
    told = [(tmp_path / f"log{host}").read_text() for host in range(2)]
    assert "missing.yaml: no such file" in told[lacking]
    assert "stopping, because rank" in told[1 - lacking]
    assert "missing.yaml" in told[1 - lacking]


@pytest.mark.parametrize(
    "comm",
    [pytest.param(["comm=baseline"], marks=pytest.mark.exhaustive), pytest.param(FUSED, marks=pytest.mark.slow)],
    ids=lambda comm: comm[0],
)
def test_a_host_that_is_cut_off_ends_all_ranks_with_a_clear_error_and_a_restart_resumes(
    hosts: Hosts, tmp_path: Path, comm: list[str]
) -> None:
    long = arguments(tmp_path, "training.max_steps=20000", "checkpoint.every_steps=50", *comm)
    agents = start(hosts, long, tmp_path / "log")
    checkpoints = tmp_path / "run/checkpoints"
    wait_for(lambda: any(checkpoints.glob("step_*")), Agents(agents))

    ranks = [process for agent in agents for process in ranks_of(agent)]
    assert len(ranks) == 4
    hosts.cut(1)
    # The ranks, on either host. torchrun's agent on the host that was cut off gives up its own store a minute or two later.
    wait_for_end(ranks, A_MINUTE)
    told = [(tmp_path / f"log{host}").read_text() for host in range(2)]
    if comm == FUSED:
        for host in range(2):
            there = hosts.names[1 - host]
            assert re.search(
                rf"rank \d on {there} \(pid \d+\) is lost, its process ended or its host cannot be reached", told[host]
            )
    else:
        assert f"on {hosts.names[1]} has given no sign of life" in told[0]
        assert "runtime.peer_timeout_seconds" in told[0]
        assert "has not answered" in told[1]
    assert wait(agents[:1], seconds=120)[0] != 0
    agents[1].kill()

    hosts.restore(1)
    reached = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    shorter = [*long, f"training.max_steps={reached + 100}"]
    assert wait(start(hosts, shorter, tmp_path / "again"), 240) == [0, 0]
    assert f"from step {reached}" in (tmp_path / "again0").read_text()
    assert summary(tmp_path / "run")["steps"] == reached + 100
    assert sorted(losses(tmp_path / "run")) == list(range(1, reached + 101))
    if comm == FUSED:
        settings = [f"training.max_steps={reached + 100}", "checkpoint.every_steps=50", *comm]
        assert_same_outcome_as_uninterrupted(hosts, tmp_path, settings)


@pytest.mark.slow
def test_a_killed_rank_ends_all_ranks_of_both_hosts_by_name(hosts: Hosts, tmp_path: Path) -> None:
    agents = Agents(start(hosts, arguments(tmp_path, "training.max_steps=20000", *FUSED), tmp_path / "log"))
    wait_for(lambda: last_step(tmp_path / "run") >= 20, agents)
    ranks = agents.ranks()
    ranks[3].kill()
    wait_for_end(ranks, A_MINUTE)
    assert all(agents.wait())
    lost = rf"rank 3 on {hosts.names[1]} \(pid {ranks[3].pid}\) is lost"
    assert re.search(lost, (tmp_path / "log0").read_text())
    # There the agent may be faster than rank 2, which it then ends.
    assert re.search(rf"{lost}|exitcode: -9\) local_rank: 1", (tmp_path / "log1").read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_run_whose_ranks_are_killed_at_random_moments_ends_like_an_uninterrupted_one(hosts: Hosts, tmp_path: Path) -> None:
    """A random rank of a random host, in steps, in checkpoints and while it starts; each time the agents start all ranks."""
    run, seed = tmp_path / "run", random.Random(0)
    settings = ["training.max_steps=600", "checkpoint.every_steps=20", "evaluation.every_steps=150", *FUSED]
    started = start(hosts, arguments(tmp_path, *settings), tmp_path / "log", f"--max-restarts={2 * KILLS}")
    agents = Agents(started, seed)
    ranks: list[psutil.Process] = []
    for number in range(KILLS):
        ranks = agents.wait_for_ranks_other_than(ranks)
        began = time.monotonic()
        kind = ("step", "checkpoint", "start")[number % 3]
        if kind == "step":
            kill_at_step(agents, run, last_step(run) + seed.randint(1, 30), seed.uniform(0, 0.05))
        elif kind == "checkpoint":
            kill_in_checkpoint(agents, run, seed.randint(1, 2), seed.uniform(0, 0.01))
        else:
            time.sleep(seed.uniform(0, 6))
            agents.kill()
        moment = time.monotonic()
        wait_for_end(ranks, A_MINUTE)
        print(f"kill {number}, {kind}, {moment - began:.1f} s after the start, at step {last_step(run)}: ", end="")
        print(f"all ranks have ended in {time.monotonic() - moment:.1f} s")
    assert agents.wait() == [0, 0], (tmp_path / "log0").read_text()
    assert_same_outcome_as_uninterrupted(hosts, tmp_path, settings)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sigterm_stops_the_ranks_of_both_hosts_after_one_step_which_they_save(hosts: Hosts, tmp_path: Path) -> None:
    """Sent to both agents, as a scheduler does, or to one, whose machine is taken away."""
    run, seed = tmp_path / "run", random.Random(3)
    settings = [f"training.max_steps={400 + 200 * STOPS}", "checkpoint.every_steps=50", "evaluation.every_steps=150", *FUSED]
    for number in range(STOPS):
        started = start(hosts, arguments(tmp_path, *settings), tmp_path / f"log{number}_", has_own_store=True)
        agents, begun_at = Agents(started), last_step(run)
        step = begun_at + seed.randint(1, 60)
        wait_for(lambda step=step: last_step(run) >= step, agents)
        ranks, moment = agents.ranks(), time.monotonic()
        for agent in started if number % 2 == 0 else started[number // 2 % 2 :][:1]:
            agent.terminate()
        wait_for_end(ranks, SECONDS_TO_STOP)
        saved = CheckpointFolder(run / "checkpoints").last()
        print(f"stop {number}: all ranks have ended in {time.monotonic() - moment:.1f} s, step {last_step(run)}, saved {saved}")
        assert saved == last_step(run)
        assert all(wait(started, A_MINUTE))
    again = start(hosts, arguments(tmp_path, *settings), tmp_path / "log", has_own_store=True)
    assert wait(again, 240) == [0, 0], (tmp_path / "log0").read_text()
    assert_same_outcome_as_uninterrupted(hosts, tmp_path, settings)


def assert_same_outcome_as_uninterrupted(hosts: Hosts, folder: Path, settings: Sequence[str]) -> None:
    """Bit by bit, that of a run on both hosts that nothing happened to."""
    assert wait(start(hosts, arguments(folder / "uninterrupted", *settings), folder / "uninterrupted_log"), 240) == [0, 0]
    assert_same_outcome(folder / "run", folder / "uninterrupted/run")
