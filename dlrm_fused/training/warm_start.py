"""The weights of another run, for the first step of a new one whose vocabularies may have grown."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets.data_settings import transformation_of
from dlrm_fused.datasets.identity import digest_of_features
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.datasets.transformation import MISSING, TRANSFORMATION, UNSEEN, IdEncoding, Transformation
from dlrm_fused.errors import CheckpointError
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.checkpoint import LocalShards, RawReader, model_state, restore_tensors
from dlrm_fused.training.run_folder import RunFolder

logger = logging.getLogger("dlrm_fused")

# Rows of a table that each rank reads at a time, whatever part of it becomes its own.
_BLOCK_ROWS = 1 << 20
_NEW = -1


@dataclass(frozen=True)
class RowMap:
    """The rows of a table that continue from another run.

    Attributes:
        old_ids: int64 [rows of the new table]: the id that the value had in the other run; -1 for a value that it did not know.
    """

    old_rows: int
    old_ids: NDArray[np.int64]

    @staticmethod
    def of(old: IdEncoding, new: IdEncoding) -> RowMap:
        """Return the map by the values of two vocabularies; missing and unseen values have the same ids in all."""
        assert old.vocabulary is not None
        assert new.vocabulary is not None
        old_ids = np.full(new.rows, _NEW, np.int64)
        old_ids[[MISSING, UNSEEN]] = MISSING, UNSEEN
        found = old.vocabulary.find(np.asarray(new.vocabulary.keys))
        old_ids[new.vocabulary.ids] = np.where(found == UNSEEN, _NEW, found)
        return RowMap(old.rows, old_ids)


def warm_start(config: Config, sharded: ShardedModel, schema: DatasetSchema) -> None:
    """Give a new model the weights of the run ``checkpoint.warm_start``: its best checkpoint, or its last. Collective.

    Rows of tables go on under the ids that their values have now, if both data sets were made by ``data/prepare.py table`` or
    ``apply``; values that the other run did not know keep their initial weights. Without transformations, all tables must be as
    large as before. Optimizers begin anew.

    Raises:
        CheckpointError: there is no such checkpoint, it does not fit the model, its features or its labels, or rows cannot be
            matched.
        ConfigError, DataError: the other run's config or transformation cannot be read.
    """
    run = RunFolder(Path(config.checkpoint.warm_start))
    try:
        _begin_with_weights_of(run, config, sharded, schema)
    except CheckpointError as error:
        raise CheckpointError(f"{_setting(run)}: {error}") from None


def _begin_with_weights_of(run: RunFolder, config: Config, sharded: ShardedModel, schema: DatasetSchema) -> None:
    # One answer for all ranks: the other run may still train, and write checkpoints.
    step = gather_or_raise(lambda: run.checkpoints.best() or run.checkpoints.last())[0]
    if step is None:
        raise CheckpointError("holds no checkpoint; name the folder of a run, such as runs/a")
    run.checkpoints.check_labels(step, schema.labels)
    _check_transformation(run, step)
    with_histories = config.model.kind.reads_histories
    tables = {table.name: table.rows for table in (schema.tables if with_histories else schema.sparse_features)}
    maps = {table: rows for table, rows in _row_maps(run, config).items() if table in tables}
    _check_rows(maps, tables)
    _check_features(run, step, schema, with_histories)
    path, state = run.checkpoints.of(step), model_state(sharded)
    matched = {f"table.{table}.weight" for table in maps}
    restore_tensors(path, {key: value for key, value in state.items() if key not in matched})
    for table, rows in maps.items():
        key = f"table.{table}.weight"
        # A rank that holds nothing of a table takes part in reading it all the same.
        shards = state.get(key, LocalShards((len(rows.old_ids), config.embedding.dim_of(table)), []))
        assert isinstance(shards, LocalShards)
        restore_rows(path, key, shards, rows)
    logger.info("weights of %s, step %d; rows of %d tables matched by their values", run.path, step, len(maps))


def _setting(run: RunFolder) -> str:
    return f"checkpoint.warm_start={run.path}"


def _check_transformation(run: RunFolder, step: int) -> None:
    """Check that the run's data set, whose transformation tells the value of each table row, was not prepared again."""
    other = load_config(run.path / "config.yaml")
    folder = transformation_of(other)
    if folder is None:
        return
    trained_with, found = run.checkpoints.progress(step).data.get("transformation"), Transformation.digest_of(folder)
    if trained_with and found and trained_with != found:
        raise CheckpointError(
            f"was trained with another transformation than its data.path={other.data.path} has now; put the "
            "set there that it was trained on"
        )
    if not (trained_with and found):
        logger.warning("%s: nothing tells whether data.path=%s is the set of its training", _setting(run), other.data.path)


