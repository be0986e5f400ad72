"""GEMM + All-to-All by chunks: while a copy engine sends the rows of one rank, those of the next are multiplied.

The products are the library's, this rank's own last. A copy engine is told addresses by the host, which does not know where
another rank's result will lie; so the chunks are received in blocks that lie at the same place on all ranks, and copied out.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.symmetric import BlockPool, Channel
from dlrm_fused.symmetric.device import EPOCH, begin, finish, wait_until_all_ready


@triton.jit(do_not_specialize=["fingerprint"])
def begin_kernel(channel, fingerprint):
    """Begin an epoch whose data a copy engine sends, and wait until all ranks are ready for it. One program."""
    epoch = begin(channel, tl.zeros((), tl.int64), fingerprint)
    wait_until_all_ready(channel, epoch, fingerprint)


@triton.jit
def finish_kernel(channel):
    """End the epoch of :func:`begin_kernel`, behind the copies in the stream. One program."""
    finish(channel, tl.load(channel.state + EPOCH) + 1)


def multiply_and_send_chunks(
    x: Tensor, weight: Tensor, blocks: BlockPool, channel: Channel, stream: torch.cuda.Stream | None, fingerprint: int
) -> Tensor:
    """Row block s of the result is this rank's block of rank s's x @ weight.T. One epoch: collective.

    Args:
        x: [M, K], contiguous; M a multiple of the ranks.
        weight: [N, K].
        blocks: symmetric memory whose spare block has room for a result.
        stream: for what goes on beside the products; None on the CPU, under Triton's interpreter.
        fingerprint: must be equal on all ranks.

    Returns:
        [M, N], an ordinary tensor.
    """
    ranks, rank = channel.group.world_size, channel.group.rank
    others = [(rank + shift) % ranks for shift in range(1, ranks)]
    result, sent = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])
    rows_of, sent_to, result_from = (matrix.chunk(ranks) for matrix in (x, sent, result))
    main = torch.cuda.current_stream(x.device) if stream else None

    def received_at(peer: int) -> tuple[Tensor, ...]:
        """The spare block of a rank: row blocks by the rank that they come from."""
        spare = blocks.memory.peer(peer)[: result.numel() * result.element_size()]
        return spare.view(x.dtype).view_as(result).chunk(ranks)

    def catch_up() -> torch.cuda.StreamContext | nullcontext[None]:
        """The stream beside, behind all that has been asked for so far."""
        if stream is None or main is None:
            return nullcontext()
        stream.wait_stream(main)
        return torch.cuda.stream(stream)

    with catch_up():
        begin_kernel[(1,)](channel.args, fingerprint, num_warps=1)
    for peer in others:
        torch.mm(rows_of[peer], weight.T, out=sent_to[peer])
        with catch_up():
            received_at(peer)[rank].copy_(sent_to[peer], non_blocking=True)
    torch.mm(rows_of[rank], weight.T, out=result_from[rank])
    with catch_up():
        finish_kernel[(1,)](channel.args, num_warps=1)
    if stream and main:
        main.wait_stream(stream)
    for peer in others:
        result_from[peer].copy_(received_at(rank)[peer])
    return result
