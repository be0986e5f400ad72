"""Bad inputs: all ranks end, soon, and one line says what is wrong.

Every case runs the real program on two ranks. It must print, to the letter, the message that bad_inputs.md in this folder
shows; ``UPDATE_DOCS=1 pytest tests/distributed/test_bad_inputs.py`` writes those tables anew.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm_fused.datasets.preparation.parquet import write_parquet
from tests.distributed.launch import SMALL, run_script, train
from tests.unit.prepared_sets import write_prepared_set

ROOT = Path(__file__).parents[2]
DOCUMENT = Path(__file__).with_name("bad_inputs.md")
# From the start of a rank's work, imports aside, so from the moment the input is met at the latest.
LIMIT_SECONDS = 60.0

Prepare = Callable[[Path], None]


def nothing(_: Path) -> None:
    pass


@dataclass(frozen=True)
class BadInput:
    """A bad input, as the table shows it.

    Attributes:
        input: what is bad, in Markdown.
        culprit: what the message must name.
        arguments: of the program, which runs in a folder of its own.
        prepare: makes the input in that folder.
        script: the program.
        ranks: processes.
    """

    input: str
    culprit: str
    arguments: Sequence[str]
    prepare: Prepare = nothing
    script: str = "train.py"
    ranks: int = 2


# Settings.


def setting(override: str, culprit: str, *others: str) -> BadInput:
    shown = " ".join(f"`{text}`" for text in (override, *others))
    return BadInput(shown, culprit, ["--config", "small.yaml", override, *others])


def skip_with_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")


def config_file(content: str | bytes, described: str, culprit: str) -> BadInput:
    def write(folder: Path) -> None:
        (folder / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())

    return BadInput(described, culprit, ["--config", "bad.yaml"], write)


TRANSFORMER = ("model.kind=transformer", "data.synthetic.history_length=5")
SETTINGS = [
    setting("training.max_stepz=100", "the nearest existing one is training.max_steps"),
    setting("learning_rate=0.1", "learning_rate: unknown setting"),
    setting("embedding.tables.table_0.shardin=row_wise", "embedding.tables.table_0.shardin"),
    setting("training=100", "training=100"),
    setting("training.max_steps=many", "training.max_steps=many"),
    setting("training.max_steps=1.5", "training.max_steps=1.5"),
    setting("training.max_steps=null", "training.max_steps=null"),
    setting("embedding.sharding=rowwise", "embedding.sharding=rowwise"),
    setting("comm=fast", "comm=fast"),
    setting("comm_strict=true", "comm_strict=true"),
    setting("comm=fused", "table_0: sharding type data_parallel", "comm_strict=true", "embedding.sharding=data_parallel"),
    setting("model.bottom_mlp=16", "model.bottom_mlp=16"),
    setting("embedding.tables.table_0=row_wise", "embedding.tables.table_0=row_wise"),
    setting("embedding.tables.table_0.sharding=rowwise", "embedding.tables.table_0.sharding=rowwise"),
    setting("training.max_steps=${steps}", "training.max_steps"),
    setting("training.global_batch_size=0", "training.global_batch_size=0"),
    setting("embedding.optimizer.learning_rate=-1", "embedding.optimizer.learning_rate=-1.0"),
    setting("embedding.optimizer.learning_rate=nan", "embedding.optimizer.learning_rate=nan"),
    setting("name=a/b", "name=a/b"),
    setting("embedding.dim=10", "embedding.dim=10", "model.bottom_mlp=[16,10]"),
    setting("embedding.tables.table_0.dim=6", "embedding.tables.table_0.dim=6"),
    setting("telemetry.profile_steps=[5,3]", "telemetry.profile_steps=[5, 3]"),
    setting("telemetry.profile_steps=[500,510]", "telemetry.profile_steps=[500, 510]"),
    setting("model.bottom_mlp=[16,4]", "embedding.dim=8"),
    setting("model.top_mlp=[16,2]", "model.top_mlp=[16, 2]"),
    setting("model.kind=transformer", "data.synthetic.history_length=0"),
    setting("model.d_model=30", "model.heads=4", *TRANSFORMER),
    setting("model.tensor_parallel=3", "model.heads=4", *TRANSFORMER),
    setting("model.tensor_parallel=4", "all ranks, 2", *TRANSFORMER),
    setting("model.heads=5", "0, all 2 ranks of a host", "model.d_model=20", *TRANSFORMER),
    setting("model.experts.top_k=3", "model.experts.count=2", "model.experts.count=2"),
    setting("model.experts.parallel=4", "the number of ranks, 2", "model.experts.count=8"),
    setting("embedding.shard_columns=3", "embedding.shard_columns=3"),
    setting("training.target_auc=0.8", "evaluation.every_steps=0"),
    setting("embedding.optimizer.weight_decay=0.1", "embedding.optimizer.weight_decay=0.1", "embedding.optimizer.kind=adagrad"),
    setting("embedding.optimizer.kind=adam", "embedding.optimizer.kind=adam"),
    setting("embedding.output_dtype=bf16", "embedding.output_dtype=bf16"),
    setting("embedding.output_dtype=fp16", "embedding.output_dtype=fp16", "training.precision=bf16"),
    setting("embedding.forward_wire=fp16", "embedding.forward_wire=fp16", "embedding.output_dtype=fp16"),
    setting("embedding.forward_wire=bf16", "embedding.forward_wire=bf16"),
    setting("embedding.compute_kernel=fused_uvm_caching", "embedding.compute_kernel=fused_uvm_caching"),
    setting("embedding.rows=[10,20]", "embedding.rows=[10, 20]"),
    setting("embedding.tables.city.sharding=row_wise", "embedding.tables.city"),
    setting("training.task_weights.bought=0.5", "label_0, label_1", "data.synthetic.labels=2"),
    setting("data.synthetic.rows=[3000000000]", "data.synthetic.rows"),
    setting("data.synthetic.rows=[2000000000]", "no plan", "embedding.dim=512", "model.bottom_mlp=[512]"),
    setting("training.global_batch_size=1", "the number of ranks, 2"),
    setting("training.global_batch_size=100000", "the samples of the training split"),
    setting("data.source=prepared", "data.path"),
    setting("runtime.device=gpu", "runtime.device=gpu"),
    BadInput(
        "`runtime.device=cuda` without a GPU",
        "runtime.device=cuda",
        ["--config", "small.yaml", "runtime.device=cuda"],
        lambda _: skip_with_gpus(),
    ),
    setting("training.max_steps", "training.max_steps"),
    setting("--max-steps=10", "--max-steps"),
    BadInput("a `--config` that does not exist", "missing.yaml", ["--config", "missing.yaml"]),
    BadInput("no `--config`", "--config", []),
    BadInput("a folder as `--config`", "configs", ["--config", "configs"], lambda folder: (folder / "configs").mkdir()),
    config_file("training: {max_steps: 10", "a config with a syntax error", "bad.yaml"),
    config_file("training:\n  max_steps: 10\n  max_steps: 20\n", "a config with a setting twice", "max_steps"),
    config_file("- training\n", "a config that is a list", "bad.yaml"),
    config_file("max_steps: 10\n", "a config with a setting in the wrong place", "training.max_steps"),
    config_file(b"\xff\xfe\x00", "a binary file as `--config`", "bad.yaml"),
]


# Data sets.


def prepared(described: str, culprit: str, spoil: Prepare, *overrides: str, has_checksums: bool = False) -> BadInput:
    """A prepared set ``set`` of 100 training samples that is spoiled, trained on in batches of 16."""

    def prepare(folder: Path) -> None:
        write_prepared_set(folder / "set", has_checksums=has_checksums)
        spoil(folder / "set")

    arguments = ["--config", "small.yaml", "data.source=prepared", "data.path=set", "training.global_batch_size=16"]
    return BadInput(described, culprit, [*arguments, *overrides], prepare)


def parquet(described: str, culprit: str, spoil: Prepare, *overrides: str) -> BadInput:
    """The prepared set of :func:`prepared` as Parquet files ``files``, of 50 rows a row group, that are spoiled."""

    def prepare(folder: Path) -> None:
        write_prepared_set(folder / "set")
        write_parquet(folder / "set", folder / "files", row_group_rows=50)
        spoil(folder / "files")

    arguments = ["--config", "small.yaml", "data.source=parquet", "data.path=files", "training.global_batch_size=16"]
    return BadInput(described, culprit, [*arguments, *overrides], prepare)


def criteo(described: str, culprit: str, spoil: Prepare, *overrides: str) -> BadInput:
    """A day of TorchRec's Criteo files that is spoiled."""

    def prepare(folder: Path) -> None:
        (folder / "days").mkdir()
        np.save(folder / "days/day_0_dense.npy", np.ones((100, 13), np.float32))
        np.save(folder / "days/day_0_sparse.npy", np.ones((100, 26), np.int32))
        np.save(folder / "days/day_0_labels.npy", np.ones((100, 1), np.int32))
        spoil(folder / "days")

    arguments = ["--config", "small.yaml", "data.source=criteo_npy", "data.path=days"]
    return BadInput(described, culprit, [*arguments, *(overrides or [f"embedding.rows={[10] * 26}"])], prepare)


