"""Writes the folder of an exported model from a run: the work of export.py."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dlrm_fused.checksums import CRC32, Checksums, FileSums
from dlrm_fused.config import Split, to_yaml
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.data_settings import transformation_of
from dlrm_fused.datasets.identity import digests_of
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.datasets.transformation import TRANSFORMATION, Transformation
from dlrm_fused.errors import ConfigError, DataError
from dlrm_fused.inference.export import loader
from dlrm_fused.inference.export.program import export_dense_part
from dlrm_fused.inference.export.quality import Quality, compare
from dlrm_fused.inference.export.weights import ALONE, convert, restore_weights, write_tables
from dlrm_fused.training.saved_run import SavedRun

MANIFEST = "manifest.json"
_CARRIED = "dlrm_rows"  # begins the name of the package beside loader.py: the modules of this package that it imports
_FIND_PACKAGE = "import sys\n\nsys.path.append(str(Path(__file__).parent))\n"
_OWN_IMPORT = re.compile(r"^from (dlrm_fused\.[\w.]+) import", re.MULTILINE)


def export_run(
    run: Path, checkpoint: str, output: Path, table_dtype: str, split: Split, overrides: Sequence[str]
) -> dict[str, Quality]:
    """Write a self-contained folder, complete or not at all; :mod:`dlrm_fused.inference.export.loader` says what is in it.

    Args:
        checkpoint: ``best``, ``last`` or a step.
        table_dtype: ``fp32``, ``fp16`` or ``int8``.
        split: the samples on which the AUC of each label is compared with that in fp32.
        overrides: ``key=value`` settings that replace those of the run.

    Returns:
        The quality by label.

    Raises:
        CheckpointError: if the run or the checkpoint does not exist, or does not fit.
        ConfigError: if the output exists or cannot be written, or the model cannot be exported.
        DataError: if the data set, which tells the features, is missing or damaged.
    """
    if output.exists():
        raise ConfigError(f"--output {output}: exists already; name another folder, or remove this one")
    saved = SavedRun.open(run, checkpoint, [*overrides, *ALONE])
    dataset = open_dataset(saved.config, torch.device("cpu"))
    saved.check_data(dataset)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        in_fp32 = _write(partial, saved, dataset, table_dtype)
        sums = Checksums.of_folder(partial, {"run": saved.config.name, "step": saved.step}, CRC32)
        sums.save(partial)
        quality = compare(loader.load(partial), in_fp32, dataset, split)
        _add_quality(partial, quality)
        sums.files[MANIFEST] = FileSums.of(partial / MANIFEST, CRC32)
        sums.save(partial)
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--output {output}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return quality


def _write(folder: Path, saved: SavedRun, dataset: Dataset, table_dtype: str) -> loader.Model:
    """Write all files but the quality and the checksums; return the model with tables in fp32."""
    schema = dataset.schema
    model, tables = restore_weights(saved, schema)
    if not getattr(model, "reads_histories", False):
        schema = dataclasses.replace(schema, token_features=(), history_length=0)
    source = transformation_of(saved.config)
    if source is not None:
        _check_transformation(Transformation.load(source), schema, source)
        (folder / TRANSFORMATION).mkdir()
        for path in filter(Path.is_file, source.iterdir()):  # copytree's errors have no reason, but those of all files
            shutil.copyfile(path, folder / TRANSFORMATION / path.name)
    # A stored set may have larger ids, which are taken modulo the rows of the model's tables.
    stored: DatasetSchema = getattr(dataset, "stored_schema", schema)
    info = {**_info(saved, schema, stored, table_dtype), "data": digests_of(saved.config, dataset)}
    info["reads_times"] = getattr(model, "reads_times", False)
    if not getattr(dataset, "has_dense", True):
        info["dense_features"] = []
    (folder / MANIFEST).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    (folder / "config.yaml").write_text(to_yaml(saved.config), encoding="utf-8")
    _write_loader(folder)
    program = export_dense_part(model, saved.config, schema)
    archive = io.BytesIO()  # torch does not tell a full disk from other failures
    torch.export.save(program, archive)
    (folder / "dense.pt2").write_bytes(archive.getbuffer())
    write_tables(folder / "tables.safetensors", {name: convert(table, table_dtype) for name, table in tables.items()})
    # safetensors lets the owner alone read its file, whatever the umask; the service may be another user.
    shutil.copymode(folder / MANIFEST, folder / "tables.safetensors")
    in_fp32 = tuple(loader.Table(tables[feature.name]) for feature in schema.tables)
    return loader.Model(info, program.module(), in_fp32, loader.read_rows(folder, info))


def _write_loader(folder: Path) -> None:
    """Copy the loader and all that it imports of this package, with imports that work without the package."""
    sources: dict[str, str] = {}
    wanted = [loader.__name__]
    while wanted:
        module = wanted.pop()
        if module not in sources:
            sources[module] = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
            wanted += _OWN_IMPORT.findall(sources[module])
    # A process may load models of several releases, each with its own code.
    package = f"{_CARRIED}_{hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:8]}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    for module, source in sources.items():
        name = module.rpartition(".")[2]
        text = _OWN_IMPORT.sub(lambda found: f"from {package}.{found[1].rpartition('.')[2]} import", source)
        if module == loader.__name__:  # users may load this file by its path
            (folder / f"{name}.py").write_text(
                text.replace(f"from {package}", f"{_FIND_PACKAGE}from {package}", 1), encoding="utf-8"
            )
        else:
            (folder / package / f"{name}.py").write_text(text, encoding="utf-8")


def _info(saved: SavedRun, schema: DatasetSchema, stored: DatasetSchema, table_dtype: str) -> dict[str, Any]:
    stored_rows = {feature.name: feature.rows for feature in stored.tables}

    def described(feature: SparseFeature) -> dict[str, Any]:
        ids = max(stored_rows[feature.name], feature.rows)
        kept = {name: getattr(feature, name) for name in ("name", "rows", "jagged", "history_only")}
        return {**kept, "ids": ids}

    return {
        "format_version": loader.FORMAT_VERSION,
        "run": saved.config.name,
        "step": saved.step,
        "table_dtype": table_dtype,
        "dense_features": list(schema.dense_features),
        "sparse_features": [described(feature) for feature in schema.sparse_features],
        "token_features": [described(feature) for feature in schema.token_features],
        "history_length": schema.history_length,
        "labels": list(schema.labels),
    }


def _check_transformation(made_by: Transformation, schema: DatasetSchema, folder: Path) -> None:
    names = (*made_by.dense_features, *(encoding.column.name for encoding in made_by.sparse))
    of_set = (*schema.dense_features, *(feature.name for feature in schema.sparse_features))
    if names != of_set:
        raise DataError(
            f"{folder}: makes the features {', '.join(names)}, but the data set beside it has {', '.join(of_set)}; "
            "put the transformation there that the set was made by, or none"
        )


def _add_quality(folder: Path, quality: Mapping[str, Quality]) -> None:
    path = folder / MANIFEST
    info = json.loads(path.read_text(encoding="utf-8"))
    by_label = {label: {**dataclasses.asdict(each), "auc_difference": each.auc_difference} for label, each in quality.items()}
    quality_info = by_label if len(by_label) > 1 else next(iter(by_label.values()))
    path.write_text(json.dumps({**info, "quality": quality_info}, indent=2) + "\n", encoding="utf-8")
