"""The files of a checkpoint: raw tensors of each rank, and ``tensors.json`` that says where in them each shard lies.

torch.distributed.checkpoint (DCP) itself writes tensors with ``torch.save``, which holds Python's interpreter lock while it
copies, so that a checkpoint in the background would slow training down; and reads them with ``torch.load``. Raw bytes are
written straight from the staged tensors without the lock, are read by mapping the file, no more than is needed, and cannot
contain code. Their checksums are those of the staged tensors; what is read is compared with them.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrm_fused.checksums import (
    CHECKSUMS_FILE,
    PIECE_BYTES,
    THREADS,
    CheckedBytes,
    Checksums,
    block_sums,
    damaged,
    from_hex,
    to_hex,
)
from dlrm_fused.errors import CheckpointError
from dlrm_fused.training.checkpoint.pickled import PICKLED_FILE, read_pickled
from dlrm_fused.training.checkpoint.tensors import TENSORS_FILE, Slot, read_tensors, write_tensors

logger = logging.getLogger("dlrm_fused")

REMEDY = (
    "checkpoint.on_damage=fallback goes on from the last intact checkpoint, --checkpoint of eval.py and export.py names one"
)


class RawWriter(FileSystemWriter):
    """Writes all tensors of this rank into one file, one after the other, and reads them back once."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path = Path(self.path) / f"{plan.storage_data.prefix}0.bin"
        results = []
        with path.open("wb", buffering=0) as file:
            for item in plan.items:
                content = _bytes(planner.resolve_data(item)).numpy()
                begin, length = file.tell(), content.size
                _write_all(file, content.data)
                results.append(WriteResult(item.index, length, Slot(path.name, begin, length, to_hex(block_sums(content)))))
            os.fsync(file.fileno())
        _check_slots(path, [result.storage_data for result in results])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        write_tensors(Path(self.path), metadata, {result.index: result.storage_data for of in results for result in of})


