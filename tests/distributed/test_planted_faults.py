"""No fault of a file's bytes is silent: not in checkpoints, nor in prepared sets, nor in exported models.

``FAULTS`` in the environment is the number of faults over all, 40 unless it is set. ``FAULTS_REPORT`` is a file for the counts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.errors import CheckpointError, DataError
from dlrm_fused.inference.export.loader import load
from dlrm_fused.training.checkpoint import CheckpointFolder, LocalShards, RawReader, restore_tensors, set_aside_damaged
from dlrm_fused.training.run_folder import RunFolder
from tests.distributed.launch import RankFailed, losses, small_config, train
from tests.distributed.planted_faults import FAULTS
from tests.inference.exporting import export
from tests.unit.prepared_sets import write_prepared_set

TOTAL = int(os.environ.get("FAULTS", "40"))
# A run of real processes meets one in so many of the faults in checkpoints.
PROCESSES_EVERY = 25
RUNS = [(ranks, comm) for ranks in (1, 2) for comm in ("baseline", "fused")]
# Three fifths of the faults are in checkpoints, a fifth in sets, and a fifth in exports.
OF_RUN, OF_SETS, OF_EXPORTS = TOTAL * 3 // 5 // len(RUNS), TOTAL // 5, TOTAL // 5
SETTINGS = ["embedding.sharding=row_wise", "checkpoint.every_steps=5", "training.compile=never"]


@dataclass(frozen=True)
class Trained:
    """A run of 10 steps with checkpoints of steps 5 and 10, and another one that differs in its seed."""

    ranks: int
    overrides: list[str]
    run: Path
    other: Path


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    yield counted
    if report := os.environ.get("FAULTS_REPORT"):
        Path(report).write_text(json.dumps(dict(sorted(counted.items())), indent=2) + "\n")


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[1]} on {run[0]}")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    ranks, comm = request.param
    overrides = [*SETTINGS, f"comm={comm}"]
    run, other = (
        train(tmp_path_factory.mktemp(name), ranks, "training.max_steps=10", *overrides, f"seed={seed}")
        for name, seed in (("run", 1), ("other", 2))
    )
    return Trained(ranks, overrides, run, other)


def checkpoint_files(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints/step_000000010").iterdir())


def everything(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read as a run reads them that continues."""
    stored = RawReader(checkpoint).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
    shards = {key: LocalShards(tuple(tensor.shape), [((0,) * tensor.dim(), tensor)]) for key, tensor in state.items()}
    restore_tensors(checkpoint, shards)
    return state


def continue_alone(run: Path, config: Config) -> dict[str, Tensor]:
    """Do to the files, in one process, what a run does before it continues; return the tensors it goes on with."""
    step = RunFolder(run).prepare(config)
    return everything(CheckpointFolder(run / "checkpoints").of(step))


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def plant(seed: int, files: Sequence[Path], own: Callable[[Path], list[Path]], others: list[Path]) -> tuple[str, list[Path]]:
    """Damage one of ``files``; returns the kind, and the files that it changes.

    Args:
        own: other files of the same tree that could lie in a file's place.
        others: likewise, of other trees.
    """
    choice = random.Random(seed)
    while True:
        kind, path = choice.choice(list(FAULTS)), choice.choice(files)
        places = own(path) if kind == "swap" else [each for each in others if each.name == path.name] or others
        if damaged := FAULTS[kind](choice, path, places):
            return kind, damaged


def names(message: str, damaged: list[Path]) -> bool:
    return any(path.name in message and str(path.parent) in message for path in damaged)