def preparing(described: str, culprit: str, arguments: list[str], prepare: Prepare) -> BadInput:
    """A preparation of a data set."""
    return BadInput(
        f"data/prepare.py: {described}", culprit, [*arguments, "--output", "set"], prepare, script="data/prepare.py", ranks=1
    )


def edit(change: Callable[[dict], object]) -> Prepare:
    """Change dataset.json."""

    def spoil(folder: Path) -> None:
        path = folder / "dataset.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def store(name: str, place: object, value: float) -> Prepare:
    """Overwrite a value of an array."""

    def spoil(folder: Path) -> None:
        array = np.load(folder / name)
        array[place] = value
        np.save(folder / name, array)

    return spoil


def cut(name: str, keep: int) -> Prepare:
    """Cut a file off."""
    return lambda folder: os.truncate(folder / name, keep)


def flip(name: str) -> Prepare:
    """Change the last bit of a file."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return spoil


def replace(name: str, array: np.ndarray) -> Prepare:
    return lambda folder: np.save(folder / name, array)


def remove(name: str) -> Prepare:
    return lambda folder: (folder / name).unlink()


def change_column(name: str, column: int, row: int, value: object) -> Prepare:
    """Write a Parquet file anew, with another value."""

    def spoil(folder: Path) -> None:
        table = pq.read_table(folder / name)
        values = table.column(column).to_pylist()
        values[row] = value
        table = table.set_column(column, table.field(column), pa.array(values, table.field(column).type))
        pq.write_table(table, folder / name, row_group_size=50)

    return spoil


def write_one_row_group(folder: Path) -> None:
    path = folder / "train/part-00000.parquet"
    pq.write_table(pq.read_table(path), path)


def compress(folder: Path) -> None:
    columns = {str(i): np.ones((100, 2), np.int32) for i in range(26)}
    np.savez_compressed(folder / "day_0_sparse_multi_hot.npz", **columns)


DATA_SETS = [
    BadInput(
        "`data.path` does not exist",
        "data.path=nowhere",
        ["--config", "small.yaml", "data.source=prepared", "data.path=nowhere"],
    ),
    prepared("a folder without `dataset.json`", "dataset.json", remove("dataset.json")),
    prepared("`dataset.json` cut off", "set/dataset.json", cut("dataset.json", 40)),
    prepared("`dataset.json` of another version", "format version 7", edit(lambda c: c.update(format_version=7))),
    prepared("`dataset.json` without samples of a split", "split test", edit(lambda c: c["samples"].pop("test"))),
    prepared("`dataset.json` with a text for a number", "set/dataset.json", edit(lambda c: c["samples"].update(train="100"))),
    prepared(
        "`dataset.json` with two features of a name",
        "set/dataset.json",
        edit(lambda c: c["schema"]["sparse_features"][2].update(name="user")),
    ),
    prepared("`dataset.json` with a table of 0 rows", "user", edit(lambda c: c["schema"]["sparse_features"][0].update(rows=0))),
    prepared("`dataset.json` without dense features", "dense", edit(lambda c: c["schema"].update(dense_features=[]))),
    prepared("a set without histories for `model.kind=transformer`", "no histories", nothing, "model.kind=transformer"),
    prepared("a missing `.npy` file", "set/train/labels.npy: missing", remove("train/labels.npy")),
    prepared("a `.npy` file cut off", "set/test/single.npy", cut("test/single.npy", 200)),
    prepared("an empty `.npy` file", "set/train/dense.npy", cut("train/dense.npy", 0)),
    prepared(
        "more labels than `dataset.json` says", "set/train/labels.npy", replace("train/labels.npy", np.zeros(101, np.uint8))
    ),
    prepared("labels of another type", "set/train/labels.npy", replace("train/labels.npy", np.zeros(100))),
    prepared("a file of Python objects", "set/train/labels.npy", replace("train/labels.npy", np.array([{}] * 100))),
    prepared("`offsets` that do not end with `values`", "genres.offsets.npy", store("train/genres.offsets.npy", 100, 5)),
    prepared("an id out of range, in step 6, of rank 1", "feature user has the id 50", store("train/single.npy", (92, 0), 50)),
    prepared("a negative id, in step 6, of rank 1", "feature item has the id -1", store("train/single.npy", (92, 1), -1)),
    prepared(
        "an id out of range in the test split",
        "split test: feature item has the id 30",
        store("test/single.npy", (0, 1), 30),
        "training.max_steps=5",
    ),
    prepared("a label 2, in step 6, of rank 1", "a label is 2", store("train/labels.npy", 92, 2)),
    prepared("a NaN, in step 6, of rank 0", "dense feature dense_1", store("train/dense.npy", (84, 1), np.nan)),
    prepared("a changed bit of a `.npy` file", "set/train/dense.npy", flip("train/dense.npy"), has_checksums=True),
    prepared("a changed bit of `dataset.json`", "set/dataset.json", flip("dataset.json"), has_checksums=True),
    parquet("a folder without Parquet files", "files/test: no file matches", remove("test/part-00000.parquet")),
    parquet("a Parquet file cut off", "files/test/part-00000.parquet: damaged", cut("test/part-00000.parquet", 200)),
    parquet("one row group for two ranks", "files/train: fewer row groups", write_one_row_group),
    parquet(
        "an id out of range in a Parquet file, from step 3 on",
        "row group 1: feature user has the id 50",
        change_column("train/part-00000.parquet", 3, 92, 50),
    ),
    parquet("a null in a Parquet file", "column item has nulls (1)", change_column("train/part-00000.parquet", 5, 92, None)),
    criteo("a folder without days", "data.path=days", remove("day_0_dense.npy")),
    criteo("a day with labels of other length", "day_0_labels.npy", replace("day_0_labels.npy", np.zeros((99, 1), np.int32))),
    criteo("a compressed `npz`", "np.savez_compressed", compress),
    criteo("`embedding.rows` missing", "embedding.rows=[]", nothing, "training.max_steps=5"),
    criteo("`embedding.rows` of another length", "embedding.rows=[10, 10]", nothing, "embedding.rows=[10,10]"),
    preparing("a source that does not exist", "nowhere", ["movielens", "--source", "nowhere"], nothing),
    preparing("an empty folder as input", "empty", ["criteo", "--input", "empty"], lambda folder: (folder / "empty").mkdir()),
    preparing(
        "malformed lines",
        "train.txt",
        ["criteo", "--input", "train.txt"],
        lambda folder: folder.joinpath("train.txt").write_text("1\t2\t3\n" * 100) and None,
    ),
]


# What goes wrong while training.


def make_small_disk(folder: Path, kibibytes: int) -> None:
    """Mount a file system of this size at ``runs``."""
    (folder / "runs").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", folder / "runs"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system")


TRAINING = [
    setting("training.dense_optimizer.learning_rate=1e30", "the loss is not finite"),
    setting("embedding.optimizer.learning_rate=1e30", "the loss is not finite"),
    setting("training.dense_optimizer.learning_rate=30", "predicts the same", "training.dense_optimizer.kind=sgd"),
    BadInput(
        "a disk that is full after some steps",
        "runs/run",
        ["--config", "small.yaml", "training.max_steps=1000"],
        lambda folder: make_small_disk(folder, 60),
    ),
    BadInput(
        "a disk too small for a checkpoint",
        "runs/run/checkpoints",
        ["--config", "small.yaml", "training.max_steps=5", "embedding.dim=64", "model.bottom_mlp=[64]"],
        lambda folder: make_small_disk(folder, 200),
    ),
]


# Runs and checkpoints.


def run(described: str, culprit: str, spoil: Prepare, *overrides: str) -> BadInput:
    """A run of 10 steps with checkpoints of steps 5 and 10 that is spoiled and continued."""

    def prepare(folder: Path) -> None:
        shutil.copytree(_finished_run(folder), folder / "runs/run")
        spoil(folder / "runs/run")

    return BadInput(described, culprit, ["--config", "small.yaml", "training.max_steps=20", *overrides], prepare)


def evaluation(described: str, culprit: str, spoil: Prepare, *arguments: str) -> BadInput:
    """The same run, evaluated."""
    arguments = ("--run", "runs/run", *arguments)
    return BadInput(described, culprit, arguments, run("", "", spoil).prepare, script="eval.py")


def _finished_run(folder: Path) -> Path:
    return folder.parent / "finished/run"


def exchange(one: str, other: str) -> Prepare:
    """Give two files each other's names."""

    def spoil(folder: Path) -> None:
        (folder / one).rename(folder / "aside")
        (folder / other).rename(folder / one)
        (folder / "aside").rename(folder / other)

    return spoil


