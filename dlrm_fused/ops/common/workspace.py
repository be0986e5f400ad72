"""The base of all operators' workspaces: channels, a handle, and settings that must be equal on all ranks."""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.common.dtypes import DTYPES
from dlrm_fused.ops.common.gpus import Gpu, gpu_of
from dlrm_fused.symmetric import BlockPool, Channel, SymmetricGroup, SymmetricMemory
from dlrm_fused.symmetric.call_order import CallOrder
from dlrm_fused.symmetric.channel import abort_peers_on_error
from dlrm_fused.symmetric.launches import Remembered

# Operators of PyTorch take numbers, not objects.
_handles = itertools.count()
_workspaces: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


class ReceiveWindow(NamedTuple):
    """The memory in which ranks receive in one epoch of a channel, as kernels that store at other ranks need it.

    Attributes:
        memory: in which every rank receives, at an offset of its own.
        channel: whose epoch it is.
        offset: where this rank receives: bytes, a multiple of 4096.
        fingerprint: must be equal on all ranks.
    """

    memory: SymmetricMemory
    channel: Channel
    offset: int
    fingerprint: int


class Workspace:
    """The symmetric memory and the channels of one operator; made once, collectively, and shared by its calls.

    Attributes:
        group: the ranks that take part; ``rank``, ``world_size`` and ``device`` are the group's.
        name: as given.
        gpu: for which all ranks choose: theirs, or of those that differ the fewest multiprocessors and the least shared memory.
        channel: of the operator's epochs; the first of ``channels``.
        handle: a number, unique in this process, by which the operator names the workspace.
        calls: what operators have found out about their calls, by the layout of the inputs.
    """

    def __init_subclass__(cls) -> None:
        """Make the constructor :func:`lasting`: workspaces that are made at the first batch serve every later one."""
        super().__init_subclass__()
        cls.__init__ = lasting(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        group: SymmetricGroup,
        name: str,
        check: Callable[[], Mapping[str, object]],
        *,
        timeout_seconds: float,
        channels: Sequence[str] = ("",),
    ) -> None:
        """Collective.

        Args:
            group: the ranks that take part.
            name: for messages; equal on all ranks, and not used by another workspace of the group.
            check: validates this rank's settings, and returns those that must be equal on all ranks.
            timeout_seconds: how long a rank waits for another.
            channels: what to add to ``name`` for each channel.

        Raises:
            UsageError: on all ranks, if ``check`` raises it on one of them, or a setting differs.
        """
        self.gpu = _agree_on_settings(group, name, check)
        self.group, self.name = group, name
        self.rank, self.world_size, self.device = group.rank, group.world_size, group.device
        order = CallOrder(group.device)
        self.channels = tuple(Channel(group, f"{name} {purpose}".rstrip(), timeout_seconds, order) for purpose in channels)
        self.channel = self.channels[0]
        self.handle = next(_handles)
        self.calls: Remembered[Any] = Remembered()
        _workspaces[self.handle] = self

    @classmethod
    def of(cls, handle: int) -> Self:
        """The living workspace of this kind with that handle.

        Raises:
            UsageError: there is none, or no more.
        """
        workspace = _workspaces.get(handle)
        if workspace is not None and not isinstance(workspace, cls):
            raise UsageError(f"{workspace.name}: it is a {type(workspace).__name__}; this operator needs a {cls.__name__}")
        if not isinstance(workspace, cls):
            raise UsageError(f"workspace={handle}: no such {cls.__name__} in this process; keep it alive as long as it is used")
        return workspace

    def __deepcopy__(self, _: object) -> Self:
        """Return the same workspace, as for modules that are copied: what they call is shared."""
        return self

    def __reduce__(self) -> Any:
        raise UsageError(f"{self.name}: a workspace cannot be pickled; save the state_dict() of the module that holds it")

    def window(self, pool: BlockPool, block: Tensor, *what: Hashable) -> ReceiveWindow:
        """Return the window of one call, in which this rank receives in a block of a pool; ``what`` is equal on all ranks."""
        return ReceiveWindow(pool.memory, self.channel, pool.offset_of(block), fingerprint_of(*what))

    def begin_call(self) -> None:
        """Begin a call on the current stream: it follows the calls that were launched before, whatever streams they are on.

        Operators do so by themselves. To be called before the replay of a CUDA graph that has calls of the workspace.

        Raises:
            CommunicationError: a call that was started has failed since.
        """
        for channel in self.channels:
            channel.begin_call()

    def watch(self) -> None:
        """See that a call ends within the time limit also where NCCL carries messages to other hosts, which waits without end.

        Operators do so by themselves. To be called after the replay of a CUDA graph that has calls of the workspace.
        """
        self.channel.watch()

    def check_once(self, layout: Hashable, check: Callable[[], None]) -> None:
        """Run the checks of a call, unless one with this layout has passed them. A rank that fails them tells the others,
        which would wait for it."""
        if layout not in self.calls:
            with abort_peers_on_error(self.channel):
                check()
            self.calls[layout] = True

    def release(self) -> None:
        """Let go of memory and channels before the group is closed. Collective; calls that follow, also backward, fail.

        Results that callers hold stay. CUDA graphs that have calls of it must not be replayed. A second call does nothing.
        """
        if self.handle not in _workspaces:
            return
        self.group.gather(lambda: torch.get_device_module(self.device).synchronize(self.device))
        for channel in self.channels:
            channel.release()
        _workspaces.pop(self.handle, None)
        self._release_memory()

    def _release_memory(self) -> None:
        """Let go of the memory through which data travel. No rank stores there any more."""

    def raise_fault(self) -> None:
        """Raise CommunicationError if a call that was started has failed since. Does not wait for the device."""
        for channel in self.channels:
            channel.raise_fault()