def _bytes(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"only tensors are written to checkpoints, not {type(tensor).__name__}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write_all(file: io.RawIOBase, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


class RawReader(FileSystemReader):
    """Reads a checkpoint without executing any code that it may contain.

    Raises:
        CheckpointError: if the metadata is damaged, asks for anything but tensors, or does not fit the files; or if bytes that
            are read are not those that were written.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        checksums = records_of(folder)
        if checksums is not None:
            checksums.check(folder, TENSORS_FILE, CheckpointError, REMEDY)
        metadata = read_tensors(folder, REMEDY) if checksums is not None else read_pickled(folder / PICKLED_FILE)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._entries = metadata.state_dict_metadata
        self._sizes = _sizes(self.storage_data.values())
        self._slots: dict[Slot, _MappedSlot] = {}
        self._map = cache(_map)  # each mapping keeps a file open, and there are more slots than a process may open files

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with ThreadPoolExecutor(THREADS) as pool:
            for item in plan.items:
                stored, slot = self._stored_tensor(item)
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                if slot is not None:
                    slot.copy(stored, target, item, pool)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def check_files(self, rank: int, ranks: int) -> None:
        """Read all bytes of every ``ranks``-th file, from file ``rank``."""
        slots: dict[str, list[Slot]] = {}
        for slot in cast(dict[MetadataIndex, Slot], self.read_metadata().storage_data).values():
            slots.setdefault(slot.file, []).append(slot)
        for name in sorted(slots)[rank::ranks]:
            _check_slots(Path(self.path) / name, slots[name])

    def _stored_tensor(self, item: ReadItem) -> tuple[Tensor, _MappedSlot | None]:
        """Return the whole chunk, not yet checked, and the slot that checks it, None if the chunk is empty."""
        slot: Slot = self.storage_data[item.storage_index]
        dtype, shape = self._stored_type(item.storage_index)
        path = Path(self.path) / slot.file
        length = torch.Size(shape).numel() * dtype.itemsize
        if slot.length != length:
            raise CheckpointError(
                f"{path}: damaged: {item.storage_index.fqn} has {slot.length} bytes instead of {length}; {REMEDY}"
            )
        if not length:
            return torch.empty(shape, dtype=dtype), None
        if slot not in self._slots:
            _check_size(path, self._sizes[slot.file], slot.sums is not None)
            self._slots[slot] = _MappedSlot(path, slot, self._map(path))
        mapped = self._slots[slot]
        return torch.from_numpy(mapped.content).view(dtype).view(shape), mapped

    def _stored_type(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        entry = cast(TensorStorageMetadata, self._entries[index.fqn])
        shape = next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)
        return entry.properties.dtype, shape


def _map(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file that is not empty, memory-mapped; what is written to them does not reach the file."""
    return np.asarray(np.memmap(path, np.uint8, "c"))


class _MappedSlot:
    """The bytes of a slot that is not empty: ``content``, [length] uint8; what is written to it does not reach the file."""

    def __init__(self, path: Path, slot: Slot, file: NDArray[np.uint8]) -> None:
        self.content = file[slot.begin : slot.begin + slot.length]
        self._path = path
        self._checked: CheckedBytes | None = None
        if slot.sums is not None:
            try:
                self._checked = CheckedBytes(self.content, from_hex(slot.sums))
            except ValueError as reason:
                raise CheckpointError(f"{path.with_name(TENSORS_FILE)}: damaged: {reason}; {REMEDY}") from None

    def copy(self, stored: Tensor, target: Tensor, item: ReadItem, pool: Executor) -> None:
        """Copy and check a part of the slot's tensor, in pieces that stay in a core's cache between the two.

        Raises:
            CheckpointError: the bytes are not those that were written.
        """
        if not stored.dim():
            target.copy_(stored)
            self.check(0, self.content.size)
            return
        begin, rows = item.storage_offsets[0], len(stored)
        row_bytes = stored.stride(0) * stored.element_size()
        step = max(1, PIECE_BYTES // max(row_bytes, 1))

        def copy_piece(first: int) -> None:
            end = min(first + step, rows)
            target[first:end].copy_(stored[first:end])
            self.check((begin + first) * row_bytes, min((begin + end) * row_bytes, self.content.size))

        # Each piece fails or is copied; a list, so that a failure is raised here.
        list(pool.map(copy_piece, range(0, rows, step)))

    def check(self, begin: int, end: int) -> None:
        """Raises CheckpointError unless the bytes [begin, end) are those that were written."""
        if self._checked is not None and not self._checked.check(begin, end):
            raise CheckpointError(damaged(self._path, TENSORS_FILE, REMEDY))


def records_of(folder: Path) -> Checksums | None:
    """Checksums of a checkpoint's records; None if an earlier release wrote it.

    Raises:
        CheckpointError: they are damaged or missing.
    """
    checksums = Checksums.load(folder, CheckpointError, REMEDY)
    if checksums is None:
        if (folder / TENSORS_FILE).exists():
            raise CheckpointError(f"{folder / CHECKSUMS_FILE}: missing; {REMEDY}")
        _warn_unchecked(folder)
    return checksums


@cache
def _warn_unchecked(folder: Path) -> None:
    logger.warning("%s: written by an earlier release, without checksums: damage of its bytes cannot be seen", folder)


def _sizes(slots: Iterable[Slot]) -> dict[str, int]:
    """Return bytes of each file."""
    sizes: dict[str, int] = {}
    for slot in slots:
        sizes[slot.file] = max(slot.begin + slot.length, sizes.get(slot.file, 0))
    return sizes


def _check_size(path: Path, expected: int, is_exact: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; {REMEDY}")
    found = path.stat().st_size
    if found < expected:
        raise CheckpointError(f"{path}: cut off: {found} bytes, at least {expected} expected; {REMEDY}")
    if found > expected and is_exact:
        raise CheckpointError(f"{path}: damaged: {found} bytes, {expected} were written; {REMEDY}")


def _check_slots(path: Path, slots: Sequence[Slot]) -> None:
    """Read all slots of a file. Raises CheckpointError unless they hold what was written."""
    for name, size in _sizes(slots).items():
        _check_size(path.with_name(name), size, is_exact=all(slot.sums is not None for slot in slots))
    full = [slot for slot in slots if slot.length]
    if full:
        file = _map(path)
        for slot in full:
            _MappedSlot(path, slot, file).check(0, slot.length)


def reason_of(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {' '.join(str(cause).split())[:400]}"
    return " ".join(str(error).split())[:400]