class TestCheckpoints:
    @pytest.mark.parametrize("seed", range(OF_RUN))
    def test_the_fault_is_named_and_the_checkpoint_before_goes_on(self, tmp_path, trained, counts, seed):
        run = shutil.copytree(trained.run, tmp_path / "run")
        kind, damaged = plant(
            seed,
            checkpoint_files(run),
            lambda path: [other for other in sorted(path.parents[1].glob("step_*/*")) if other != path],
            checkpoint_files(trained.other),
        )
        config = small_config(tmp_path, *trained.overrides, "training.max_steps=12")
        with pytest.raises(CheckpointError) as told:
            continue_alone(run, config)
        assert names(str(told.value), damaged)
        # A swap with a file of the checkpoint before leaves none that is intact.
        before = trained.run / "checkpoints/step_000000005"
        here = run / "checkpoints/step_000000005"
        is_intact = all(path.read_bytes() == (here / path.name).read_bytes() for path in before.iterdir())
        if is_intact:
            set_aside_damaged(CheckpointFolder(run / "checkpoints"), 0, 1)
            assert are_equal(continue_alone(run, config), everything(before))
        counts[f"checkpoint, {kind}, {trained.ranks} ranks, {trained.overrides[-1]}: named"] += 1
        counts["checkpoint: gone on with the one before"] += is_intact

    @pytest.mark.parametrize("seed", range(max(1, OF_RUN // PROCESSES_EVERY)))
    def test_ranks_end_or_go_on_bit_by_bit(self, tmp_path, trained, counts, seed):
        """Real ranks: the fault ends them all, and ``on_damage=fallback`` makes the same steps as a run without it."""
        run = shutil.copytree(trained.run, tmp_path / "run")
        files = [path for path in checkpoint_files(run) if path.suffix == ".bin"]
        others = [path for path in checkpoint_files(trained.other) if path.suffix == ".bin"]
        _, damaged = plant(1000 + seed, files, lambda path: [each for each in files if each != path], others)
        until = [*trained.overrides, "training.max_steps=12"]
        with pytest.raises(RankFailed) as failed:
            train(tmp_path, trained.ranks, *until)
        assert isinstance(failed.value.error, CheckpointError)
        assert names(str(failed.value.error), damaged)
        train(tmp_path, trained.ranks, *until, "checkpoint.on_damage=fallback")
        straight = shutil.copytree(trained.run, tmp_path / "straight/run")
        train(tmp_path / "straight", trained.ranks, *until)
        assert losses(run) == losses(straight)
        assert (run / "checkpoints/damaged_step_000000010").is_dir()
        counts[f"checkpoint, real processes, {trained.ranks} ranks, {trained.overrides[-1]}: gone on bit by bit"] += 1

    @pytest.mark.parametrize("other", ["step", "run"])
    def test_the_whole_folder_of_another_checkpoint(self, tmp_path, trained, other):
        run = shutil.copytree(trained.run, tmp_path / "run")
        place = run / "checkpoints/step_000000010"
        shutil.rmtree(place)
        source = run / "checkpoints/step_000000005" if other == "step" else trained.other / "checkpoints/step_000000010"
        shutil.copytree(source, place)
        told = r"progress.json: is of step 5, in the folder of step 10" if other == "step" else r"seed=1: .*started with 2"
        with pytest.raises(CheckpointError, match=told):
            continue_alone(run, small_config(tmp_path, *trained.overrides, "seed=1", "training.max_steps=12"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A set with files of several blocks, and another one of the same shape."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for seed, folder in enumerate(folders):
        samples = {"train": 60_000, "validation": 2000, "test": 2000}
        write_prepared_set(folder, samples, dense_features=4, seed=seed, has_checksums=True)
    return folders


def read_set(folder: Path) -> None:
    """Read all samples, as training in a random order does."""
    dataset = PreparedDataset(folder)
    for split in Split:
        order = torch.from_numpy(np.random.default_rng(0).permutation(dataset.samples(split)))
        for rows in order.split(1000):
            dataset.read(split, rows)


def test_an_intact_set_is_read(prepared):
    read_set(prepared[0])


@pytest.mark.parametrize("seed", range(OF_SETS))
def test_a_fault_in_a_prepared_set_is_named(tmp_path, prepared, counts, seed):
    folder = shutil.copytree(prepared[0], tmp_path / "set")
    kind, damaged = plant(
        seed,
        sorted(path for path in folder.rglob("*") if path.is_file()),
        lambda path: [other for other in sorted(folder.rglob("*.npy")) if other.name == path.name and other != path],
        sorted(path for path in prepared[1].rglob("*") if path.is_file()),
    )
    with pytest.raises(DataError) as told:
        read_set(folder)
    assert names(str(told.value), damaged)
    counts[f"set, {kind}: named"] += 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    models = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("exported")
        export(train(folder, 1, "training.max_steps=5", f"seed={seed}"), folder / "model")
        models.append(folder / "model")
    return models


@pytest.mark.parametrize("seed", range(OF_EXPORTS))
def test_a_fault_in_an_export_is_named(tmp_path, exported, counts, seed):
    folder = shutil.copytree(exported[0], tmp_path / "model")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kind, damaged = plant(
        seed,
        files,
        lambda path: [other for other in files if other != path],
        sorted(path for path in exported[1].iterdir() if path.is_file()),
    )
    with pytest.raises((ValueError, FileNotFoundError), match="export the model again") as told:
        load(folder)
    assert names(str(told.value), damaged)
    counts[f"export, {kind}: named"] += 1
