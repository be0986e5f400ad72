"""Checkpoints written in the background."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from dlrm_fused.checksums import Checksums, FileSums
from dlrm_fused.config import CheckpointConfig
from dlrm_fused.errors import CheckpointError
from dlrm_fused.records import write_record
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.training.checkpoint.folder import PROGRESS_FILE, UNFINISHED_PREFIX, CheckpointFolder, Progress, owner_of
from dlrm_fused.training.checkpoint.state import (
    LocalShards,
    State,
    map_tensors,
    model_state,
    optimizer_state,
    random_state,
    tensors_of,
)
from dlrm_fused.training.checkpoint.storage import RawReader, RawWriter, reason_of
from dlrm_fused.training.checkpoint.tensors import TENSORS_FILE

logger = logging.getLogger("dlrm_fused")


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
            self._staging[key] = map_tensors(value, self._host_buffer)

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
            raise CheckpointError(f"{self._folder.path}: a checkpoint could not be written: {reason_of(error)}") from error

    def _state(self, sharded: ShardedModel) -> State:
        rank = dist.get_rank()
        state = {**model_state(sharded), **optimizer_state(sharded)}
        # State that several ranks hold alike is written once.
        written = {k: v for k, v in state.items() if (v.is_written if isinstance(v, LocalShards) else rank == 0)}
        return {**written, **random_state(rank, self._device)}

    def _stage(self, state: State) -> None:
        for key, value in state.items():
            if key not in self._staging:  # an optimizer's state that its first step made
                self._staging[key] = map_tensors(value, self._host_buffer)
            for source, target in zip(tensors_of(value), tensors_of(self._staging[key]), strict=True):
                target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda, memory_format=torch.contiguous_format)

    def _write(self, progress: Progress) -> None:
        try:
            unfinished = self._folder.path / f"{UNFINISHED_PREFIX}{progress.step}"
            if dist.get_rank() == 0 and not self._folder.path.is_dir():
                logger.warning(
                    "%s: was removed while the run trains; it is made anew, earlier checkpoints are gone", self._folder.path
                )
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
        write_record(unfinished / PROGRESS_FILE, progress)
        sums = {name: FileSums.of(unfinished / name) for name in (TENSORS_FILE, PROGRESS_FILE)}
        Checksums(owner_of(progress), sums).save(unfinished)
        RawReader(unfinished).read_metadata()  # if it fails, the checkpoint is not announced
        target = self._folder.of(progress.step)
        _sync_folder(unfinished)
        replaced = self._folder.step_aside(progress.step)  # of a run that was resumed from this step, or an earlier one
        unfinished.rename(target)
        _sync_folder(self._folder.path)
        if replaced is not None:
            shutil.rmtree(replaced)
        self._folder.prune(self._settings.keep_last, self._settings.keep_best)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.shard(index) if isinstance(value, LocalShards) else value