def put_an_earlier_checkpoint_in_place(folder: Path) -> None:
    shutil.rmtree(folder / LAST)
    (folder / "checkpoints/step_000000005").rename(folder / LAST)


def flip_all(folder: Path) -> None:
    for path in folder.glob("checkpoints/step_*/__0_0.bin"):
        flip(path.name)(path.parent)


def write_malicious_metadata(folder: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable, tuple]:
            return os.system, ("touch executed",)

    checkpoint = folder / LAST
    for name in ("checksums.json", "tensors.json"):
        (checkpoint / name).unlink()  # as those of earlier releases, whose records were pickles
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload()))


def put_a_file_for_a_folder(folder: Path) -> None:
    (folder / "file").write_text("")


def forbid_a_folder(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").write_text("")


LAST = "checkpoints/step_000000010"
RUNS = [
    run("a run continued with another `seed`", "seed=2", nothing, "seed=2"),
    run("a run continued with another batch size", "training.global_batch_size=32", nothing, "training.global_batch_size=32"),
    run("`progress.json` cut off", f"{LAST}/progress.json", cut(f"{LAST}/progress.json", 20)),
    run("`progress.json` missing", f"{LAST}/progress.json", remove(f"{LAST}/progress.json")),
    run("a file of a checkpoint cut off", f"{LAST}/__1_0.bin", cut(f"{LAST}/__1_0.bin", 100)),
    run("a file of a checkpoint missing", f"{LAST}/__0_0.bin", remove(f"{LAST}/__0_0.bin")),
    run("a file of a checkpoint with a changed bit", f"{LAST}/__1_0.bin", flip(f"{LAST}/__1_0.bin")),
    run("files of two ranks exchanged", f"{LAST}/__0_0.bin", exchange(f"{LAST}/__0_0.bin", f"{LAST}/__1_0.bin")),
    run("`tensors.json` missing", f"{LAST}/tensors.json", remove(f"{LAST}/tensors.json")),
    run("`tensors.json` cut off", f"{LAST}/tensors.json", cut(f"{LAST}/tensors.json", 100)),
    run("`checksums.json` missing", f"{LAST}/checksums.json", remove(f"{LAST}/checksums.json")),
    run("a checkpoint in the folder of another step", f"{LAST}/progress.json", put_an_earlier_checkpoint_in_place),
    run(
        "all checkpoints damaged, `checkpoint.on_damage=fallback`",
        "no checkpoint is intact",
        flip_all,
        "checkpoint.on_damage=fallback",
    ),
    run("`.metadata` with code in it", "posix.system", write_malicious_metadata),
    evaluation("`eval.py`: `.metadata` with code in it", "posix.system", write_malicious_metadata),
    evaluation("`eval.py`: a file of the checkpoint cut off", f"{LAST}/__1_0.bin", cut(f"{LAST}/__1_0.bin", 100)),
    evaluation("`eval.py`: another model", "dense.", nothing, "model.top_mlp=[32,1]"),
    evaluation("`eval.py`: another data set", "table.table_0.weight", nothing, "embedding.rows=[60,120,300,700]"),
    evaluation(
        "`eval.py`: a data set of more tables",
        "table_4",
        nothing,
        "data.synthetic.tables=5",
        "data.synthetic.rows=[50,120,300,700,9]",
        "data.synthetic.pooling=[1]",
    ),
    evaluation("`eval.py --checkpoint 7`", "--checkpoint 7", nothing, "--checkpoint", "7"),
    evaluation(
        "`eval.py --checkpoint best`, of a run without evaluations", "--checkpoint best", nothing, "--checkpoint", "best"
    ),
    evaluation("`eval.py --split tests`", "--split", nothing, "--split", "tests"),
    evaluation(
        "`eval.py --predictions`: a file for a folder",
        "runs/run/file",
        put_a_file_for_a_folder,
        "--predictions",
        "runs/run/file/predictions.parquet",
    ),
    BadInput("`eval.py --run` that does not exist", "--run runs/nothing", ["--run", "runs/nothing"], script="eval.py"),
    BadInput(
        "`output_dir` is a file",
        "output_dir=file",
        ["--config", "small.yaml", "output_dir=file"],
        lambda folder: (folder / "file").write_text("") and None,
    ),
    evaluation("`eval.py --predictions`: a folder", "--predictions runs/run", nothing, "--predictions", "runs/run"),
    run("a finished run started with another `seed`", "seed=3", nothing, "seed=3", "training.max_steps=10"),
    run("a file for the folder of checkpoints", "runs/run/checkpoints", forbid_a_folder),
]


BAD_INPUTS = {"Settings": SETTINGS, "Data": DATA_SETS, "Training": TRAINING, "Runs and checkpoints": RUNS}
ALL = [bad for group in BAD_INPUTS.values() for bad in group]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds ``finished/run``, ended after 10 steps; the server that ranks are forked from is up then."""
    folder = tmp_path_factory.mktemp("bad_inputs")
    train(folder / "finished", 2, "training.max_steps=10", "checkpoint.every_steps=5", "embedding.sharding=row_wise")
    return folder


@pytest.fixture
def folder(shared: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A working folder with the config ``small.yaml``."""
    folder = shared / re.sub(r"\W+", "_", request.node.name)
    folder.mkdir()
    config: dict[str, Any] = SMALL
    # The planner's own choice is not always the same, and with it who reads what.
    embedding = {**config["embedding"], "sharding": "row_wise"}
    (folder / "small.yaml").write_text(json.dumps({**config, "embedding": embedding}))
    yield folder
    if (folder / "runs").is_mount():
        subprocess.run(["umount", folder / "runs"], check=True)


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, str]]:
    """Messages by input, as bad_inputs.md shows them; to be filled anew where UPDATE_DOCS is set."""
    if "UPDATE_DOCS" not in os.environ:
        yield dict(re.findall(r"^\| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE))
        return
    printed: dict[str, str] = {}
    yield printed
    tables = [
        f"## {title}\n\n| input | message |\n|---|---|\n"
        + "".join(f"| {cell(bad.input)} | {printed[cell(bad.input)]} |\n" for bad in group)
        for title, group in BAD_INPUTS.items()
    ]
    DOCUMENT.write_text("\n".join([DOCUMENT.read_text().split("## ")[0].rstrip() + "\n", *tables]))


def cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def settled(message: str) -> str:
    """The message without numbers that differ between machines, or runs: which rank is the first to find the disk full."""
    message = re.sub(r"^step \d+:", "step N:", message)
    return re.sub(
        r"logit -?[\d.]+|at least \d+ expected|says \d+|written: rank \d+",
        lambda found: re.sub(r"-?\d[\d.]*", "N", found[0]),
        message,
    )


def messages(output: str) -> list[str]:
    """What the program says is wrong, over all ranks."""
    return re.findall(r"^(?:\d\d:\d\d:\d\d \S+ rank \d+ ERROR|error:) (.*)$", output, re.MULTILINE)


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.input)
def test_a_bad_input_ends_all_ranks_with_one_line_that_names_it(bad: BadInput, folder: Path, shown: dict[str, str]) -> None:
    bad.prepare(folder)
    ended = run_script(bad.ranks, ROOT / bad.script, bad.arguments, folder, LIMIT_SECONDS)
    print(f"{ended.seconds:.1f} s")
    print(ended.output)
    assert ended.statuses == [1] * bad.ranks
    (message,) = messages(ended.output)
    assert bad.culprit in message
    assert "Traceback" not in ended.output
    assert not (folder / "executed").exists()
    if "UPDATE_DOCS" in os.environ:
        shown[cell(bad.input)] = cell(settled(message))
    assert cell(settled(message)) == shown.get(cell(bad.input))


def test_the_document_shows_nothing_else() -> None:
    rows = re.findall(r"^\| (.*) \| .* \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [row for row in rows if row != "input"] == [cell(bad.input) for bad in ALL]


UNDER_TORCHRUN = [
    next(bad for bad in ALL if bad.input == name)
    for name in (
        "`training.max_stepz=100`",
        "an id out of range, in step 6, of rank 1",
        "a file of a checkpoint cut off",
        "`runtime.device=cuda` without a GPU",
    )
]


@pytest.mark.parametrize(
    "bad",
    [UNDER_TORCHRUN[0], *(pytest.param(bad, marks=pytest.mark.slow) for bad in UNDER_TORCHRUN[1:])],
    ids=lambda bad: bad.input,
)
def test_the_same_under_torchrun(bad: BadInput, folder: Path) -> None:
    bad.prepare(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={bad.ranks}"]
    program = [str(ROOT / bad.script), *bad.arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*launcher, *program], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    print(ended.stderr)
    assert ended.returncode == 1
    (message,) = messages(ended.stderr)
    assert bad.culprit in message
