"""From a table of one's own to a trained model, by the config that data/prepare.py proposes, as it is."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_fused.config import load_config
from dlrm_fused.datasets.preparation import cli
from tests.distributed.launch import RankFailed, evaluate, losses, start_training, summary
from tests.unit.tables import random_table, write_table

ROOT = Path(__file__).parents[2]
CRITEO_SAMPLE = ROOT.parent / "shared/data/criteo_kaggle_sample.tsv"


def prepare(source: Path, output: Path, label: str, dense: str, sparse: str, *options: str) -> Path:
    """Run data/prepare.py table; returns the proposed config."""
    columns = ["--label", label, "--dense", dense, "--sparse", sparse]
    assert cli.main(["table", "--input", str(source), "--output", str(output), *columns, *options]) == 0
    return output / "config.yaml"


def train(config: Path, output: Path, *overrides: str) -> Path:
    """Train on one rank; returns the folder of the run."""
    loaded = load_config(config, [f"output_dir={output}", "runtime.device=cpu", *overrides])
    start_training(loaded, ranks=1).wait()
    return loaded.run_dir


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ratings of MovieLens-100K with what is known of movies and users, as one Parquet file."""
    path = tmp_path_factory.mktemp("movielens") / "ratings.parquet"
    command = [sys.executable, str(ROOT / "data/movielens_ratings.py"), "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "pip cannot download" in done.stderr:
        pytest.skip(f"MovieLens: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize(
    ("history", "auc"),
    [
        pytest.param([], 0.78, marks=pytest.mark.slow),
        pytest.param(["--history", "user", "timestamp", "item,genres"], 0.75, marks=pytest.mark.exhaustive),
    ],
)
def test_movielens_is_learned_by_the_proposed_config(tmp_path: Path, movielens: Path, history: list[str], auc: float) -> None:
    config = prepare(movielens, tmp_path / "set", "liked", "age,year", "user,item,genres,gender,occupation", *history)
    assert summary(train(config, tmp_path))["test_auc"] >= auc


@pytest.mark.skipif(not CRITEO_SAMPLE.exists(), reason="Criteo's sample is not part of the project")
def test_criteo_as_csv_with_a_header_is_trained_by_the_proposed_config(tmp_path: Path) -> None:
    dense, sparse = [f"I{i}" for i in range(13)], [f"C{i}" for i in range(26)]
    with (tmp_path / "criteo.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", *dense, *sparse])
        writer.writerows(line.split("\t") for line in CRITEO_SAMPLE.read_text().splitlines())
    kinds = ",".join(f"{name}:log" for name in dense)
    config = prepare(tmp_path / "criteo.csv", tmp_path / "set", "label", kinds, ",".join(sparse))
    assert summary(train(config, tmp_path))["test_auc"] > 0.6


def test_a_model_is_evaluated_on_new_rows_with_the_ids_that_it_was_trained_on(tmp_path: Path) -> None:
    source = write_table(random_table(), tmp_path / "table.parquet")
    config = prepare(source, tmp_path / "set", "clicked", "price,age", "user,color,tags")
    run = train(config, tmp_path)
    assert losses(run)
    new = write_table(random_table(500, seed=3), tmp_path / "new.parquet")
    command = ["apply", "--transformation", str(tmp_path / "set"), "--input", str(new), "--output", str(tmp_path / "new")]
    assert cli.main(command) == 0
    assert evaluate(run, 1, f"data.path={tmp_path / 'new'}")["samples"] == 500
    with pytest.raises(RankFailed, match=r"new: holds no split validation, only test"):
        evaluate(run, 1, f"data.path={tmp_path / 'new'}", split="validation")
