"""The doctor in real processes: alone, under torchrun, on two hosts, and with faults planted on one rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import dlrm_fused
from benchmarks.common.network import INTERFACE, Hosts
from dlrm_fused.doctor import collect, examine, measure
from dlrm_fused.doctor.command import main
from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.errors import CommunicationError
from dlrm_fused.training.runtime import Rank
from tests.distributed.launch import Ended, run_alone, run_program
from tests.distributed.network import needs_hosts

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
DOCTOR = ["-m", "dlrm_fused.doctor"]


def be_doctor() -> None:
    sys.exit(main([]))


def test_one_process_without_torchrun_is_well() -> None:
    done = run_alone(ROOT, be_doctor)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dlrm_fused doctor: 1 rank on 1 host\n")
    assert "not measured: one rank has no peers" in done.stdout
    assert done.stdout.endswith("status 0: all is well\n")


def test_two_ranks_of_torchrun_print_one_report() -> None:
    command = [*TORCHRUN, "--standalone", *DOCTOR, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["world_size"], len(report["ranks"])) == (0, 2, 2)
    (measured,) = report["measurements"]
    assert (measured["ranks"], measured["backend"]) == ([0, 1], "gloo")
    assert measured["latency_us"] > 0
    assert measured["gb_per_s"] > 0
    assert report["operators"]["embedding + All-to-All"] == "stores"


# Faults, planted by replacing what gathers facts.


def with_fault(plant: Callable[[], None], faulty_rank: int, arguments: list[str]) -> None:
    """A rank of doctor."""
    if Rank.from_environment().index == faulty_rank:
        plant()
    sys.exit(main(arguments))


def run_with_fault(folder: Path, plant: Callable[[], None], *arguments: str, faulty_rank: int = 1) -> Ended:
    return run_program(2, folder, 120, with_fault, plant, faulty_rank, list(arguments))


def have_another_torchrec() -> None:
    gather = examine.collect_facts

    def planted(rank: Rank) -> RankFacts:
        facts = gather(rank)
        return replace(facts, versions={**facts.versions, "torchrec": "1.7.0"})

    examine.collect_facts = planted


def test_another_torchrec_on_one_rank_is_named(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, have_another_torchrec)
    assert ended.statuses == [1, 1]
    assert re.search(r"^broken: version-set \(rank 1\): \S+: torchrec is 1.7.0, wanted 1.[689].\*", ended.output, re.MULTILINE)
    assert "broken: versions-differ (rank 1): torchrec is 1.7.0 on " in ended.output


def raise_in_checks() -> None:
    def planted(_: Rank) -> RankFacts:
        raise OSError("the driver does not answer")

    examine.collect_facts = planted


def test_a_rank_whose_checks_raise_is_named_and_holds_up_no_other(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, raise_in_checks)
    assert ended.statuses == [1, 1]
    assert "broken: rank-failed (rank 1): rank 1 on " in ended.output
    assert "OSError: the driver does not answer" in ended.output
    assert "not measured: rank-failed" in ended.output


def hang_in_checks() -> None:
    collect.ask_nvidia_smi = lambda: threading.Event().wait()


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_whose_checks_hang_is_named_after_the_time_limit(faulty_rank: int, tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, hang_in_checks, "--seconds=3", faulty_rank=faulty_rank)
    assert ended.statuses == [1, 1]
    assert f"broken: rank-failed (rank {faulty_rank}): rank {faulty_rank} on " in ended.output
    assert "did not end within 3 s" in ended.output


def end_before_arrival() -> None:
    sys.exit(0)


def test_a_rank_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, end_before_arrival, "--seconds=2")
    assert ended.statuses == [1, 0]
    assert "broken: rank-missing (rank 1): rank 1 has not arrived: rank 1 posted no facts within 4 s" in ended.output


def test_a_rank_without_rank_0_says_so_and_ends(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, end_before_arrival, "--seconds=1", faulty_rank=0)
    assert ended.statuses == [0, 1]
    assert "lost rank 0" in ended.output
    assert "rank 0 posted no plan within 5 s" in ended.output


def be_another_release() -> None:
    dlrm_fused.__version__ = "0.0.9"


def test_another_release_of_dlrm_fused_is_named(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, be_another_release, "--seconds=3")
    assert ended.statuses == [1, 1]
    assert f"rank 1 has release 0.0.9 of dlrm_fused, rank 0 has {dlrm_fused.__version__}" in ended.output


def refuse_connections() -> None:
    def planted(*_: object) -> None:
        raise CommunicationError("connection refused")

    measure.process_group = planted


def test_a_rank_that_cannot_connect_is_named_and_holds_up_no_other(tmp_path: Path) -> None:
    ended = run_with_fault(tmp_path, refuse_connections, "--seconds=3")
    assert ended.statuses == [1, 1]
    assert "broken: no-connection" in ended.output
    assert "rank 1: CommunicationError: connection refused" in ended.output
    assert "not measured: no pair answered" in ended.output


# Two hosts.


def examine_hosts(hosts: Hosts, *arguments: str, interface: str = INTERFACE) -> list[tuple[int, str]]:
    """Run two ranks on each host; status and standard output of each torchrun.

    Args:
        interface: GLOO_SOCKET_IFNAME on host 1.
    """
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.names[0]}:29400"]
    agents = [
        hosts.popen(
            host,
            [*TORCHRUN, *rendezvous, *DOCTOR, *arguments],
            env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": (INTERFACE, interface)[host]},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for host in range(2)
    ]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


@needs_hosts
@pytest.mark.slow
def test_two_hosts_measure_their_network_and_send_messages(hosts: Hosts) -> None:
    (status, output), other = examine_hosts(hosts, "--json")
    assert (status, other) == (0, (0, ""))
    report = json.loads(output)
    assert report["status"] == 0
    assert [facts["host"]["name"] for facts in report["ranks"]] == [name for name in hosts.names for _ in range(2)]
    assert [facts["network"]["uses"]["gloo"] for facts in report["ranks"]] == [[INTERFACE]] * 4
    assert sorted(measured["ranks"] for measured in report["measurements"]) == [[0, 1], [0, 2], [2, 3]]
    pairs = {transport["transport"]: transport["pairs"] for transport in report["transports"]}
    assert pairs == {"messages": [[0, 2], [0, 3], [1, 2], [1, 3]], "stores": [[0, 1], [2, 3]]}
    assert report["operators"]["embedding + All-to-All"] == "stores, messages"


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("eth9", "interface-missing (ranks 2-3): GLOO_SOCKET_IFNAME=eth9 on {host}: no such interface there: eth9"),
        ("lo", "loopback (ranks 2-3): gloo on {host} uses loopback, by GLOO_SOCKET_IFNAME=lo: no other host can reach it"),
    ],
)
def test_a_wrong_interface_on_one_host_is_named_with_the_right_one(hosts: Hosts, interface: str, expected: str) -> None:
    (status, output), (other_status, _) = examine_hosts(hosts, interface=interface)
    assert (status, other_status) == (1, 1)
    assert f"broken: {expected.format(host=hosts.names[1])}" in output
    assert f"do: set GLOO_SOCKET_IFNAME on {hosts.names[1]} to {INTERFACE} ({hosts.addresses[1]})" in output
