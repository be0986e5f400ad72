"""The symmetric memory of GEMM + All-to-All."""

from __future__ import annotations

from torch import Tensor

from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.schedules import MOST_PIECES
from dlrm_fused.ops.schedules.piece_flags import PieceFlags
from dlrm_fused.symmetric import BlockPool

_HELD_RESULTS = 2


class GemmWorkspace(MatrixWorkspace):
    """The symmetric memory through which products travel. Making one is collective; calls may share it.

    ``max_rows`` are those of x, and of a result; ``max_columns`` is the largest N. Memory for three results is allocated: two
    that callers may hold, and one more; a caller who holds more than two gets copies.
    """

    def _allocate(self) -> None:
        self.result_bytes = self.max_rows * self.max_columns * self.dtype.itemsize
        self.results = BlockPool.with_spare(self.group, f"{self.name}.results", self.result_bytes, _HELD_RESULTS)
        self.pieces = PieceFlags(self.channel, f"{self.name}.pieces", MOST_PIECES, has_own_channel=False)
        self.arrivals = Arrivals(self.device)
        self.schedules = self.schedules_of("gemm_all_to_all")

    def _release_memory(self) -> None:
        self.results.release()
        self.pieces.release()

    def rows_of(self, block: Tensor, rows: int, columns: int) -> Tensor:
        """[rows, columns]: the result in a block."""
        return block[: rows * columns * self.dtype.itemsize].view(self.dtype).view(rows, columns)
