"""The symmetric memory of GEMM + All-to-All."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.ops.common.matrix_workspace import MAX_ROWS_OF_ALL_RANKS, MatrixWorkspace
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.schedules import MOST_PIECES
from dlrm_fused.ops.schedules.piece_flags import PieceFlags
from dlrm_fused.symmetric import BlockPool, SymmetricGroup

ROW_BYTES = 16  # rows of all matrices have a multiple of so many bytes
_HELD_RESULTS = 2


class GemmWorkspace(MatrixWorkspace):
    """The symmetric memory through which products travel. Making one is collective; calls may share it."""

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
            max_rows: of x, and of a result.
            max_columns: the largest N. Memory for three results is allocated here: two that callers may hold, and one more;
                a caller who holds more than two gets copies.
            dtype: float32, bfloat16 or float16.
            measures_schedules: whether ``auto`` may measure a shape that it meets for the first time, on GPUs.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        most = MAX_ROWS_OF_ALL_RANKS // group.world_size
        settings = max_rows, max_columns, dtype, timeout_seconds, measures_schedules
        super().__init__(group, name, *settings, most_rows=most)
        # A result, and for each row of it where it came from.
        self.origins_at = -(-max_rows * max_columns * dtype.itemsize // ROW_BYTES) * ROW_BYTES
        self.result_bytes = self.origins_at + 4 * max_rows
        self.results = BlockPool.with_spare(group, f"{name}.results", self.result_bytes, _HELD_RESULTS)
        self.pieces = PieceFlags(self.channel, f"{name}.pieces", MOST_PIECES, has_own_channel=False)
        self.arrivals = Arrivals(group.device)
        self.schedules = self.schedules_of("gemm_all_to_all")

    def rows_of(self, block: Tensor, rows: int, columns: int) -> Tensor:
        """[rows, columns]: the result in a block."""
        return block[: rows * columns * self.dtype.itemsize].view(self.dtype).view(rows, columns)

    def origins_of(self, block: Tensor, rows: int) -> Tensor:
        """int32 [rows]: where the rows of a result came from, rank * max_rows + row of x; -1 for nowhere."""
        return block[self.origins_at : self.origins_at + 4 * rows].view(torch.int32)
