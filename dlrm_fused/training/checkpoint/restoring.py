"""Checkpoints loaded into a model, on any number of ranks and any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dlrm_fused.errors import CheckpointError
from dlrm_fused.sharding.optimizers import set_optimizer_step
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.sharding.tables import data_parallel_tables
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.checkpoint.folder import Progress
from dlrm_fused.training.checkpoint.state import LocalShards, State, model_state, optimizer_state, random_state, tensors_of
from dlrm_fused.training.checkpoint.storage import RawReader, reason_of


def restore(path: Path, sharded: ShardedModel, progress: Progress, device: torch.device) -> None:
    """Load model, optimizers and random states from a checkpoint, in place. Collective.

    Raises:
        CheckpointError: if the checkpoint is damaged or does not fit the model; nothing of it is used then.
    """
    for _, optimizer in sharded.optimizer.optimizers:
        if optimizer is not sharded.model.fused_optimizer and not optimizer.state:
            optimizer.init_state()  # Adam, and SGD with momentum, make theirs in the first step
    restore_tensors(path, {**model_state(sharded), **optimizer_state(sharded)}, is_whole=True)
    set_optimizer_step(sharded.model, progress.step)
    _set_step_of_data_parallel_tables(sharded, progress.step)
    _restore_random_state(path, device)


def _set_step_of_data_parallel_tables(sharded: ShardedModel, step: int) -> None:
    """Set the step that torch's optimizers count (Adam's bias correction); checkpoints of other plans have no such counts."""
    tables = [parameter for _, parameter in data_parallel_tables(sharded.model)]
    for _, optimizer in sharded.optimizer.optimizers:
        for parameter, state in optimizer.state.items():
            if "step" in state and any(parameter is table for table in tables):
                state["step"].fill_(step)


def restore_model(path: Path, sharded: ShardedModel) -> None:
    """Load the model alone, for evaluation. Collective. Raises like :func:`restore`."""
    restore_tensors(path, model_state(sharded), is_whole=True)


def restore_tensors(path: Path, state: State, *, is_whole: bool = False) -> None:
    """Fill the tensors of ``state`` from the checkpoint. Collective.

    Args:
        is_whole: whether ``state`` has all that the model is made of.

    Raises:
        CheckpointError: if a tensor is missing, has another shape, or cannot be read, or with ``is_whole`` if the checkpoint
            has dense weights that ``state`` has not.
    """
    stored = _stored(path)
    unknown = sorted(key for key in stored.keys() - state.keys() if key.startswith("dense.model."))
    if is_whole and unknown:
        raise CheckpointError(f"{path}: has {unknown[0]}, which the model lacks; it belongs to a model of other settings")
    request: State = {}
    averaged: list[tuple[LocalShards, LocalShards]] = []
    # Tables first: another data set changes the shapes of dense layers too.
    for key, value in sorted(state.items(), key=lambda item: not item[0].startswith("table.")):
        entry = stored.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path}: has no {key}; it belongs to a model or optimizer of other settings")
        saved, wanted = tuple(entry.size), tuple(value.shape)
        if saved == wanted:
            request[key] = value
        elif isinstance(value, LocalShards) and saved[0] == wanted[0] and _is_rowwise_state(key, wanted, stored):
            all_columns = _all_columns(value, saved[1])
            request[key] = all_columns
            averaged.append((value, all_columns))
        else:
            raise CheckpointError(
                f"{path}: {key} has shape {list(saved)}, the model's has {list(wanted)}: it belongs to other settings"
            )
    _read(path, request)
    for target, source in averaged:
        for mean_of, into in zip(tensors_of(source), tensors_of(target), strict=True):
            into.copy_(mean_of.mean(dim=1, keepdim=True))


def _is_rowwise_state(key: str, wanted: tuple[int, ...], stored: dict[str, Any]) -> bool:
    weight = stored.get(f"{key.rsplit('.', 1)[0]}.weight")
    return not key.endswith(".weight") and weight is not None and wanted[1] != weight.size[1]


def _all_columns(value: LocalShards, columns: int) -> LocalShards:
    return LocalShards(
        (value.shape[0], columns), [((at[0], 0), tensor.new_empty(len(tensor), columns)) for at, tensor in value.shards]
    )


def _restore_random_state(path: Path, device: torch.device) -> None:
    state = random_state(dist.get_rank(), device)
    stored = _stored(path)
    found = {key: value for key, value in state.items() if key in stored}  # none on a rank that did not exist then
    _read(path, found)
    for key, value in found.items():
        if key.endswith("cuda"):
            torch.cuda.set_rng_state(cast(Tensor, value), device)
        else:
            torch.set_rng_state(cast(Tensor, value))


def _stored(path: Path) -> dict[str, Any]:
    """Return the entries of the checkpoint's metadata, by key. Collective: a rank that cannot read it ends all."""
    entries: dict[str, Any] = {}
    gather_or_raise(lambda: entries.update(RawReader(path).read_metadata().state_dict_metadata))
    return entries


def _read(path: Path, request: State) -> None:
    try:
        load(
            cast(dict[str, Any], request),
            storage_reader=RawReader(path),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}") from None


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default one replaces values whose types it does not know.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.shard(index) if isinstance(value, LocalShards) else cast(Tensor, value)
