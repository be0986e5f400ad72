"""The two hosts that other tests rest on are what they claim: separate, joined, and cut off when cut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.network import ADDRESSES, TwoHosts, needs_two_hosts

pytestmark = needs_two_hosts

ALL_REDUCE = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
line = f"{socket.gethostname()} local rank {os.environ['LOCAL_RANK']} total {total.item():.0f}\\n"
os.write(1, line.encode())  # at once, since both ranks of a host write to one pipe
dist.destroy_process_group()
"""

# Sends a number every 0.1 s, or prints each one that arrives.
SENDER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
for number in range(1000):
    connection.sendall(f"{number}\\n".encode())
    time.sleep(0.1)
"""
RECEIVER = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
for line in server.accept()[0].makefile():
    print(line, end="", flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        yield hosts


@pytest.mark.slow
def test_gloo_reduces_over_two_hosts_with_two_ranks_each(hosts: TwoHosts, tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.names[0]}:29400", str(script)]
    agents = [hosts.popen(host, command, stdout=subprocess.PIPE) for host in range(2)]
    printed = [agent.communicate(timeout=240)[0].splitlines() for agent in agents]
    assert [sorted(lines) for lines in printed] == [
        [f"{name} local rank {local_rank} total 15" for local_rank in range(2)] for name in hosts.names
    ]


@pytest.mark.parametrize("cut_host", [0, 1])
def test_traffic_stops_when_a_host_is_cut_off_and_goes_on_when_restored(hosts: TwoHosts, tmp_path: Path, cut_host: int) -> None:
    received = tmp_path / "received"
    with received.open("w") as output:
        hosts.popen(0, [sys.executable, "-c", RECEIVER], stdout=output)
        _wait_for(lambda: "listening" in received.read_text())
        sender = hosts.popen(1, [sys.executable, "-c", SENDER, ADDRESSES[0]])
        _wait_for(lambda: received.read_text().count("\n") > 3)

        hosts.cut(cut_host)
        time.sleep(1)  # what has arrived is printed
        before = received.read_text()
        time.sleep(1)
        assert received.read_text() == before
        assert sender.poll() is None

        hosts.restore(cut_host)
        _wait_for(lambda: len(received.read_text()) > len(before))


def test_nothing_is_left_behind() -> None:
    with TwoHosts() as hosts:
        process = hosts.popen(1, ["sleep", "1000"])
    assert process.wait(timeout=60) != 0
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in namespaces or Path("/etc/netns", name).exists() for name in hosts.names)


def _wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
