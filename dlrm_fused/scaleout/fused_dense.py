"""The dense part's kernels and exchanges as ``comm=fused`` joins them.

The exchanges of experts' rows, and the AllReduce after a row-parallel product, are one kernel with the product before them.
Where none is, as for the tokens that experts get, the kernel that gathers rows sends them. Rows are sent to where they belong,
so that copies beside an exchange are not needed, and how many they are is sent beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_fused.scaleout.dense_trace import Exchange, Kernel


@dataclass(frozen=True)
class SendingKernel:
    """A kernel that sends each slice of its result when it is computed."""

    kernel: Kernel
    exchange: Exchange


def fused(pieces: Sequence[Kernel | Exchange], *, is_backward: bool) -> Iterator[tuple[int, Kernel | Exchange | SendingKernel]]:
    """Yield the pieces that are left after joining, each with the number of the last piece that it stands for."""
    before: list[tuple[int, Kernel]] = []  # the last kernel that is no copy, and copies since
    follows_rows = False
    for number, piece in enumerate(pieces):
        match piece:
            case Kernel(is_copy=True):
                if not follows_rows:
                    before.append((number, piece))
            case Kernel():
                yield from before
                before, follows_rows = [(number, piece)], False
            case Exchange(collective="all_to_all" | "all_reduce", has_numbers=True):
                pass
            case Exchange(collective="all_to_all"):
                sender = _sender(before)
                yield from (kernel for kernel in before if kernel[1] != sender and not kernel[1].is_copy)
                yield number, SendingKernel(sender, piece) if sender else piece
                before, follows_rows = [], True
            case Exchange(collective="all_reduce") if not is_backward and before and before[-1][1].flops:
                yield number, SendingKernel(before.pop()[1], piece)
            case Exchange():
                yield from before
                yield number, piece
                before = []
    yield from before


def _sender(before: Sequence[tuple[int, Kernel]]) -> Kernel | None:
    """Return the product whose result is exchanged, or else the largest of the copies."""
    kernels = [kernel for _, kernel in before]
    products, copies = [kernel for kernel in kernels if kernel.flops], [kernel for kernel in kernels if kernel.is_copy]
    return products[0] if products else max(copies, key=lambda kernel: kernel.bytes, default=None)