def _check_rows(maps: Mapping[str, RowMap], tables: Mapping[str, int]) -> None:
    for table, rows in tables.items():
        ids = len(maps[table].old_ids) if table in maps else rows
        if rows != ids:
            raise CheckpointError(f"{table} has {rows} rows for {ids} ids; allowed: embedding.max_rows=0")


def _check_features(run: RunFolder, step: int, schema: DatasetSchema, with_histories: bool) -> None:
    """Check that features have the places that they had: weights of dense layers know these alone."""
    trained_with = run.checkpoints.progress(step).data.get("features" if with_histories else "sample_features")
    if trained_with not in (None, digest_of_features(schema, with_histories)):
        raise CheckpointError(
            "was trained on other features, in another order, or with histories of another length; take the same columns in "
            "the same order, and the same length"
        )


def restore_rows(path: Path, key: str, table: LocalShards, rows: RowMap) -> None:
    """Fill the rows of a table that go on from a checkpoint; the others stay as they are. Collective.

    Raises:
        CheckpointError: the checkpoint's table has another number of rows or columns, or cannot be read.
    """
    if key not in RawReader(path).read_metadata().state_dict_metadata:
        raise CheckpointError(f"{path}: has no {key}; a model with other features cannot begin with its weights")
    columns = table.shape[1]
    shard_at = {column: shard for (_, column), shard in table.shards}
    for first in range(0, rows.old_rows, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, rows.old_rows - first)
        blocks = {column: shard.new_empty(count, shard.shape[1]) for column, shard in shard_at.items()}
        request = LocalShards((rows.old_rows, columns), [((first, column), block) for column, block in blocks.items()])
        restore_tensors(path, {key: request})
        for (row, column), shard in table.shards:
            old_ids = torch.from_numpy(rows.old_ids[row : row + len(shard)])
            here = torch.nonzero((old_ids >= first) & (old_ids < first + count)).flatten()
            block = blocks[column]
            shard[here.to(shard.device)] = block[(old_ids[here] - first).to(block.device)]


def _row_maps(run: RunFolder, config: Config) -> dict[str, RowMap]:
    """Return the row maps of the tables whose values have vocabularies."""
    folders = {str(run.path): transformation_of(load_config(run.path / "config.yaml")), "this run": transformation_of(config)}
    there = [folder for folder in folders.values() if folder is not None]
    if not there:
        return {}
    if len(there) == 1:
        without = next(name for name, folder in folders.items() if folder is None)
        raise CheckpointError(
            f"the data of {without} has no {TRANSFORMATION}, that of the other run has one: rows cannot be "
            "matched; prepare both with data/prepare.py table"
        )
    old, new = map(Transformation.load, there)
    old_of = {encoding.column.name: encoding for encoding in old.sparse}
    maps: dict[str, RowMap] = {}
    for encoding in new.sparse:
        before = old_of.get(encoding.column.name)
        if before is None:
            continue  # a feature that the other model does not have, which is told when its weights are read
        if _kind_of(before) != _kind_of(encoding):
            raise CheckpointError(
                f"{encoding.column.name} had {_kind_of(before)} there, and has {_kind_of(encoding)} now: rows cannot be matched"
            )
        if encoding.vocabulary is not None:  # a hash knows no values, but gives the same ids to as many rows
            maps |= dict.fromkeys(new.tables_of(encoding), RowMap.of(before, encoding))
    return maps


def _kind_of(encoding: IdEncoding) -> str:
    return f"{'hashed ' if encoding.vocabulary is None else ''}{encoding.column.values.name} values"
