"""The part that calls of both operators share: operands, the ranks of pieces, and how the peers learn that a piece has come."""

from __future__ import annotations

from torch import Tensor

from dlrm_fused.ops.all_gather_gemm.kernel import Epoch
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace
from dlrm_fused.ops.schedules import Kind, Piece, Schedule, Task
from dlrm_fused.ops.schedules.executor import Action
from dlrm_fused.ops.schedules.piece_flags import ends_of
from dlrm_fused.ops.schedules.plan import cut


class PiecesCall:
    """One call on this rank, in an epoch of the workspace.

    Attributes:
        x, weight, is_transposed, schedule: as given.
        factor: [K, N], what x is multiplied by.
        rows: of a shard.
        epoch: for the kernels.
        actions: what starts each task of the call's plan; subclasses add theirs.
    """

    def __init__(
        self,
        workspace: ShardWorkspace,
        x: Tensor,
        weight: Tensor,
        schedule: Schedule,
        *,
        is_transposed: bool,
        fingerprint: int,
        rows: int,
    ) -> None:
        self.workspace, self.x, self.weight, self.schedule = workspace, x, weight, schedule
        self.is_transposed, self.factor, self.rows = is_transposed, weight if is_transposed else weight.T, rows
        self.rank, self.ranks = workspace.rank, workspace.world_size
        self.epoch = Epoch(
            workspace.channel, workspace.pieces, fingerprint, ends_of(cut(rows, schedule.parts)), workspace.counters
        )
        self.actions: dict[Kind, Action] = {Kind.begin: lambda _: workspace.pieces.begin(fingerprint), Kind.mark: self._mark}

    def peer(self, piece: Piece) -> int:
        """Return the rank to which a piece goes."""
        return (self.rank + piece.shift) % self.ranks

    def source(self, piece: Piece) -> int:
        """Return the rank from which a piece comes."""
        return (self.rank - piece.shift) % self.ranks

    def _mark(self, task: Task) -> None:
        for piece in task.pieces:
            self.workspace.pieces.mark(self.peer(piece), piece.number)
