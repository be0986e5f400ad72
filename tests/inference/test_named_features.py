"""Columns of any name train on several ranks, are evaluated, exported and served under their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dlrm_fused.config import load_config
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.inference.export.loader import InputError, load
from tests.distributed.launch import start_training
from tests.inference.exporting import export, predictions_of_eval

ROWS = 600
SMALL = ["runtime.device=cpu", "model.bottom_mlp=[16,16]", "model.top_mlp=[16,1]", "embedding.dim=16", "training.max_steps=10"]
# Attributes of modules, names with dots, of Python, of files, in other scripts; those that differ in case; the names of the
# project itself for other things.
NAMES = [
    *("type", "items", "keys", "values", "forward", "training", "T_destination", "_modules", "__init__", "add_module"),
    *("user.id", "x.weight", ".hidden", "a..b", "weight", "embedding_bags", "escaped%x"),
    *("class", "None", "null", "1", "-", "50%", "with space", "a/b", "User", "user", "größe", "日本", "a" * 150),
    *("history", "label", "constant"),
]


def test_columns_of_any_name_train_and_are_served_by_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(ROWS)]
    sparse = {name: rng.integers(0, 20, ROWS) for name in NAMES} | {"tags.of/row": pa.array(lists)}
    dense = {"price.x": rng.normal(size=ROWS), "modules": rng.normal(size=ROWS)}
    table = pa.table({"clicked": rng.integers(0, 2, ROWS), **dense, **sparse})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    command = ["table", "--input", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "set"), "--label", "clicked"]
    assert cli.main([*command, "--dense", ",".join(dense), "--sparse", ",".join(sparse)]) == 0
    # The proposed config gives each table columns of its own, by its name: 8, so that all are projected.
    config = load_config(tmp_path / "set/config.yaml", ["name=run", f"output_dir={tmp_path}", *SMALL])
    assert config.embedding.tables.keys() == sparse.keys()
    start_training(config, ranks=2).wait()
    plan = [line.split(" ")[0] for line in (config.run_dir / "plan.txt").read_text().splitlines()]
    assert {"type", "user.id", "embedding_bags", "tags.of/row"} <= set(plan)
    export(config.run_dir, tmp_path / "model")
    command = ["apply", "--transformation", str(tmp_path / "set"), "--input", str(tmp_path / "t.parquet")]
    assert cli.main([*command, "--output", str(tmp_path / "new")]) == 0
    expected = predictions_of_eval(config.run_dir, f"data.path={tmp_path / 'new'}")
    predicted = load(tmp_path / "model").predict(table.drop_columns(["clicked"]))
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)


def test_files_of_labels_and_ids_alone_train_and_are_served(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tables = {}
    for split, rows in {"train": 300, "validation": 50, "test": 50}.items():
        types = {"type": pa.uint64(), "user.id": pa.int32(), "constant": pa.uint8()}
        ids = {name: pa.array(rng.integers(0, 20, rows), kind) for name, kind in types.items()}
        lists = pa.array([rng.integers(0, 20, 2).tolist() for _ in range(rows)], pa.large_list(pa.uint64()))
        tables[split] = pa.table({"label": pa.array(rng.integers(0, 2, rows)), **ids, "items": lists})
        (tmp_path / "ready" / split).mkdir(parents=True)
        pa.parquet.write_table(tables[split], tmp_path / "ready" / split / "a.parquet")
    data = ["data.source=parquet", f"data.path={tmp_path / 'ready'}", "embedding.rows=[20,20,20,20]"]
    batch = ["training.global_batch_size=50", "evaluation.global_batch_size=50"]
    (tmp_path / "config.yaml").touch()
    config = load_config(tmp_path / "config.yaml", ["name=run", f"output_dir={tmp_path}", *data, *batch, *SMALL])
    start_training(config, ranks=1).wait()
    export(config.run_dir, tmp_path / "model")
    model, rows = load(tmp_path / "model"), tables["test"].drop_columns(["label"])
    assert model.info["dense_features"] == []
    np.testing.assert_allclose(model.predict(rows), predictions_of_eval(config.run_dir), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="row 0, feature type: 20; allowed: whole numbers from 0 to 19"):
        model.predict([{"type": 20, "user.id": 1, "constant": 1, "items": [1]}])
