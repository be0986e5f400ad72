"""An epoch without data, after which all that ranks of the host stored before it is seen by all of them."""

from __future__ import annotations

import triton

from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import begin, finish, uses_kernels, wait_until_all_ready


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
        channel.launches((), meet_kernel, (1,), channel.args, receive_offset, fingerprint, num_warps=1)
    else:
        channel.run_epoch(lambda *_: None, offset=receive_offset, fingerprint=fingerprint)
