"""An epoch without data, after which all that ranks of the host stored before it is seen by all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
import triton

from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import begin, finish, uses_kernels, wait_until_all_ready

T = TypeVar("T")


@triton.jit(do_not_specialize=["receive_offset", "fingerprint"])
def meet_kernel(channel, receive_offset, fingerprint):
    """One program."""
    epoch = begin(channel, receive_offset, fingerprint)
    wait_until_all_ready(channel, epoch, fingerprint)
    finish(channel, epoch)


def meet(channel: Channel, fingerprint: int, receive_offset: int = 0) -> None:
    """Run an epoch in which this rank stores nothing. Collective; on GPUs the current stream waits, not the host.

    Args:
        receive_offset: where this rank receives, for peers that do store.

    Raises:
        CommunicationError: on the CPU, if a peer is lost or makes another call; on GPUs a later call raises it.
    """
    if uses_kernels(channel.group.device):
        meet_kernel[(1,)](channel.args, receive_offset, fingerprint, num_warps=1)
    else:
        channel.run_epoch(lambda *_: None, offset=receive_offset, fingerprint=fingerprint)


def meet_beside(
    work: Callable[[], T],
    channel: Channel,
    stream: torch.cuda.Stream | None,
    fingerprint: int,
    *,
    meeting: Callable[[int], None] | None = None,
) -> T:
    """The result of ``work``, beside which the ranks :func:`meet`; what follows in the current stream follows both.

    A collective of torch.distributed that follows would wait for a lost rank, or for one that makes another call, until the
    limit of the process group. On the CPU it is not begun then; on GPUs a later call raises the error.

    Args:
        stream: for the epoch; None on the CPU.
        meeting: what runs the epoch of this fingerprint, if not :func:`meet`.
    """
    main = torch.cuda.current_stream(channel.group.device) if stream else None
    if stream and main:
        stream.wait_stream(main)
    with torch.cuda.stream(stream) if stream else nullcontext():
        if meeting is None:
            meet(channel, fingerprint)
        else:
            meeting(fingerprint)
    result = work()
    if stream and main:
        main.wait_stream(stream)
    else:
        channel.raise_fault()
    return result
