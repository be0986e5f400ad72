"""The order in which the calls of an exchange run on a GPU, whatever streams they are launched on.

Kernels count epochs: a call is the epoch after the last one that has ended when it runs, not when it was launched. Two calls on
streams that do not wait for each other may run in one order here and in another on a peer, which would then take the data of
one for those of the other. So every call follows the one that the host has launched before it.
"""

from __future__ import annotations

import torch

from dlrm_fused.compat.torch import current_stream_handle


class CallOrder:
    """Calls that follow each other. Not for several threads that launch calls at the same time: these have no order.

    Args:
        device: of the calls. Those of the CPU are done when they return, and wait for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._handle = -1  # the handle of that stream

    def follow(self) -> None:
        """Begin a call in the current stream: before anything of it is launched there.

        If the call before is on another stream, the current one waits for all that this has been given so far. Within a
        capture, it does so for calls of the same capture: what came before has been waited for when the capture began, and
        whoever replays the graph begins a call.
        """
        if self._device.type != "cuda" or current_stream_handle(self._device) == self._handle:
            return
        stream, last = torch.cuda.current_stream(self._device), self._last
        if last is not None and _is_capturing(last) == _is_capturing(stream):
            stream.wait_stream(last)
        self._last, self._handle = stream, stream.cuda_stream


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
