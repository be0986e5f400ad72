"""Checkpoints: complete or absent, written while training goes on, loadable on any number of ranks and any plan.

A run's ``checkpoints/`` holds one folder ``step_<step>`` per checkpoint: torch.distributed.checkpoint (DCP) decides who writes
and reads what, :mod:`checkpoint_storage` is the files, and ``progress.json`` says where the run stood. A checkpoint is written
to a folder of another name and renamed when all of it is on disk.

Tensors are stored under names that do not depend on the plan:

===============================  ==========================  ==========================================
key                              global shape                content
===============================  ==========================  ==========================================
``dense.<parameter>``            as the parameter            dense weights and buffers
``dense_optimizer.<p>.<state>``  as the state                their optimizer's state
``table.<table>.weight``         [rows, dim]                 embedding weights
``table.<table>.<state>``        [rows, dim] or [rows, n]    state of the embedding optimizer, see below
``random.<rank>.<device>``       [bytes]                     state of a rank's random generators
===============================  ==========================  ==========================================

A parameter that is cut over ranks, tensor-parallel or of experts, and its optimizer's state have the shape of the whole: any
number of ranks loads them.

A rowwise optimizer keeps one number for the columns of one shard: n is the number of column shards, 1 unless the plan cuts
columns. Loading with another n gives every shard the mean over the n saved ones. For rowwise Adagrad, whose state is a sum of
row means of squared gradients, the mean is exactly the state of an uncut row.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dlrm_fused.config import CheckpointConfig
from dlrm_fused.errors import CheckpointError
from dlrm_fused.sharding.groups import ModelParallelGroups
from dlrm_fused.sharding.parallel import ShardedModel, data_parallel_tables, is_table, set_optimizer_step, table_name
from dlrm_fused.training.checkpoint_storage import RawReader, RawWriter

logger = logging.getLogger("dlrm_fused")

_PREFIX, _UNFINISHED_PREFIX = "step_", ".writing_step_"
_PROGRESS_FILE = "progress.json"
# torch.optim's names of the states that FBGEMM calls momentum1 and momentum2.
_STATE_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "momentum2"}


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: steps made; the data position follows from it.
        samples: samples seen, over all ranks.
        loss: mean over the steps since the report before.
        world_size: ranks that wrote the checkpoint.
        validation_auc: of an evaluation at this very step, if there was one.
        settings: the flattened config.
    """

    step: int
    samples: int
    loss: float
    world_size: int
    validation_auc: float | None
    settings: dict[str, object]


class CheckpointFolder:
    """The complete checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        names = (p.name.removeprefix(_PREFIX) for p in self.path.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def last(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the highest validation AUC among the checkpoints that have one; NaN is none."""
        aucs = [(self.progress(step).validation_auc, step) for step in self.steps()]
        scored = [(auc, step) for auc, step in aucs if auc is not None and not math.isnan(auc)]
        return max(scored)[1] if scored else None

    def of(self, step: int) -> Path:
        return self.path / f"{_PREFIX}{step:09d}"

    def progress(self, step: int) -> Progress:
        """Raises CheckpointError if the checkpoint is damaged."""
        path = self.of(step) / _PROGRESS_FILE
        try:
            return Progress(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path}: damaged ({type(error).__name__}); remove {self.of(step)} to go on from an earlier checkpoint"
            ) from None

    def select(self, which: str) -> int:
        """The step of ``best``, ``last``, or a step given as a number.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        steps = self.steps()
        found = {"last": self.last, "best": self.best}.get(which, lambda: int(which) if which.isdigit() else None)()
        if found is None or found not in steps:
            has = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"--checkpoint {which}: {self.path} has no such checkpoint; steps there: {has}")
        return found

    def remove_unfinished(self) -> None:
        for leftover in self.path.glob(f"{_UNFINISHED_PREFIX}*"):
            shutil.rmtree(leftover)

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove all but the newest ``keep_last`` checkpoints and, if so wished, the best one."""
        keep = {*self.steps()[-keep_last:], self.best() if keep_best else None}
        for step in self.steps():
            if step not in keep:
                # Renamed first, so that a half removed one is never taken for complete.
                doomed = self.path / f"{_UNFINISHED_PREFIX}{step}_removed"
                self.of(step).rename(doomed)
                shutil.rmtree(doomed)


class LocalShards:
    """The parts of a tensor of which this rank holds some; DCP reads and writes it like a sharded tensor.

    Attributes:
        shape: of the whole tensor.
        pieces: (index of the first element, such as (row, column), and tensor) of each part.
        is_written: whether this rank writes its parts; false where another rank holds the same ones and does.
    """

    def __init__(
        self, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], Tensor]], is_written: bool = True
    ) -> None:
        self.shape = shape
        self.pieces = list(pieces)
        self.is_written = is_written

    def map(self, function: Callable[[Tensor], Tensor]) -> LocalShards:
        return LocalShards(self.shape, [(at, function(tensor)) for at, tensor in self.pieces], self.is_written)

    def piece(self, index: MetadataIndex) -> Tensor:
        return next(tensor for at, tensor in self.pieces if torch.Size(at) == index.offset)

    # The protocol by which DCP asks an object for its parts (torch.distributed._checkpointable).
    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk, (_, tensor) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.size()) for at, tensor in self.pieces]


