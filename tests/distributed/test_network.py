"""The hosts that other tests rest on are what they claim: separate, joined, cut off when cut, slow when shaped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.network import Hosts
from tests.distributed.network import needs_hosts

pytestmark = needs_hosts

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


# Sends so many bytes, or prints the seconds from the first that arrive to the last.
BULK_SENDER = """
import socket, sys
socket.create_connection((sys.argv[1], 7000)).sendall(bytes(int(sys.argv[2])))
"""
BULK_RECEIVER = """
import socket, time
server = socket.create_server(("", 7000))
print("listening", flush=True)
connection = server.accept()[0]
connection.recv(1)
began = time.monotonic()
while connection.recv(1 << 20):
    pass
print(time.monotonic() - began)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (3, 1)])
def test_gloo_reduces_over_hosts(tmp_path: Path, count: int, ranks: int) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with Hosts(count) as hosts:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.names[0]}:29400", str(script)]
        agents = [hosts.popen(host, command, stdout=subprocess.PIPE) for host in range(count)]
        printed = [agent.communicate(timeout=240)[0].splitlines() for agent in agents]
    total = 2 ** (count * ranks) - 1
    assert [sorted(lines) for lines in printed] == [
        [f"{name} local rank {local_rank} total {total}" for local_rank in range(ranks)] for name in hosts.names
    ]


@pytest.mark.parametrize("cut_host", [0, 1])
def test_traffic_stops_when_a_host_is_cut_off_and_goes_on_when_restored(hosts: Hosts, tmp_path: Path, cut_host: int) -> None:
    received = tmp_path / "received"
    with received.open("w") as output:
        hosts.popen(0, [sys.executable, "-c", RECEIVER], stdout=output)
        _wait_for(lambda: "listening" in received.read_text())
        sender = hosts.popen(1, [sys.executable, "-c", SENDER, hosts.addresses[0]])
        _wait_for(lambda: received.read_text().count("\n") > 3)

        hosts.cut(cut_host)
        time.sleep(1)  # what has arrived is printed
        before = received.read_text()
        time.sleep(1)
        assert received.read_text() == before
        assert sender.poll() is None

        hosts.restore(cut_host)
        _wait_for(lambda: len(received.read_text()) > len(before))


@pytest.mark.parametrize("rate", [20e6, 100e6])
def test_a_host_sends_as_fast_as_its_shape_allows_and_its_bytes_are_counted(hosts: Hosts, rate: float) -> None:
    hosts.shape(rate)
    payload, received = 4_000_000, hosts.received_bytes(0)
    seconds = transfer(hosts, payload)
    # An Ethernet frame of 1514 bytes has 1448 of payload.
    assert payload * 8 / rate < seconds < 1.3 * payload * 8 / rate
    sent = hosts.sent_bytes(1)
    assert 1.04 < sent / payload < 1.06
    # Addresses are asked for of all hosts, so a host receives some that no other sent to it.
    assert hosts.received_bytes(0) - received == pytest.approx(sent, rel=1e-3)
    assert hosts.sent_bytes(0) < 0.1 * payload


def transfer(hosts: Hosts, payload: int) -> float:
    """Send so many bytes from host 1 to host 0; returns the seconds that they took."""
    receiver = hosts.popen(0, [sys.executable, "-c", BULK_RECEIVER], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    hosts.popen(1, [sys.executable, "-c", BULK_SENDER, hosts.addresses[0], str(payload)])
    return float(receiver.communicate(timeout=60)[0])


def test_nothing_is_left_behind() -> None:
    with Hosts(2) as hosts:
        process = hosts.popen(1, ["sleep", "1000"])
    assert process.wait(timeout=60) != 0
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    left = (*hosts.names, f"switch-{os.getpid()}")
    assert not any(name in namespaces.split() or Path("/etc/netns", name).exists() for name in left)


def _wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
