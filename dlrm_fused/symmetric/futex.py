"""Waiting for another process to change a word of shared memory: Linux's futex.

The waiting process sleeps and is woken at once. To look again and again takes time from the process waited for, where ranks
share cores, and to sleep in between makes the wait longer. See ``man 2 futex``.
"""

from __future__ import annotations

import ctypes
import platform
import time

# The number of the system call by machine; the C library has no function for it.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
# A waiter on a machine whose number of the system call is not known sleeps this long and looks again.
_NAP_SECONDS = 100e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec)]


def wait_for_change(address: int, value: int, seconds: float) -> None:
    """Return when the 32 bits at an address differ from ``value``, when :func:`wake` is called, or after so long.

    It may return earlier; who waits for something looks again.

    Args:
        address: a multiple of 4.
        value: the bits, as a number without sign.
    """
    if _FUTEX is None:
        time.sleep(min(seconds, _NAP_SECONDS))
        return
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_FUTEX, address, _WAIT, value, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake all that wait for the 32 bits at an address, which have been changed."""
    if _FUTEX is not None:
        _syscall(_FUTEX, address, _WAKE, _ALL, None)
