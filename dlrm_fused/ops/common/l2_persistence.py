"""A part of the L2 cache that keeps chosen memory, such as a table's hot rows: CUDA's access-policy window on a stream.

What is set aside belongs to this process's context and is given back; no setting of the card is changed. Source: CUDA C++
Programming Guide, "Device Memory L2 Access Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlrm_fused.compat.torch import is_rocm
from dlrm_fused.errors import UsageError

# Of cuda.h.
_LIMIT_PERSISTING_L2 = 6
_ATTRIBUTE_MOST_PERSISTING_L2 = 108
_ATTRIBUTE_LARGEST_WINDOW = 109
_STREAM_ACCESS_POLICY_WINDOW = 1
_STREAMING, _PERSISTING = 1, 2


class _Window(ctypes.Structure):
    """CUaccessPolicyWindow, as large as the union that it is a part of."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("hit_ratio", ctypes.c_float),
        ("hit_property", ctypes.c_int),
        ("miss_property", ctypes.c_int),
        ("_rest", ctypes.c_char * 36),
    )


class SetAside:
    """L2 cache that :func:`set_aside` has set aside.

    Attributes:
        size: bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest_window = _attribute(_ATTRIBUTE_LARGEST_WINDOW, device)
        self.size = _attribute(_ATTRIBUTE_MOST_PERSISTING_L2, device)
        if not self.size:
            raise UsageError(f"{device}: no L2 cache can be set aside on this GPU (before Ampere, or divided by MIG)")

    @contextmanager
    def keep(self, memory: Tensor) -> Iterator[None]:
        """What is launched or captured on the current stream within keeps what it reads of this contiguous memory in the cache.

        Of memory larger than what is set aside, a part by chance is kept.
        """
        size = min(memory.nbytes, self._largest_window)
        ratio = min(1.0, self.size / size)
        self._set(_Window(memory.data_ptr(), size, ratio, _PERSISTING, _STREAMING))
        try:
            yield
        finally:
            self._set(_Window())

    def _set(self, window: _Window) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        _call("cuStreamSetAttribute", stream, _STREAM_ACCESS_POLICY_WINDOW, ctypes.byref(window))


@contextmanager
def set_aside(device: torch.device) -> Iterator[SetAside]:
    """Within, as much of the L2 cache as the GPU allows is set aside for memory that is to be kept.

    Raises:
        UsageError: not possible on this device, or refused by the driver.
    """
    if device.type != "cuda" or is_rocm():
        raise UsageError(f"{device}: only the L2 cache of an NVIDIA GPU can be set aside")
    own, before = SetAside(device), ctypes.c_size_t()
    _call("cuCtxGetLimit", ctypes.byref(before), _LIMIT_PERSISTING_L2)
    _call("cuCtxSetLimit", _LIMIT_PERSISTING_L2, ctypes.c_size_t(own.size))
    try:
        yield own
    finally:
        torch.cuda.synchronize(device)
        forget_kept()
        _call("cuCtxSetLimit", _LIMIT_PERSISTING_L2, before)


def forget_kept() -> None:
    """From now on no line of the L2 cache is kept rather than another, whatever was asked for before."""
    _call("cuCtxResetPersistingL2Cache")


def _attribute(attribute: int, device: torch.device) -> int:
    value = ctypes.c_int()
    _call(
        "cuDeviceGetAttribute",
        ctypes.byref(value),
        attribute,
        torch.cuda.current_device() if device.index is None else device.index,
    )
    return value.value


def _call(function: str, *arguments: object) -> None:
    """Of the driver, for the current context, which torch has made."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if status:
        raise UsageError(f"L2 cache cannot be set aside: {function} returned error {status} of the CUDA driver")
