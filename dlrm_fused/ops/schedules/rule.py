"""The rule: of the schedules that are worth it for a pair, the one whose estimate is shortest."""

from __future__ import annotations

import functools

from dlrm_fused.ops.schedules.estimate import FEW_ROWS, Size, Timeline, estimate, product_us
from dlrm_fused.ops.schedules.machines import Machine
from dlrm_fused.ops.schedules.plan import cut, make_plan
from dlrm_fused.ops.schedules.schedule import SCHEDULES, Pair, Schedule, sums_beside

# Calls repeat a few shapes, step after step, and estimates take longer than a call's launches.
_KEPT_CHOICES = 1024
# The measured schedules without which some call would take noticeably longer; docs/schedules.md.
SPACE = {
    Pair.all_gather_gemm: ("kernel", "chunks", "chunks_4", "arriving"),
    Pair.gemm_reduce_scatter: ("kernel", "chunks_2", "tapered"),
    Pair.gemm_all_to_all: ("kernel", "chunks", "chunks_2"),
    Pair.gemm_all_reduce: ("kernel", "sums_beside"),
}


def space_of(size: Size) -> tuple[str, ...]:
    """The schedules that a call of this size can be run by, of :data:`SPACE`."""
    has_few_rows = size.pair is Pair.gemm_all_reduce and size.rows <= FEW_ROWS
    return ("kernel",) if has_few_rows else SPACE[size.pair]


def schedule_of(size: Size, name: str) -> Schedule:
    """The schedule of a name, for a call of this size."""
    return sums_beside(size.rows, size.columns) if name == "sums_beside" else SCHEDULES[name]


# Into which a shard of a sum is cut that copy engines take to who adds it up, and back.
_COPIES = ("chunks", "chunks_2", "chunks_4")


@functools.lru_cache(maxsize=_KEPT_CHOICES)
def copies(size: Size, machine: Machine) -> Schedule:
    """Return the schedule by copy engines of an all-reduce: in the pieces that take least.

    Small pieces leave multiprocessors idle, large ones travel when nothing is multiplied any more: the last one's sums, and of
    a single piece the products, too.
    """

    def microseconds(name: str) -> float:
        bounds = cut(size.shard_rows, SCHEDULES[name].parts)
        count, rows = len(bounds), max(last - first for first, last in bounds)
        of_piece = product_us(rows, size.columns, size.depth, machine)[0] + machine.mark_us + machine.wait_us
        travel = (size.ranks - 1) * rows * size.columns * size.element_bytes / machine.peer_copies / 1e3
        return count * size.ranks * of_piece + (2 if count == 1 else 1) * travel

    return SCHEDULES[min(_COPIES, key=microseconds)]


# Microseconds in which the host starts a step of a call by copy engines: two H200s, 2a13b1db.
_HOST_STEP_US = 38.0


@functools.lru_cache(maxsize=_KEPT_CHOICES)
def copies_are_faster(size: Size, machine: Machine) -> bool:
    """Return whether an all-reduce by copy engines takes least on paper, although the host has many steps to start for it."""
    schedule = copies(size, machine)
    host_us = _HOST_STEP_US * len(make_plan(size.pair, schedule, size.ranks, size.shard_rows).started)
    others = estimates(size, machine).values()
    return max(host_us, estimate(size, schedule, machine).microseconds) < min(other.microseconds for other in others)


def estimates(size: Size, machine: Machine) -> dict[str, Timeline]:
    """Return the estimates of all schedules by name, the shortest first."""
    found = {name: estimate(size, schedule_of(size, name), machine) for name in space_of(size)}
    return dict(sorted(found.items(), key=lambda entry: entry[1].microseconds))


@functools.lru_cache(maxsize=_KEPT_CHOICES)
def choose(size: Size, machine: Machine) -> str:
    """Return the name of the schedule whose estimate is shortest."""
    return next(iter(estimates(size, machine)))
