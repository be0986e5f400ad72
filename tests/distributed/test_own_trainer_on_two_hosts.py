"""A trainer of one's own (docs/examples/own_trainer.py) on two hosts with two ranks each, without the watchdog of train.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.network import Hosts
from tests.distributed.network import needs_hosts
from tests.distributed.test_fused_own_trainer import SCRIPT, with_torchrecs_sharder

pytestmark = needs_hosts

RANKS_PER_HOST, RANKS = 2, 4
# A host that is cut off is noticed after 20 s.
A_MINUTE = 60.0
WAITING_SECONDS = 1.0  # in which the other ranks reach the place where they wait
SETTINGS = '{"learning_rate": 0.1}'

LOSSES = """
import json, runpy, sys
losses = runpy.run_path(sys.argv[1])["main"]()
print("losses", json.dumps(losses))
"""

# What rank 3 does after 20 steps: nothing any more, while the others wait for it at some place of a step.
STOP = """
def stop(*_, **__):
    print("stopped", flush=True)
    while True:
        signal.pause()
"""
# The place where the others wait: the statement before which rank 3 does what.
PLACES = {
    "TorchRec's input dist": ("loss = ", "stop()"),
    "the fused forward": ("loss = ", "dlrm_fused.symmetric.Channel.exchange = stop"),
    "the fused backward": ("loss.backward()", "stop()"),
    "DDP's sums": (
        "loss.backward()",
        "[p for name, p in model.named_parameters() if 'dense_arch' in name][0].register_hook(stop)",
    ),
    "wherever it was": ("loss = ", "print('stopped', flush=True)"),
}


class Run:
    """The script on all ranks, each a process of its own, as torchrun starts them."""

    def __init__(self, hosts: Hosts, folder: Path, *program: str | Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.ranks: list[subprocess.Popen[str]] = []
        for rank in range(RANKS):
            host, local_rank = divmod(rank, RANKS_PER_HOST)
            environment = {
                "RANK": rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS_PER_HOST,
                "MASTER_ADDR": hosts.names[0],
                "MASTER_PORT": 29500,
                "PYTHONPATH": Path.cwd(),
            }
            with (folder / f"rank{rank}").open("w") as output:
                env = {name: str(value) for name, value in environment.items()}
                command = [sys.executable, "-u", *program]
                self.ranks.append(hosts.popen(host, command, env, stdout=output, stderr=subprocess.STDOUT))

    def told(self, rank: int) -> str:
        return (self._folder / f"rank{rank}").read_text()

    def wait_until_told(self, text: str, rank: int) -> None:
        deadline = time.monotonic() + 120
        while text not in self.told(rank):
            assert all(process.poll() is None for process in self.ranks), self.told(rank)
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait(self, *ranks: int, seconds: float) -> list[int]:
        """The exit statuses of these ranks, once they have ended."""
        deadline = time.monotonic() + seconds
        return [self.ranks[rank].wait(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]


def losses(hosts: Hosts, script: Path, folder: Path) -> list[list[float]]:
    """Of every step, by rank."""
    run = Run(hosts, folder, "-c", LOSSES, script)
    statuses = run.wait(*range(RANKS), seconds=200)
    assert statuses == [0] * RANKS, run.told(statuses.index(max(statuses)))
    return [json.loads(re.findall("^losses (.*)$", run.told(rank), re.MULTILINE)[0]) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "settings", "tolerance"),
    # Gradients of a row of bags are added up by the rank that sends them, in another order than TorchRec's.
    [(SCRIPT, SETTINGS, 1e-5), (SCRIPT.with_name("sequence_model.py"), '{"learning_rate": 2.0}', 0.0)],
    ids=["bags", "sequences"],
)
def test_only_the_sharder_changes_and_the_losses_are_the_same(
    hosts: Hosts, tmp_path: Path, script: Path, settings: str, tolerance: float
) -> None:
    strict = tmp_path / "strict.py"
    strict.write_text(replaced(script.read_text(), settings, f"{settings}, strict=True"))
    ours = losses(hosts, strict, tmp_path / "ours")
    theirs = losses(hosts, with_torchrecs_sharder(script, tmp_path), tmp_path / "theirs")
    for own, baseline in zip(ours, theirs, strict=True):
        assert own[0] == baseline[0]
        assert own == pytest.approx(baseline, rel=tolerance, abs=0)
    assert all(len(own) == 100 and own[-1] < 0.7 * own[0] for own in ours)


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


def endless(place: str) -> str:
    """The script, without an end, and with a rank 3 for which the others wait there."""
    before, does = PLACES[place]
    text = replaced(SCRIPT.read_text(), "range(100)", "iter(int, 1)")
    text = replaced(text, SETTINGS, f"{SETTINGS}, strict=True")
    text = replaced(
        text,
        f"        {before}",
        f"        if dist.get_rank() == 3 and len(losses) == 20:\n            {does}\n        {before}",
    )
    text = replaced(text, "    main()\n", "    with dlrm_fused.symmetric.name_lost_peer():\n        main()\n")
    return f"import signal\n\nimport dlrm_fused.symmetric\n{STOP}\n{text}"


def name_of(hosts: Hosts, rank: int) -> str:
    return rf"rank {rank} on {hosts.names[rank // RANKS_PER_HOST]} \(pid \d+\)"


def error_of(run: Run, rank: int) -> str:
    """The last error that the rank has printed, which must be ours."""
    found = re.findall(r"^(?:\[rank\d\]: )?dlrm_fused\.errors\.CommunicationError: (.*)", run.told(rank), re.MULTILINE)
    assert found, run.told(rank)
    return str(found[-1])


def waiting_for_rank_3(hosts: Hosts, folder: Path, place: str) -> Run:
    """A run whose rank 3 has stopped at a place, so that the others wait for it."""
    script = folder / "script.py"
    script.write_text(endless(place))
    run = Run(hosts, folder, script)
    run.wait_until_told("stopped", rank=3)
    time.sleep(WAITING_SECONDS)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rank_of_another_host_is_named_by_all_at_once(hosts: Hosts, tmp_path: Path, place: str) -> None:
    run = waiting_for_rank_3(hosts, tmp_path, place)
    run.ranks[3].kill()
    assert run.wait(0, 1, 2, seconds=A_MINUTE / 4) == [1, 1, 1]
    for rank in range(3):
        assert re.search(f"{name_of(hosts, 3)} is lost", error_of(run, rank))


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
def test_a_host_that_is_cut_off_is_named_within_a_minute(hosts: Hosts, tmp_path: Path, place: str) -> None:
    run = waiting_for_rank_3(hosts, tmp_path, place)
    hosts.cut(1)
    # Where rank 3 has stopped, it never ends, nor does rank 2 where it waits for rank 3 of its own host.
    ends = [0, 1, 2, 3] if place == "wherever it was" else [0, 1]
    assert run.wait(*ends, seconds=A_MINUTE) == [1] * len(ends)
    for rank in ends:
        others = (2, 3) if rank < RANKS_PER_HOST else (0, 1)
        assert re.search(f"({'|'.join(name_of(hosts, other) for other in others)}) is lost", error_of(run, rank))
