"""An exported model predicts what eval.py predicts, with torch and NumPy alone; half an export is never there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pytest
import safetensors.numpy
import torch
from fastapi import HTTPException
from numpy.typing import NDArray
from packaging.requirements import Requirement

from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.preparation.parquet import write_parquet
from dlrm_fused.errors import CheckpointError, ConfigError, DataError, UserError
from dlrm_fused.inference.export.loader import InputError, Inputs, Model, load
from dlrm_fused.inference.export.program import export_dense_part
from dlrm_fused.inference.export.quality import Quality
from dlrm_fused.inference.export.weights import convert
from dlrm_fused.inference.http.limits import Limits
from dlrm_fused.inference.http.requests import parse, request_schema
from dlrm_fused.models import build_model
from tests.distributed.launch import be_script, run_alone, small_config, train
from tests.inference.exporting import export, predictions_of_eval, running_service
from tests.inference.rows import prepared_rows
from tests.unit.prepared_sets import write_prepared_set

ROOT = Path(__file__).parents[2]
SIZES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
EXPERTS = ["model.experts.count=8", "model.experts.hidden=16"]
HISTORY = ["model.d_model=16", "data.synthetic.history_length=6", "data.synthetic.history_items=200"]
DIMS = ["embedding.tables.table_0.dim=4", "embedding.tables.table_3.dim=16"]
# Layers and tables that are sharded over the two ranks that train them.
MODELS = {
    "dlrm": ["embedding.sharding=row_wise"],
    "dcnv2": ["model.kind=dcnv2", "embedding.sharding=column_wise"],
    "transformer": ["model.kind=transformer", *HISTORY],
    "experts": [
        "model.top_mlp=[16,8,1]",
        "model.experts.top_k=3",
        "model.experts.gate=sigmoid",
        "model.experts.activation=swiglu",
        "model.experts.shared_hidden=16",
        *EXPERTS,
    ],
    "dlrm_of_unequal_tables": ["embedding.sharding=column_wise", *DIMS],
    "dcnv2_of_unequal_tables": ["model.kind=dcnv2", "embedding.sharding=row_wise", *DIMS],
    "transformer_of_unequal_tables": ["model.kind=transformer", *HISTORY, *DIMS, "embedding.tables.token_item.dim=12"],
    "hstu": ["model.kind=hstu", *HISTORY],
    "transformer_of_experts": [
        "model.kind=transformer",
        "model.tensor_parallel=1",
        *HISTORY,
        *EXPERTS,
    ],
}
# They have between them each kind of model, of table, of layer that ranks share.
QUICK = ["dlrm", "dcnv2", "experts", "dcnv2_of_unequal_tables", "transformer_of_unequal_tables", "hstu"]


def models(quick: list[str]) -> list[Any]:
    """All of them, those but ``quick`` in the slow tests."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in MODELS]


@pytest.fixture(scope="module", params=models(QUICK))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each model, trained on two ranks."""
    return train(tmp_path_factory.mktemp(request.param), 2, "training.max_steps=15", *MODELS[request.param])


@pytest.fixture(scope="module", params=["dlrm", pytest.param("transformer", marks=pytest.mark.slow)])
def of_two_labels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["training.max_steps=15", "data.synthetic.labels=2", *MODELS[request.param]]
    return train(tmp_path_factory.mktemp(f"two_labels_{request.param}"), 2, *settings)


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("dlrm"), 1, "training.max_steps=15")


@pytest.fixture(scope="module")
def model_of_dlrm(dlrm: Path) -> Path:
    """Its export in fp32, to be read; files are as they are where the umask is 022."""
    umask = os.umask(0o022)
    try:
        export(dlrm, dlrm.parent / "model")
    finally:
        os.umask(umask)
    return dlrm.parent / "model"


@pytest.fixture
def own_model(model_of_dlrm: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(model_of_dlrm, tmp_path / "model")


@dataclass(frozen=True)
class Exported:
    """A run's export in fp32: its folder, the rows of the test split, and what eval.py predicts for them."""

    folder: Path
    model: Model
    quality: Quality
    rows: list[dict[str, Any]]
    expected: NDArray[np.float32]


