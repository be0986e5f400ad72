"""GEMM + All-to-All by pieces: while a copy engine sends the rows of one rank, those of the next are multiplied.

The products are the library's, this rank's own last. A copy engine is told addresses by the host, which does not know where
another rank's result will lie; so the pieces are received in blocks that lie at the same place on all ranks, and copied out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.ops.schedules import Kind, Pair, Schedule, Streams, Task, make_plan
from dlrm_fused.ops.schedules.piece_flags import PieceFlags
from dlrm_fused.symmetric import BlockPool, Channel


def multiply_and_send_chunks(
    x: Tensor,
    weight: Tensor,
    schedule: Schedule,
    blocks: BlockPool,
    channel: Channel,
    pieces: PieceFlags,
    streams: Streams,
    fingerprint: int,
) -> Tensor:
    """Row block s of the result is this rank's block of rank s's x @ weight.T. One epoch: collective.

    Args:
        x: [M, K], contiguous; M a multiple of the ranks.
        weight: [N, K].
        schedule: whose mover is a copy engine.
        blocks: symmetric memory whose spare block has room for a result.
        streams: for what goes on beside the products.
        fingerprint: must be equal on all ranks.

    Returns:
        [M, N], an ordinary tensor.
    """
    ranks, rank = channel.group.world_size, channel.group.rank
    result, sent = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])
    rows_of, sent_to, result_from = (matrix.chunk(ranks) for matrix in (x, sent, result))

    def received_at(peer: int) -> tuple[Tensor, ...]:
        """The spare block of a rank: row blocks by the rank that they come from."""
        spare = blocks.memory.peer(peer)[: result.numel() * result.element_size()]
        return spare.view(x.dtype).view_as(result).chunk(ranks)

    def multiply(task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = (rank + piece.shift) % ranks, slice(piece.first, piece.last)
        out = result_from[rank] if piece.shift == 0 else sent_to[peer][rows]
        torch.mm(rows_of[peer][rows], weight.T, out=out)

    def move(task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = (rank + piece.shift) % ranks, slice(piece.first, piece.last)
        received_at(peer)[rank][rows].copy_(sent_to[peer][rows], non_blocking=True)

    def mark(task: Task) -> None:
        (piece,) = task.pieces
        pieces.mark((rank + piece.shift) % ranks, piece.number)

    def wait(task: Task) -> None:
        for piece in task.pieces:
            pieces.wait((rank - piece.shift) % ranks, piece.number)

    def copy_out(task: Task) -> None:
        for piece in task.pieces:
            source, rows = (rank - piece.shift) % ranks, slice(piece.first, piece.last)
            result_from[source][rows].copy_(received_at(rank)[source][rows])

    actions = {
        Kind.begin: lambda _: pieces.begin(fingerprint),
        Kind.compute: multiply,
        Kind.move: move,
        Kind.mark: mark,
        Kind.gate: wait,
        Kind.combine: copy_out,
    }
    streams.run(make_plan(Pair.gemm_all_to_all, schedule, ranks, len(x) // ranks), actions)
    return result
