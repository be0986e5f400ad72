"""Products with few tiles: K is split into pieces, each computed by a program of its own, and added up in the same launch.

No program waits for another. Which piece is added to which is fixed, and a + b = b + a, so that the bits do not depend on who
comes first.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTED_PIECES = 4096


class Arrivals:
    """Counts the pieces of split products. Calls that share one must follow each other: in a stream, or as epochs do."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(_COUNTED_PIECES, dtype=torch.int32, device=device)

    def of(self, pieces: int) -> Tensor:
        """int32, even numbers; every launch leaves them even."""
        return self._counts if pieces <= len(self._counts) else self._counts.new_zeros(pieces)


@triton.jit
def add_up(
    left_half, right_half, partials, arrivals, tile, piece, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of the pieces of a tile: of two pieces the second to arrive adds the first one's, then of two pairs, and so on.

    Args:
        left_half, right_half: fp32 [ROWS, COLUMNS / 2], of this program's piece.
        partials: fp32 [tiles, 2^LEVELS, ROWS * COLUMNS].
        arrivals: int32 [tiles, 2^LEVELS], of :class:`Arrivals`.

    Returns:
        Both halves, and whether this program has the sum.
    """
    half: tl.constexpr = COLUMNS // 2
    pieces: tl.constexpr = 1 << LEVELS
    places = tl.arange(0, ROWS)[:, None] * half + tl.arange(0, half)[None, :]
    partials += (tl.zeros((), tl.int64) + tile) * (pieces * ROWS * COLUMNS)
    arrivals += tile * pieces
    has_sum = tl.full((), 1, tl.int1)
    for level in tl.static_range(LEVELS):
        own = piece >> level
        stored = partials + (own << level) * (ROWS * COLUMNS)
        tl.store(stored + places, left_half, mask=has_sum)
        tl.store(stored + ROWS * half + places, right_half, mask=has_sum)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + (own >> 1), 1, mask=has_sum, sem="acq_rel", scope="gpu")
        has_sum &= (arrived & 1) == 1
        other = partials + ((own ^ 1) << level) * (ROWS * COLUMNS)
        left_half += tl.load(other + places, mask=has_sum, other=0.0, cache_modifier=".cg")
        tl.debug_barrier()  # both at once would need more registers than there are
        right_half += tl.load(other + ROWS * half + places, mask=has_sum, other=0.0, cache_modifier=".cg")
        arrivals += pieces >> (level + 1)
        tl.debug_barrier()  # the next level stores where this one has loaded
    return left_half, right_half, has_sum