State = dict[str, Tensor | LocalShards]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.piece(index) if isinstance(value, LocalShards) else value


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
        return value.piece(index) if isinstance(value, LocalShards) else cast(Tensor, value)


def model_state(sharded: ShardedModel) -> State:
    """The live tensors of the model, by their keys in a checkpoint."""
    state: State = {}
    parameters = dict(sharded.model.named_parameters())
    for name, value in sharded.model.state_dict().items():
        if not is_table(name):
            state[f"dense.{name}"] = of_dense(value.detach(), parameters.get(name), sharded.groups)
    for name, parameter in data_parallel_tables(sharded.model):
        state[f"table.{table_name(name)}.weight"] = _whole(parameter.detach())
    for name, weight in sharded.model.fused_optimizer.params.items():
        pieces = [(tuple(p.metadata.shard_offsets), p.tensor.detach()) for p in weight.local_shards()]
        state[f"table.{table_name(name)}.weight"] = LocalShards(tuple(weight.size()), pieces)
    return state


def optimizer_state(sharded: ShardedModel) -> State:
    """The live tensors of all optimizers, by their keys in a checkpoint."""
    state: State = {}
    fused = sharded.model.fused_optimizer.params
    parameters = dict(sharded.model.named_parameters())
    for name, values in sharded.optimizer.state_dict()["state"].items():
        for state_name, value in values.items():
            if name in fused:
                key = f"table.{table_name(name)}.{state_name.rsplit('.', 1)[-1]}"
                state[key] = _pieces_like(fused[name], value)
            elif not is_table(name):
                key = f"dense_optimizer.{name}.{state_name}"
                state[key] = of_dense(value.detach(), parameters[name], sharded.groups)
            elif state_name in _STATE_NAMES:  # the others, counts of steps, follow from the step of the checkpoint
                state[f"table.{table_name(name)}.{_STATE_NAMES[state_name]}"] = _whole(value.detach())
    return state


def of_dense(value: Tensor, parameter: Tensor | None, groups: ModelParallelGroups | None) -> Tensor | LocalShards:
    """A dense parameter, or a state of its optimizer: this rank's piece of it if the parameter is cut."""
    dim = getattr(parameter, "shard_dim", None)
    if dim is None or parameter is None or groups is None or value.shape != parameter.shape:
        return value
    shape, begin = list(value.shape), [0] * value.dim()
    shape[dim] *= groups.model_parallel.size()
    begin[dim] = groups.model_parallel.rank() * value.shape[dim]
    return LocalShards(tuple(shape), [(tuple(begin), value)], is_written=groups.is_first)


def _whole(tensor: Tensor) -> LocalShards:
    return LocalShards(tuple(tensor.shape), [((0, 0), tensor)], is_written=dist.get_rank() == 0)


def _pieces_like(weight: Any, value: Any) -> LocalShards:
    """The optimizer state ``value`` of a sharded table, laid out as the module docstring says."""
    pieces = list(zip(weight.local_shards(), value.local_shards(), strict=True))
    if value.dim() == 2:
        return LocalShards(tuple(weight.size()), [(tuple(w.metadata.shard_offsets), s.tensor.detach()) for w, s in pieces])
    columns = sorted({shard.shard_offsets[1] for shard in weight.metadata().shards_metadata})
    return LocalShards(
        (weight.size(0), len(columns)),
        [
            ((w.metadata.shard_offsets[0], columns.index(w.metadata.shard_offsets[1])), s.tensor.detach().unsqueeze(1))
            for w, s in pieces
        ],
    )


