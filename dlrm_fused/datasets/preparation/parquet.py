"""A prepared set as Parquet files, as ``data.source=parquet`` reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_fused.datasets.parquet_files import IS_WEIGHT, POOLING_FACTOR, ROWS
from dlrm_fused.datasets.preparation.writer import new_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, checksums_of, labels_shape
from dlrm_fused.datasets.storage import IdColumns, SetFolder
from dlrm_fused.datasets.transformation import TRANSFORMATION
from dlrm_fused.errors import DataError

ROW_GROUP_ROWS = 131_072
SAMPLE_WEIGHT = "sample_weight"  # the column of weights


def write_parquet(prepared: Path, output: Path, row_group_rows: int = ROW_GROUP_ROWS) -> PreparedInfo:
    """Write each split of a prepared set as one Parquet file, its rows in the same order, and beside them its transformation.

    Args:
        row_group_rows: of a row group, 1 or more.

    Returns:
        What the prepared set holds.

    Raises:
        DataError: if ``prepared`` holds no prepared set, or one whose features Parquet files cannot hold; or if ``output`` is
            not empty. Nothing is written then.
    """
    info = PreparedInfo.load(prepared)
    checksums = checksums_of(prepared)
    _check_writable(info.schema, prepared)
    if output.is_dir() and any(output.iterdir()):
        raise DataError(f"--output {output}: is not empty; choose an empty or new folder")
    with new_output(output, overwrite=False) as folder:
        for split, rows in info.samples.items():
            (folder / split).mkdir()
            source, path = SetFolder(prepared, split, checksums), folder / split / "part-00000.parquet"
            _write_split(source, path, info.schema, rows, row_group_rows)
        if (prepared / TRANSFORMATION).is_dir():
            shutil.copytree(prepared / TRANSFORMATION, folder / TRANSFORMATION)
    return info


def _check_writable(schema: DatasetSchema, folder: Path) -> None:
    if schema.token_features:
        raise DataError(
            f"--input {folder}: has histories, which Parquet files of samples cannot hold; train on the prepared set"
        )
    names = _arrow_schema(schema).names
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"--input {folder}: two columns would be named {name}; rename the feature or label and prepare the set again"
            )


def _write_split(source: SetFolder, path: Path, schema: DatasetSchema, rows: int, group_rows: int) -> None:
    labels = source.map("labels.npy", [rows, *labels_shape(schema.labels)], ["uint8"])
    weights = source.map("weights.npy", [rows], ["float32"]) if schema.has_weights else None
    dense = source.map("dense.npy", [rows, len(schema.dense_features)], ["float32"])
    ids = IdColumns(source, schema.sparse_features, rows, str(source.root / source.name))
    columns = _arrow_schema(schema)
    with pq.ParquetWriter(path, columns) as writer:
        for start in range(0, rows, group_rows):
            group = np.arange(start, min(start + group_rows, rows))
            of_labels = labels.take(group).reshape(len(group), -1)
            columns_of_group = [*of_labels.T, *([weights.take(group)] if weights is not None else []), *dense.take(group).T]
            arrays = [pa.array(column) for column in columns_of_group]
            for feature, values, lengths in zip(schema.sparse_features, *ids.read(group), strict=True):
                if feature.jagged:
                    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                    arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)))
                else:
                    arrays.append(pa.array(values))
            writer.write_table(pa.table(arrays, schema=columns), row_group_size=group_rows)


def _arrow_schema(schema: DatasetSchema) -> pa.Schema:
    dense = [pa.field(name, pa.float32()) for name in schema.dense_features]
    sparse = [
        pa.field(
            feature.name,
            pa.list_(pa.int32()) if feature.jagged else pa.int32(),
            metadata={ROWS: str(feature.rows), POOLING_FACTOR: repr(float(feature.pooling_factor))},
        )
        for feature in schema.sparse_features
    ]
    labels = [pa.field(label, pa.uint8()) for label in schema.labels]
    weights = [pa.field(SAMPLE_WEIGHT, pa.float32(), metadata={IS_WEIGHT: ""})] if schema.has_weights else []
    return pa.schema([*labels, *weights, *dense, *sparse])