@pytest.fixture(scope="module")
def exported(run: Path) -> Exported:
    return exported_of(run)


@pytest.fixture(scope="module")
def exported_of_two_labels(of_two_labels: Path) -> Exported:
    return exported_of(of_two_labels)


def exported_of(run: Path) -> Exported:
    folder = run.parent / "model"
    quality = export(run, folder)
    model = load(folder)
    has_history, has_times = bool(model.info["history_length"]), model.info["reads_times"]
    rows = prepared_rows(run, with_history=has_history, with_times=has_times)
    return Exported(folder, model, quality, rows, predictions_of_eval(run))


def test_predictions_are_those_of_eval(run: Path, exported: Exported) -> None:
    model, rows, expected = exported.model, exported.rows, exported.expected
    assert len(rows) == 1501
    np.testing.assert_allclose(model.predict(rows), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(model.predict(rows[:1]), expected[:1], rtol=0, atol=1e-6)
    assert_has_tables_of(exported.folder, "fp32")
    assert exported.quality.auc_difference == 0
    bound = largest_auc_difference(run, model.predict(rows), expected)
    assert exported.quality.auc == pytest.approx(json.loads((run / "eval.json").read_text())["auc"], abs=1e-6 + bound)


def largest_auc_difference(run: Path, ours: NDArray[np.float32], evals: NDArray[np.float32], label: int = 0) -> float:
    """The part of all pairs of a positive and a negative that rounding may swap; 0 where predictions have the same bits.

    A Transformer's program computes padding, its evaluation does not.
    """
    columns = polars.read_parquet(run / "predictions.parquet")
    is_positive = columns[[name for name in columns.columns if name.startswith("label")][label]].to_numpy() > 0
    positives, negatives = evals[is_positive].astype(float), np.sort(evals[~is_positive].astype(float))
    margin = 2 * float(np.abs(ours.astype(float) - evals).max())
    if margin == 0:
        return 0.0
    near = np.searchsorted(negatives, positives + margin, "right") - np.searchsorted(negatives, positives - margin, "left")
    return float(near.sum()) / (len(positives) * len(negatives))


PAST = {"token_item": 3, "token_response": 1, "token_gap": 0, "token_time": 1_000}
NOW = {"token_item": 4, "token_gap": 5, "token_time": 2_000, "history": [PAST]}
UNTIMED = {name: value for name, value in PAST.items() if name != "token_time"}
ALLOWED = "allowed: seconds since 1970, signed whole numbers of 64 bits"


@pytest.mark.parametrize("run", ["hstu"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_time": None}, f"row 0, feature token_time: None; {ALLOWED}"),
        ({"token_time": 2e3}, f"row 0, feature token_time: 2000.0; {ALLOWED}"),
        ({"token_time": 2**63}, f"row 0, feature token_time: 9223372036854775808; {ALLOWED}"),
        ({"history": [UNTIMED]}, "row 0, history[0]: feature token_time is missing; each row has all features"),
        ({"history": [{**PAST, "token_time": "1"}]}, f"row 0, history[0], feature token_time: '1'; {ALLOWED}"),
        (
            {"history": [PAST, {**PAST, "token_time": 999}]},
            "row 0, history[0], feature token_time: 1000; allowed: times in ascending order, before the row's own, 2000",
        ),
        (
            {"token_time": 1_000},
            "row 0, history[0], feature token_time: 1000; allowed: times in ascending order, before the row's own, 1000",
        ),
    ],
)
def test_a_request_with_a_wrong_time_is_refused(exported: Exported, change: dict[str, Any], message: str) -> None:
    with pytest.raises(HTTPException) as refused:
        parse(json.dumps({"rows": [{**exported.rows[0], **NOW, **change}]}).encode(), exported.model, Limits())
    assert (refused.value.status_code, refused.value.detail) == (422, message)


@pytest.mark.parametrize("run", ["hstu"], indirect=True)
def test_times_count_of_a_model_that_reads_them(exported: Exported) -> None:
    model, row = exported.model, {**exported.rows[0], **NOW}
    assert model.predict([row]) != model.predict([{**row, "token_time": 10**9}])
    joined = Inputs.join([model.encode(exported.rows[:2]), model.encode([]), model.encode(exported.rows[2:5])])
    np.testing.assert_allclose(model.score(joined), exported.expected[:5], rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="row 0: feature token_time is missing"):
        model.predict([{name: value for name, value in row.items() if name != "token_time"}])
    described = request_schema(model)["requestBody"]["content"]["application/json"]["schema"]["properties"]["rows"]["items"]
    assert described["properties"]["token_time"] == {"description": ALLOWED.removeprefix("allowed: ")}


def test_the_program_of_hstu_without_times_takes_any_number_of_rows(tmp_path: Path) -> None:
    config = small_config(tmp_path, "model.kind=hstu", *HISTORY)
    schema = replace(open_dataset(config, torch.device("cpu")).schema, has_token_times=False)
    model = build_model(config, schema, 1, torch.device("cpu")).eval().model
    program = export_dense_part(model, config, schema).module()
    for rows in (1, 2, 70):
        dense, pooled, tokens = torch.randn(rows, 4), torch.randn(rows, 4 * 8), torch.randn(rows * 7, 3 * 8)
        lengths = torch.arange(rows) % 7
        with torch.no_grad():
            logits = model.over_arch(model.dense_arch(dense), pooled, model.transformer(tokens, lengths))
        torch.testing.assert_close(program(dense, pooled, tokens, lengths), logits.squeeze(1).sigmoid(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("run", models(["dlrm", "transformer_of_unequal_tables"]), indirect=True)
def test_a_thousand_rows_over_http_are_predicted_as_eval_predicts_them(exported: Exported) -> None:
    body = json.dumps({"rows": exported.rows[:1000]}).encode()
    with running_service(exported.folder) as service:
        status, answer = service.request("POST", "/predict", body)
    assert status == 200, answer
    np.testing.assert_allclose(json.loads(answer)["probabilities"], exported.expected[:1000], rtol=0, atol=1e-6)


def test_of_several_labels_there_is_a_prediction_for_each(of_two_labels: Path, exported_of_two_labels: Exported) -> None:
    model, rows, expected = exported_of_two_labels.model, exported_of_two_labels.rows, exported_of_two_labels.expected
    assert model.labels == ["label_0", "label_1"]
    assert expected.shape == (1501, 2)
    np.testing.assert_allclose(model.predict(rows), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(model.predict(rows[:1]), expected[:1], rtol=0, atol=1e-6)
    assert model.predict([]).shape == (0, 2)
    evaluated, quality = json.loads((of_two_labels / "eval.json").read_text()), model.info["quality"]
    assert set(quality) == set(model.labels)
    for label, of_label in quality.items():
        assert of_label["auc_difference"] == 0
        own = model.labels.index(label)
        bound = largest_auc_difference(of_two_labels, model.predict(rows)[:, own], expected[:, own], own)
        assert of_label["auc"] == pytest.approx(evaluated[f"auc/{label}"], abs=1e-6 + bound)


@pytest.mark.parametrize("run", models(["dlrm"]), indirect=True)
def test_tables_in_fp16_cost_little_auc(run: Path, tmp_path: Path) -> None:
    assert_costs_little_auc(run, tmp_path / "model", "fp16", 1e-4)


@pytest.mark.parametrize("run", models(["dlrm", "transformer_of_unequal_tables"]), indirect=True)
def test_tables_in_int8_cost_little_auc(run: Path, tmp_path: Path) -> None:
    assert_costs_little_auc(run, tmp_path / "model", "int8", 1e-3)


def assert_costs_little_auc(run: Path, model: Path, table_dtype: str, bound: float) -> None:
    quality = export(run, model, table_dtype)
    assert quality.samples == 1501
    assert abs(quality.auc_difference) < bound
    written = json.loads((model / "manifest.json").read_text())
    assert written["quality"]["auc_difference"] == quality.auc_difference
    assert written["table_dtype"] == table_dtype
    assert_has_tables_of(model, table_dtype)


def assert_has_tables_of(model: Path, table_dtype: str) -> None:
    """They are safetensors."""
    arrays = safetensors.numpy.load_file(model / "tables.safetensors")
    assert arrays["table_3.rows"].shape in ((700, 8), (700, 16))
    assert arrays["table_3.rows"].dtype == SIZES[table_dtype]
    assert ("table_3.scales" in arrays) == (table_dtype == "int8")


PREDICT = """
import json, sys
from loader import load
print(json.dumps(load("model").predict(json.load(sys.stdin)).tolist()))
"""


def environment_of(folder: Path, *packages: str) -> Path:
    """A folder of links to what these packages and those that they require consist of, and to nothing else."""
    wanted, seen = list(packages), set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        requirements = [Requirement(line) for line in distribution.requires or []]
        wanted += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():  # several packages share a folder, such as nvidia
                (folder / top).symlink_to(distribution.locate_file(top))
    return folder


@pytest.mark.parametrize("run", models(["experts"]), indirect=True)
def test_the_loader_needs_torch_and_numpy_alone(exported: Exported, tmp_path: Path) -> None:
    assert_loads_alone(exported, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("of_two_labels", ["dlrm"], indirect=True)
def test_the_loader_of_several_labels_needs_them_alone_too(exported_of_two_labels: Exported, tmp_path: Path) -> None:
    assert_loads_alone(exported_of_two_labels, tmp_path)


def assert_loads_alone(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    packages = environment_of(tmp_path / "packages", "torch", "numpy")
    rows = exported.rows[:20]
    done = subprocess.run(
        [sys.executable, "-S", "-c", PREDICT],
        cwd=exported.folder.parent,
        env={"PYTHONPATH": f"{exported.folder}:{packages}"},
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), exported.model.predict(rows), rtol=0, atol=1e-7)


def test_an_arrow_table_is_as_good_as_dicts(dlrm: Path, model_of_dlrm: Path) -> None:
    model, rows = load(model_of_dlrm), prepared_rows(dlrm)[:50]
    assert model.predict(pa.Table.from_pylist(rows)).tolist() == model.predict(rows).tolist()
    assert model.predict([]).tolist() == []


def test_int8_rounds_each_row_to_a_254th_of_its_largest_value() -> None:
    weight = (
        np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32) * np.logspace(-6, 3, 100, dtype=np.float32)[:, None]
    )
    weight[7] = 0
    table = convert(weight, "int8")
    assert table.scales is not None
    error = np.abs(table.rows * table.scales[:, None] - weight).max(axis=1)
    assert (error <= np.abs(weight).max(axis=1) / 254 * 1.0001).all()
    assert not table.rows[7].any()


@pytest.mark.parametrize("source", ["synthetic", "prepared", "parquet"])
def test_rows_of_a_capped_table_are_found_modulo_the_cap(tmp_path: Path, source: str) -> None:
    if source != "synthetic":
        write_prepared_set(tmp_path / "prepared", {"train": 500, "validation": 50, "test": 50})
        write_parquet(tmp_path / "prepared", tmp_path / "parquet", row_group_rows=100)
    data = [f"data.source={source}", f"data.path={tmp_path / source}"]
    run = train(tmp_path, 1, "training.max_steps=20", "embedding.max_rows=10", *data)
    export(run, tmp_path / "model")
    # As they are stored, while synthetic ids are made for the rows of the tables.
    rows = prepared_rows(run, overrides=[] if source == "synthetic" else ["embedding.max_rows=0"])
    np.testing.assert_allclose(load(tmp_path / "model").predict(rows), predictions_of_eval(run), rtol=0, atol=1e-6)


def test_the_command_says_what_it_has_written(dlrm: Path, tmp_path: Path) -> None:
    command = (tmp_path, be_script, ROOT / "export.py", ["--run", str(dlrm), "--output", "model", "--tables", "int8"])
    done = run_alone(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "model: tables in int8"
    assert "difference of AUC: " in done.stdout
    assert {path.name.partition("rows_")[0] for path in (tmp_path / "model").iterdir()} == {
        "checksums.json",
        "config.yaml",
        "dense.pt2",
        "dlrm_",
        "loader.py",
        "manifest.json",
        "tables.safetensors",
    }
    again = run_alone(*command)
    assert again.returncode == 1
    assert "ERROR --output model: exists already" in again.stderr + again.stdout
    assert "Traceback" not in again.stderr


def test_whoever_the_umask_allows_may_read_an_export(model_of_dlrm: Path) -> None:
    files = [path for path in model_of_dlrm.rglob("*") if path.is_file()]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: 0o644 for path in files}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"run": "nowhere"}, CheckpointError, "no run there"),
        ({"checkpoint": "7"}, CheckpointError, "--checkpoint 7: .* has no such checkpoint"),
        ({"overrides": ["data.source=prepared", "data.path=nowhere"]}, DataError, "data.path=nowhere: no such folder"),
        ({"overrides": ["model.top_mlp=[32,1]"]}, CheckpointError, "belongs to other settings"),
        ({"overrides": ["model.bottom_mlp=[8]"]}, CheckpointError, "has dense.model.dense_arch.* which the model lacks"),
        ({"overrides": ["model.top=1"]}, ConfigError, "model.top: unknown setting"),
    ],
)
def test_an_export_that_fails_leaves_nothing(
    dlrm: Path, tmp_path: Path, arguments: dict[str, object], error: type[UserError], message: str
) -> None:
    from dlrm_fused.config import Split
    from dlrm_fused.inference.export.folder import export_run

    wanted = {
        "run": dlrm,
        "checkpoint": "last",
        "output": tmp_path / "model",
        "table_dtype": "fp32",
        "split": Split.test,
        "overrides": [],
        **arguments,
    }
    with pytest.raises(error, match=message):
        export_run(**{**wanted, "run": Path(str(wanted["run"]))})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tables.safetensors", "manifest.json", "dense.pt2"])
def test_a_damaged_model_is_not_loaded(own_model: Path, name: str) -> None:
    path = own_model / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{name}: damaged: .*; export the model again"):
        load(own_model)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{name}: damaged: .*; export the model again"):
        load(own_model)


@pytest.mark.parametrize("content", [b"", b"\xff" * 50, b"\x04" + bytes(7) + b"[1] ", b'{"format_version": 2}', None])
@pytest.mark.parametrize("name", ["tables.safetensors", "manifest.json", "dense.pt2"])
def test_damage_is_told_without_checksums_too(own_model: Path, name: str, content: bytes | None) -> None:
    (own_model / "checksums.json").unlink()
    (own_model / name).unlink()
    if content is not None:
        (own_model / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"{name}: (damaged \(.*\)|missing); export the model again"):
        load(own_model)


def test_a_model_without_checksums_is_loaded_and_that_is_told(own_model: Path, caplog: Any) -> None:
    (own_model / "checksums.json").unlink()
    load(own_model)
    assert "without checksums" in caplog.text


def test_a_full_disk_is_told_in_one_line(dlrm: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(ConfigError, match=r"^--output .*disk/model: cannot be written: No space left on device$"):
            export(dlrm, disk / "model")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)