def random_state(rank: int, device: torch.device) -> State:
    """States of this rank's random generators."""
    state: State = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time.

    :meth:`save` copies the state to host memory (pinned when it comes from a GPU, and kept for the next time) and returns;
    a thread writes it. Collective, also the construction: it makes a process group of its own, since the thread's
    collectives must not mix with those of training.
    """

    def __init__(self, folder: CheckpointFolder, settings: CheckpointConfig, device: torch.device) -> None:
        self._folder = folder
        self._settings = settings
        self._device = device
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._staging: State = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if dist.get_rank() == 0:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.remove_unfinished()

    def save(self, sharded: ShardedModel, progress: Progress) -> None:
        """Start writing a checkpoint, after the one before it is complete. Collective.

        Raises:
            CheckpointError: if the one before it could not be written.
        """
        self.wait()
        self._stage(self._state(sharded))
        self._thread = threading.Thread(target=self._write, args=(progress,), name="checkpoint")
        self._thread.start()

    def allocate(self, sharded: ShardedModel) -> None:
        """Take the host memory now that :meth:`save` would take the first time, while training waits for it."""
        for key, value in self._state(sharded).items():
            self._staging[key] = _each(value, self._host_buffer)

    def wait(self) -> None:
        """Return when the checkpoint being written is complete.

        Raises:
            CheckpointError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"{self._folder.path}: a checkpoint could not be written: {_reason(error)}") from error

    def _state(self, sharded: ShardedModel) -> State:
        rank = dist.get_rank()
        state = {**model_state(sharded), **optimizer_state(sharded), **random_state(rank, self._device)}
        # What several ranks hold alike is written once.
        return {key: value for key, value in state.items() if _is_written(key, value, rank)}

    def _stage(self, state: State) -> None:
        for key, value in state.items():
            if key not in self._staging:  # an optimizer's state that its first step made
                self._staging[key] = _each(value, self._host_buffer)
            for source, target in zip(_tensors(value), _tensors(self._staging[key]), strict=True):
                target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda, memory_format=torch.contiguous_format)

    def _write(self, progress: Progress) -> None:
        try:
            unfinished = self._folder.path / f"{_UNFINISHED_PREFIX}{progress.step}"
            save(
                cast(dict[str, Any], self._staging),
                storage_writer=RawWriter(unfinished),
                planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
            if dist.get_rank() == 0:
                self._complete(unfinished, progress)
        except BaseException as error:
            self._error = error

    def _complete(self, unfinished: Path, progress: Progress) -> None:
        with (unfinished / _PROGRESS_FILE).open("w") as file:
            json.dump(asdict(progress), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        target = self._folder.of(progress.step)
        if target.exists():  # the same step, of a run that was resumed from an earlier one
            shutil.rmtree(target)
        _sync_folder(unfinished)
        unfinished.rename(target)
        _sync_folder(self._folder.path)
        self._folder.prune(self._settings.keep_last, self._settings.keep_best)


def _is_written(key: str, value: Tensor | LocalShards, rank: int) -> bool:
    return value.is_written if isinstance(value, LocalShards) else rank == 0 or key.startswith("random.")


def _each(value: Tensor | LocalShards, function: Callable[[Tensor], Tensor]) -> Tensor | LocalShards:
    return value.map(function) if isinstance(value, LocalShards) else function(value)


def _tensors(value: Tensor | LocalShards) -> Iterator[Tensor]:
    if isinstance(value, LocalShards):
        yield from (tensor for _, tensor in value.pieces)
    else:
        yield value


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {' '.join(str(cause).split())[:300]}"
    return " ".join(str(error).split())[:300]


def restore(path: Path, sharded: ShardedModel, progress: Progress, device: torch.device) -> None:
    """Load model, optimizers and random states from a checkpoint, in place. Collective.

    Raises:
        CheckpointError: if the checkpoint is damaged or does not fit the model; nothing of it is used then.
    """
    for _, optimizer in sharded.optimizer.optimizers:
        if optimizer is not sharded.model.fused_optimizer and not optimizer.state:
            optimizer.init_state()  # Adam, and SGD with momentum, make theirs in the first step
    restore_tensors(path, {**model_state(sharded), **optimizer_state(sharded)})
    set_optimizer_step(sharded.model, progress.step)
    _restore_random_state(path, device)


def restore_model(path: Path, sharded: ShardedModel) -> None:
    """Load the model alone, for evaluation. Collective. Raises like :func:`restore`."""
    restore_tensors(path, model_state(sharded))


def restore_tensors(path: Path, state: State) -> None:
    """Fill the tensors of ``state`` from the checkpoint. Collective.

    Raises:
        CheckpointError: if a tensor is missing, has another shape, or cannot be read.
    """
    stored = RawReader(path).read_metadata().state_dict_metadata
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
        for mean_of, into in zip(_tensors(source), _tensors(target), strict=True):
            into.copy_(mean_of.mean(dim=1, keepdim=True))


def _is_rowwise_state(key: str, wanted: tuple[int, ...], stored: dict[str, Any]) -> bool:
    weight = stored.get(f"{key.rsplit('.', 1)[0]}.weight")
    return not key.endswith(".weight") and weight is not None and wanted[1] != weight.size[1]


def _all_columns(value: LocalShards, columns: int) -> LocalShards:
    return LocalShards(
        (value.shape[0], columns), [((at[0], 0), tensor.new_empty(len(tensor), columns)) for at, tensor in value.pieces]
    )


def _restore_random_state(path: Path, device: torch.device) -> None:
    state = random_state(dist.get_rank(), device)
    stored = RawReader(path).read_metadata().state_dict_metadata
    found = {key: value for key, value in state.items() if key in stored}  # none on a rank that did not exist then
    _read(path, found)
    for key, value in found.items():
        if key.endswith("cuda"):
            torch.cuda.set_rng_state(cast(Tensor, value), device)
        else:
            torch.set_rng_state(cast(Tensor, value))


def _read(path: Path, request: State) -> None:
    try:
        load(
            cast(dict[str, Any], request),
            storage_reader=RawReader(path),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None
