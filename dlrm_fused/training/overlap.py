"""Parts that run beside each other: how long each is busy, and how long it is exposed, which is what hiding it would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Times:
    """The times of a part.

    Attributes:
        busy: while it runs, once or several times at once.
        exposed: while it runs and no other part does.
    """

    busy: float = 0.0
    exposed: float = 0.0


def busy_and_exposed(intervals: Iterable[tuple[str, float, float]], begin: float, end: float) -> tuple[dict[str, Times], float]:
    """Return each part's :class:`Times` between two moments, and the time in which no part runs; all in one unit.

    Args:
        intervals: the part, when it begins and when it ends, in any order; what lies outside of the two moments is cut off.

    Returns:
        all parts that have an interval, also those with no time between the moments.
    """
    times: dict[str, Times] = {}
    changes: list[tuple[float, str, int]] = []
    for part, first, last in intervals:
        times.setdefault(part, Times())
        first, last = max(first, begin), min(last, end)
        if first < last:
            changes += [(first, part, 1), (last, part, -1)]
    active: Counter[str] = Counter()
    idle, now = 0.0, begin
    for moment, part, change in [*sorted(changes), (end, "", 0)]:
        running = [name for name, count in active.items() if count]
        for name in running:
            times[name].busy += moment - now
        if len(running) == 1:
            times[running[0]].exposed += moment - now
        idle += 0.0 if running else moment - now
        active[part] += change
        now = moment
    return times, idle
