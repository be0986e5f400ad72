"""``launch/slurm.sbatch`` under a real Slurm: two nodes train as one host does, and what fails is started again."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import last_step
from tests.distributed.launch import SMALL, losses, train
from tests.distributed.network import needs_hosts
from tests.distributed.slurm import Job, Slurm, needs_slurm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_hosts, needs_slurm]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch/slurm.sbatch"
RANKS_PER_NODE = 2
STEPS = 300
# A start takes a few seconds, but half a minute where others use the cores too.
TRAINING_SECONDS = 250


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with Slurm(nodes=3) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, float]:
    """The losses of one host with as many ranks."""
    run = train(tmp_path_factory.mktemp("one_host"), 2 * RANKS_PER_NODE, f"training.max_steps={STEPS}")
    return losses(run)


def submit_training(slurm: Slurm, folder: Path, *overrides: str, options: Sequence[str] = ()) -> Job:
    """Submit a run of ``SMALL`` on two nodes of two ranks and no GPUs, from a folder that has what the repository's has."""
    (folder / "train.py").symlink_to(ROOT / "train.py")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    training = ("--config=small.yaml", f"output_dir={folder}", f"training.max_steps={STEPS}", "comm=fused", *overrides)
    ranks = {"RANKS_PER_NODE": str(RANKS_PER_NODE)}
    return slurm.submit(folder, "--gpus-per-node=0", *options, SCRIPT, *training, env=ranks)


def test_two_nodes_train_as_one_host_does(slurm: Slurm, tmp_path: Path, one_host: Mapping[int, float]) -> None:
    job = submit_training(slurm, tmp_path)
    job.wait_for("COMPLETED", TRAINING_SECONDS)
    assert len(job.nodes) == 2
    assert job.restarts == 0
    assert losses(tmp_path / "run") == pytest.approx(one_host, rel=1e-6)


def by_power_failure_of_the_first(slurm: Slurm, job: Job) -> str:
    """Where the script runs and the agents meet."""
    lost = job.nodes[0]
    slurm.cut_power(lost)
    return lost


def by_an_operator_who_takes_down_the_second(slurm: Slurm, job: Job) -> str:
    lost = job.nodes[1]
    slurm.take_down(lost)
    return lost


@pytest.mark.parametrize(
    "lose_a_node",
    [pytest.param(by_power_failure_of_the_first, marks=pytest.mark.exhaustive), by_an_operator_who_takes_down_the_second],
)
def test_a_job_that_loses_a_node_goes_on_from_its_last_checkpoint_on_another(
    slurm: Slurm, tmp_path: Path, one_host: Mapping[int, float], lose_a_node: Callable[[Slurm, Job], str]
) -> None:
    job = submit_training(slurm, tmp_path, "checkpoint.every_steps=20")
    checkpoints = tmp_path / "run/checkpoints"
    job.wait_until(lambda: any(checkpoints.glob("step_*")), TRAINING_SECONDS)
    lost = lose_a_node(slurm, job)
    job.wait_for("COMPLETED", TRAINING_SECONDS)
    assert set(job.nodes) == set(slurm.nodes) - {lost}
    assert job.restarts == 1
    (resumed_from,) = map(int, re.findall(r"continuing \S+ from step (\d+)", job.log()))
    # Ranks that Slurm asks to end save the step that they are at.
    stopped_after = [int(step) for step in re.findall(r"stopped by SIGTERM after step (\d+)", job.log())]
    assert resumed_from in stopped_after or (not stopped_after and resumed_from % 20 == 0)
    assert losses(tmp_path / "run") == pytest.approx(one_host, rel=1e-6)


# Says what a node's agent has been given, and gives up.
AGENT = """\
#!/bin/sh
echo "$(env -u OMP_NUM_THREADS nproc) cores, $SLURM_GPUS_ON_NODE GPUs"
exit 3
"""


@pytest.mark.exhaustive
def test_a_job_whose_agents_give_up_starts_again_three_times_with_whole_nodes(slurm: Slurm, tmp_path: Path) -> None:
    agent = tmp_path / ".venv/bin/torchrun"
    agent.parent.mkdir(parents=True)
    agent.write_text(AGENT)
    agent.chmod(0o755)
    job = slurm.submit(tmp_path, SCRIPT)
    job.wait_for("FAILED", 120)
    assert job.restarts == 3
    # Not all say it: the first that ends ends the other one.
    assert set(re.findall(r"\d+ cores, \d+ GPUs", job.log())) == {f"{os.cpu_count()} cores, 8 GPUs"}


def test_a_cluster_leaves_nothing_behind(tmp_path: Path) -> None:
    with Slurm(nodes=1) as slurm:
        job = slurm.submit(tmp_path, "--wrap=sleep 1000")
        job.wait_for("RUNNING", 60)
        # A job is RUNNING before its processes have started: they come after munged, slurmctld and slurmd.
        wait_until(lambda: len(slurm.processes()) > 3, 60, lambda: str(slurm.processes()))
    wait_until(lambda: not slurm.processes(), 60, lambda: str(slurm.processes()))
    assert not slurm.folder.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["scancel", "time_limit"])
def test_a_job_that_is_told_to_stop_saves_its_last_step_and_goes_on(
    slurm: Slurm, tmp_path: Path, one_host: Mapping[int, float], how: str
) -> None:
    """By ``scancel``, or by ``--signal`` before its time limit, 20 to 80 s after the start: Slurm may be a minute early."""
    run, steps, options = tmp_path / "run", STEPS, []
    if how == "time_limit":
        steps, options = 4000, ["--time=3", "--signal=TERM@100"]
    job = submit_training(slurm, tmp_path, "checkpoint.every_steps=0", f"training.max_steps={steps}", options=options)
    if how == "scancel":
        job.wait_until(lambda: last_step(run) >= 20, TRAINING_SECONDS)
        job.signal("TERM")
    job.wait_until(lambda: job.restarts == 1, TRAINING_SECONDS)
    (saved,) = CheckpointFolder(run / "checkpoints").steps()
    assert saved == last_step(run)
    job.wait_for("COMPLETED", TRAINING_SECONDS)
    assert f"from step {saved}" in job.log()
    found = losses(run)
    assert list(found) == list(range(1, steps + 1))
    assert {step: found[step] for step in one_host} == pytest.approx(one_host, rel=1e-6)
