"""Training over two hosts with two ranks each: as on one host, and what happens when one of them fails or is cut off."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.common.network import Hosts
from tests.distributed.launch import SMALL, losses, summary
from tests.distributed.network import needs_hosts

pytestmark = needs_hosts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def start(hosts: Hosts, arguments: Sequence[str], log: Path) -> list[subprocess.Popen[str]]:
    """Start the trainer on both hosts; host i's output goes to ``<log><i>``."""
    return [start_on(hosts, host, arguments, log) for host in range(2)]


def start_on(hosts: Hosts, host: int, arguments: Sequence[str], log: Path) -> subprocess.Popen[str]:
    output = Path(f"{log}{host}").open("w")  # noqa: SIM115 - the process keeps it
    command = [*TORCHRUN, f"--rdzv-endpoint={hosts.names[0]}:29400", "train.py", *arguments]
    return hosts.popen(host, command, stdout=output, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1"})


def wait(agents: list[subprocess.Popen[str]], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    return [agent.wait(timeout=max(0.1, deadline - time.monotonic())) for agent in agents]


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
def test_what_only_one_host_lacks_ends_both_with_one_message(hosts: Hosts, tmp_path: Path) -> None:
    there = arguments(tmp_path)
    agents = [
        start_on(hosts, 0, there, tmp_path / "log"),
        start_on(hosts, 1, ["--config", str(tmp_path / "missing.yaml"), *there[2:]], tmp_path / "log"),
    ]
    assert all(code != 0 for code in wait(agents, 240))
    told = [(tmp_path / f"log{host}").read_text() for host in range(2)]
    assert "missing.yaml: no such file" in told[1]
    assert "stopping, because rank" in told[0]
    assert "missing.yaml" in told[0]


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_rest_with_a_clear_error_and_a_restart_resumes(hosts: Hosts, tmp_path: Path) -> None:
    long = arguments(tmp_path, "training.max_steps=20000", "checkpoint.every_steps=50")
    agents = start(hosts, long, tmp_path / "log")
    checkpoints = tmp_path / "run/checkpoints"
    deadline = time.monotonic() + 240
    while not list(checkpoints.glob("step_*")):
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents), (tmp_path / "log0").read_text()
        time.sleep(0.1)

    hosts.cut(1)
    codes = wait(agents[:1], seconds=120)
    assert codes[0] != 0
    told = (tmp_path / "log0").read_text()
    assert f"on {hosts.names[1]} has given no sign of life" in told
    assert "runtime.peer_timeout_seconds" in told
    # On the host that was cut off the ranks end likewise; its torchrun gives up its store only after a minute or two.
    deadline = time.monotonic() + 120
    while "has not answered" not in (tmp_path / "log1").read_text():
        assert time.monotonic() < deadline, (tmp_path / "log1").read_text()
        time.sleep(0.1)
    agents[1].kill()

    hosts.restore(1)
    reached = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))
    shorter = [*long, f"training.max_steps={reached + 100}"]
    assert wait(start(hosts, shorter, tmp_path / "again"), 240) == [0, 0]
    assert f"from step {reached}" in (tmp_path / "again0").read_text()
    assert summary(tmp_path / "run")["steps"] == reached + 100
    assert sorted(losses(tmp_path / "run")) == list(range(1, reached + 101))
