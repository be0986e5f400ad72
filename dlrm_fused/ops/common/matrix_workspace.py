"""The base of workspaces for products: sizes that all ranks agree on, a stream for copies, and the schedules that are known."""

from __future__ import annotations

from typing import ClassVar

import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.recorded import recorded_schedules
from dlrm_fused.ops.common.schedules import Schedules
from dlrm_fused.ops.common.workspace import Workspace, check_counts, check_dtype
from dlrm_fused.ops.schedules import Streams
from dlrm_fused.ops.schedules.piece_flags import PieceFlags
from dlrm_fused.symmetric import SymmetricGroup

# Kernels count the rows of all ranks in 31 bits.
_MAX_ROWS_OF_ALL_RANKS = 2**31 - 1

ROW_BYTES = 16  # rows of matrices that kernels store at other ranks have a multiple of so many bytes


class MatrixWorkspace(Workspace):
    """A workspace for matrices of at most so many rows and columns. Making one is collective; calls may share it.

    Attributes:
        max_rows, max_columns, dtype: as given.
        pieces: the flags of pieces that travel; of workspaces whose calls cut their rows.
        streams: on which the tasks of a schedule run.
    """

    pieces: PieceFlags
    _channels: ClassVar[tuple[str, ...]] = ("",)
    _counts_rows_of_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        max_rows: int,
        max_columns: int,
        dtype: torch.dtype,
        timeout_seconds: float = 600.0,
        measures_schedules: bool = True,
    ) -> None:
        """Collective.

        Args:
            group, name, timeout_seconds: as for :class:`~dlrm_fused.ops.common.workspace.Workspace`.
            max_rows, max_columns: the largest numbers of rows and of columns, each at least 1; the class says whose.
            dtype: float32, bfloat16 or float16.
            measures_schedules: whether ``auto`` may measure a shape that it meets for the first time, on GPUs.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        most_rows = _MAX_ROWS_OF_ALL_RANKS // group.world_size

        def check() -> dict[str, object]:
            check_dtype(name, dtype)
            check_counts(name, max_rows=max_rows, max_columns=max_columns)
            if self._counts_rows_of_all_ranks and max_rows > most_rows:
                raise UsageError(f"{name}: max_rows={max_rows}; allowed with {group.world_size} ranks: at most {most_rows}")
            sizes = {"max_rows": max_rows, "max_columns": max_columns}
            return {"name": name, **sizes, "dtype": dtype, "measures_schedules": measures_schedules}

        super().__init__(group, name, check, timeout_seconds=timeout_seconds, channels=self._channels)
        self.max_rows, self.max_columns, self.dtype = max_rows, max_columns, dtype
        self.streams = Streams(group.device)
        self._measures_schedules = measures_schedules
        self._allocate()

    def _allocate(self) -> None:
        """Allocate what the operator needs besides. Collective."""

    def check_size(self, rows: tuple[str, int], columns: tuple[str, int]) -> None:
        """Raise UsageError if a call has more rows or columns, each with its name, than there is room for."""
        for key, (what, size) in {"max_rows": rows, "max_columns": columns}.items():
            if size > (limit := getattr(self, key)):
                raise UsageError(f"{self.name}: {what}={size} is above {key}={limit} of the workspace; make it with more")

    def check_row_bytes(self, **elements: int) -> None:
        """Raise UsageError unless rows of so many elements, each with its name, have a multiple of 16 bytes."""
        for key, size in elements.items():
            if size * self.dtype.itemsize % ROW_BYTES:
                raise UsageError(f"{self.name}: {key}={size} elements of {self.dtype}; needed: a multiple of {ROW_BYTES} bytes")

    def schedules_of(self, operator: str, purpose: str = "") -> Schedules:
        """Return the schedules of this workspace's calls.

        Args:
            operator: as in :func:`~dlrm_fused.ops.common.recorded.recorded_schedules`.
            purpose: is added to the workspace's name in the log.
        """
        name, device = f"{self.name}{purpose}", self.group.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        recorded = recorded_schedules(gpu, operator, self.world_size, self.dtype)
        return Schedules(name, self.channel, may_measure=self._measures_schedules, recorded=recorded)
