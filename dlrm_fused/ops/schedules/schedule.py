"""The vocabulary of schedules: what is cut, who moves it, and how often the computation is launched."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Pair(enum.StrEnum):
    """A computation and its collective.

    Of matrices, M is the number of rows of all ranks together, and each rank's *shard* has M / ranks of them.
    """

    all_gather_gemm = "all_gather_gemm"  # shards of x travel, then are multiplied
    gemm_reduce_scatter = "gemm_reduce_scatter"  # products of all rows are added up over the ranks, each for its shard
    gemm_all_to_all = "gemm_all_to_all"  # each rank gets its block of all ranks' products
    gemm_all_reduce = "gemm_all_reduce"  # products of all rows are added up over the ranks, for all of them

    @property
    def moves_first(self) -> bool:
        """Whether the data travel before they are computed with; else results travel."""
        return self is Pair.all_gather_gemm


class Mover(enum.StrEnum):
    """Who moves data between ranks."""

    same_kernel = "same_kernel"  # the programs that compute store at the peers
    other_kernel = "other_kernel"  # a kernel on a stream beside, which takes multiprocessors from the computation
    copy_engine = "copy_engine"  # DMA on a stream beside, which takes none


@dataclass(frozen=True)
class Schedule:
    """One way to run a pair.

    Attributes:
        name: by which an operator's ``schedule`` argument names it.
        parts: sizes, relative to each other, of the pieces into which the rows that go to or come from one rank are cut; in the
            order in which they travel.
        is_one_product: one kernel computes with all pieces, each as it arrives; else each piece is a product of its own.
    """

    name: str
    mover: Mover
    parts: tuple[int, ...] = (1,)
    is_one_product: bool = False

    def __post_init__(self) -> None:
        if not self.parts or min(self.parts) < 1:
            raise ValueError(f"schedule {self.name}: parts={self.parts}; needed: one part at least, of 1 or more")


_ALL = (
    Schedule("kernel", Mover.same_kernel, is_one_product=True),
    Schedule("chunks", Mover.copy_engine),
    Schedule("chunks_2", Mover.copy_engine, parts=(1, 1)),
    Schedule("chunks_4", Mover.copy_engine, parts=(1, 1, 1, 1)),
    Schedule("tapered", Mover.copy_engine, parts=(1, 3, 3, 1)),
    Schedule("arriving", Mover.copy_engine, is_one_product=True),
    Schedule("sums_beside", Mover.other_kernel, parts=(1, 1, 1, 1)),
)
SCHEDULES = {schedule.name: schedule for schedule in _ALL}
# Elements of a chunk of a sum at least, and chunks at most: smaller products do not fill a GPU, and a chunk takes the host a
# tenth of a millisecond.
_SUMMED_ELEMENTS = 8 << 20
_MOST_SUMS = 4
MOST_PIECES = max(len(schedule.parts) for schedule in _ALL)  # from one rank to another


def sums_beside(rows: int, columns: int) -> Schedule:
    """Return the schedule ``sums_beside`` in as many chunks as suit a product of this size."""
    chunks = max(1, min(_MOST_SUMS, rows, rows * columns // _SUMMED_ELEMENTS))
    return replace(SCHEDULES["sums_beside"], parts=(1,) * chunks)