@contextmanager
def asked_of_all_ranks(workspace: Workspace, key: str, value: object) -> Iterator[None]:
    """Around the checks of a call that all ranks make, before something else that is collective: what is wrong on one of them
    is raised by all.

    Args:
        key, value: an argument that must be equal on all ranks; a UsageError names them otherwise.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error

    def outcome() -> object:
        if isinstance(failure, UsageError):
            raise UsageError(f"rank {workspace.rank}: {failure}") from failure
        if failure is not None:
            raise failure
        return value

    try:
        for channel in workspace.channels:
            channel.raise_failure()
        workspace.channel.assemble()
    except CommunicationError as error:
        raise error from failure
    values = workspace.group.gather(outcome)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UsageError(f"{workspace.name}: {key}={values[0]} on rank 0, {other} on rank {rank}; they must be equal")


@functools.lru_cache(maxsize=1024, typed=True)
def fingerprint_of(*what: Hashable) -> int:
    """Return a checksum, of 31 bits, of what must be equal on all ranks in a call."""
    return zlib.crc32(repr(what).encode()) >> 1


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises UsageError, for the workspace ``name``, if its operator has no kernel for the dtype."""
    if dtype not in DTYPES:
        raise UsageError(f"{name}: dtype={dtype}; allowed: float32, bfloat16, float16")


def check_counts(name: str, **counts: int) -> None:
    """Raises UsageError, for the workspace ``name``, unless all are whole numbers of at least 1."""
    for key, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}: {key}={value}; needed: a whole number, at least 1")


def check_tensor(
    workspace: Workspace, key: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], *, rows: bool = False
) -> None:
    """Raises UsageError unless the tensor is contiguous (with ``rows`` each row is enough), of this dtype and shape, and on the
    workspace's device."""
    name, device = workspace.name, workspace.device
    is_contiguous = tensor.is_contiguous() or (rows and tensor.stride()[-1:] == (1,))
    if tensor.dtype != dtype or tensor.device != device:
        raise UsageError(f"{name}: {key} is {tensor.dtype} on {tensor.device}; needed: {dtype} on {device}")
    if list(tensor.shape) != list(shape) or not is_contiguous:
        raise UsageError(
            f"{name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: {list(shape)}, contiguous"
            + " rows" * rows
        )


def _agree_on_settings(group: SymmetricGroup, name: str, check: Callable[[], Mapping[str, object]]) -> Gpu:
    def checked() -> tuple[dict[str, str], Gpu]:
        if group.process_group is None and group.world_size > 1:
            raise UsageError(f"{name}: its group is closed")
        return {key: str(value) for key, value in check().items()}, gpu_of(group.device)

    (first, *others), gpus = zip(*group.gather(checked), strict=True)
    for rank, other in enumerate(others, start=1):
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                raise UsageError(
                    f"{name}: {key} differs between ranks: {first.get(key)} on rank 0, {other.get(key)} on rank {rank}; "
                    "all ranks must give the same"
                )
    smallest = min(gpus, key=lambda gpu: (gpu.multiprocessors, gpu.name))
    return replace(smallest, shared_memory=min(gpu.shared_memory for gpu in gpus))
