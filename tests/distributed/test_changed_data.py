"""A model and data that do not belong together: a set prepared again with other ids, a checkpoint of another run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.config import Split, load_config
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.transformation import TRANSFORMATION, TRANSFORMATION_FILE, Transformation
from dlrm_fused.errors import CheckpointError
from dlrm_fused.inference.export import loader
from dlrm_fused.inference.export.folder import export_run
from tests.distributed.launch import RankFailed, be_script, evaluate, run_alone, run_ranks, start_training

ROWS, USERS = 600, 20


def write_table(path: Path, first_user: int) -> Path:
    """Clicks whose most frequent user, which gets the first id, is ``first_user``; others follow upward or downward."""
    seed, step = random.Random(0), 1 if first_user == 0 else -1
    lines = ["label,user,item"]
    for _ in range(ROWS):
        user = first_user + step * int(USERS * seed.random() ** 2)
        lines.append(f"{int(user % 3 == 0)},{user},{seed.randrange(9)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(table: Path, output: Path, *options: str) -> None:
    command = ["table", "--input", str(table), "--label", "label", "--sparse", "user,item", "--output", str(output)]
    assert cli.main([*command, *options], "prepare") == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the set ``data``, the run ``runs/first`` on it, and that exported as ``model``."""
    folder = tmp_path_factory.mktemp("trained")
    prepare(write_table(folder / "october.csv", 0), folder / "data")
    train(folder, "first", "training.max_steps=4")
    export(folder, folder / "model")
    return folder


@pytest.fixture
def moved(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder whose set has been prepared again with other ids."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "runs/first/config.yaml"
    config.write_text(config.read_text().replace(str(trained), str(tmp_path)))
    prepare(write_table(tmp_path / "november.csv", USERS - 1), tmp_path / "data", "--overwrite")
    return tmp_path


def train(folder: Path, name: str, *overrides: str) -> None:
    settings = [f"data.path={folder / 'data'}", f"output_dir={folder / 'runs'}", f"name={name}", "runtime.device=cpu"]
    settings += ["training.global_batch_size=32", "embedding.sharding=table_wise", *overrides]
    start_training(load_config(folder / "data/config.yaml", settings), 1).wait()


def export(folder: Path, output: Path) -> None:
    run_ranks(1, export_run, folder / "runs/first", "last", output, "fp32", Split.test, ())


USES: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: train(folder, "first", "training.max_steps=8"),
    "eval": lambda folder: evaluate(folder / "runs/first", 1),
    "export": lambda folder: export(folder, folder / "again"),
}


@pytest.mark.parametrize("use", list(USES))
def test_a_set_prepared_again_with_other_ids_is_refused_by_name(moved: Path, use: str) -> None:
    with pytest.raises(RankFailed) as failed:
        USES[use](moved)
    assert isinstance(failed.value.error, CheckpointError)
    message = str(failed.value.error)
    assert str(moved / "runs/first/checkpoints/step_000000004") in message
    assert f"data.path={moved / 'data'} has changed the ids of its values" in message


def test_a_warm_start_is_refused_if_its_run_has_lost_its_transformation(moved: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        train(moved, "second", f"checkpoint.warm_start={moved / 'runs/first'}", "training.max_steps=4")
    assert f"checkpoint.warm_start={moved / 'runs/first'}: was trained with another transformation" in str(failed.value.error)


def test_the_service_refuses_an_export_with_another_transformation(moved: Path) -> None:
    loader.load(moved / "model")
    shutil.rmtree(moved / "model" / TRANSFORMATION)
    shutil.copytree(moved / "data" / TRANSFORMATION, moved / "model" / TRANSFORMATION)
    with pytest.raises(ValueError, match=r"damaged: its bytes are not those that were written"):
        loader.load(moved / "model")
    (moved / "model" / CHECKSUMS_FILE).unlink()
    with pytest.raises(ValueError, match="is another transformation than the model was trained with"):
        loader.load(moved / "model")


def test_new_rows_of_the_same_transformation_belong_to_the_model(trained: Path, tmp_path: Path) -> None:
    command = ["apply", "--transformation", str(trained / "data"), "--input", str(trained / "october.csv")]
    assert cli.main([*command, "--output", str(tmp_path / "new")], "prepare") == 0
    old, new = (Transformation.digest_of(folder / TRANSFORMATION) for folder in (trained / "data", tmp_path / "new"))
    assert new == old
    evaluate(trained / "runs/first", 1, f"data.path={tmp_path / 'new'}")


def test_a_set_prepared_again_in_the_same_way_belongs_to_the_model(trained: Path) -> None:
    prepare(trained / "october.csv", trained / "data", "--overwrite")
    evaluate(trained / "runs/first", 1)


def test_sets_and_checkpoints_without_digests_are_read_with_one_line(moved: Path) -> None:
    path = moved / "data" / TRANSFORMATION / TRANSFORMATION_FILE
    content = json.loads(path.read_text())
    del content["digest"]
    path.write_text(json.dumps(content))
    root = Path(__file__).parents[2]
    done = run_alone(root, be_script, root / "eval.py", ["--run", str(moved / "runs/first")])
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "nothing tells" in line]
    assert f"data.path={moved / 'data'}" in line


def test_a_checkpoint_of_another_run_is_refused(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "runs/first", tmp_path / "first")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("\nseed: 1", "\nseed: 2"))
    assert (run / "config.yaml").read_text() != config
    with pytest.raises(RankFailed) as failed:
        evaluate(run, 1)
    expected = f"seed=2: the run in {run} was started with 1; the checkpoint step_000000004 is not of the config.yaml beside it"
    assert str(failed.value.error) == expected
