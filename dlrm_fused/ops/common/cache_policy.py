"""The cache hints that a launch gives its kernel's streams: off, one choice for all, or what the selector makes of their sizes.

Some streams pass once and only displace what others read again, so that one choice for all streams is rarely the best. What
decides is how large the streams are and how often each place is read, which follows from the skew of the rows looked up.

Source: Alsop et al., *Optimizing GPU Cache Policies for MI Workloads*, arXiv 1910.00134.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.cache_hints import EVICT_FIRST, EVICT_LAST, OFF, STATIC, STORES, CachePolicy, Hint, with_hints
from dlrm_fused.ops.common.gpus import gpu_of

# Launches describe their streams by these.


@dataclass(frozen=True)
class Stream:
    """The use that a launch makes of one stream.

    Attributes:
        distinct: bytes of different places, as expected.
        accessed: bytes of all accesses.
    """

    distinct: float
    accessed: float

    @property
    def passes(self) -> float:
        """The mean number of accesses to a place."""
        return self.accessed / self.distinct if self.distinct else 1.0


def once(size: float) -> Stream:
    """Return a stream of ``size`` bytes, each accessed once."""
    return Stream(size, size)


def picked(count: float, rows: float, row_bytes: float, tables: int = 1, zipf_exponent: float | None = None) -> Stream:
    """``count`` rows that are looked up in tables of ``rows`` rows each.

    Args:
        zipf_exponent: of the frequencies of a table's rows; 0: all equally frequent; unless given, what :func:`use` was told.
    """
    exponent = _zipf_exponent if zipf_exponent is None else zipf_exponent
    return Stream(tables * _distinct(count / tables, rows, exponent) * row_bytes, count * row_bytes)


def _harmonic(count: float, exponent: float) -> float:
    """sum of i^-exponent for i = 1 .. count, by the formula of Euler and Maclaurin."""
    if count <= 1:
        return count
    integral = math.log(count) if abs(exponent - 1) < 1e-9 else (count ** (1 - exponent) - 1) / (1 - exponent)
    return integral + (1 + count**-exponent) / 2 + exponent * (1 - count ** (-exponent - 1)) / 12


def _distinct(count: float, rows: float, exponent: float) -> float:
    """Expected number of different rows among ``count``: ranks are taken in bands in which the frequency hardly changes."""
    total, expected, begin = _harmonic(rows, exponent), 0.0, 1.0
    while begin <= rows:
        end = min(rows + 1.0, max(begin + 1.0, begin * 1.1))
        frequency = ((begin + end - 1) / 2) ** -exponent / total
        expected += (end - begin) * -math.expm1(-count * frequency)
        begin = end
    return expected


# The selector.

# Passes from which on a stream counts as read again. Measured: 1.2 gain from evict_first, 2.1 lose.
_READ_AGAIN = 1.5
# The share of the L2 cache for results that stay there while rows pass. Measured: 0.32 of it gain, 0.48 lose.
_RESULTS_THAT_STAY = 0.4
# Gradients that are read, in bytes of the rows that they update, from which on they are most of an update's work. Measured: 4
# times gain, 2.3 times lose.
_MOSTLY_GRADIENTS = 3.0


def select(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """The hints of a launch that gathers whole rows, which is a lookup or an update; others have none.

    Other streams hardly gain: what is read in turn needs each cache line several times in a row, which evict_first may cut
    short. The L2 cache has two halves, and both may hold what both read.
    """
    if "rows" in streams:
        return _of_lookup(streams, l2_bytes)
    return _of_update(streams, l2_bytes) if "gradients" in streams else OFF


def _of_lookup(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """* Rows pass once and are larger than half of the cache, results are small: all loads ``evict_first``. Hardly a row is
      found again, and the results stay in the cache, which then need not be written to memory to make room.
    * All that the launch touches fits in the cache if it is there once, but not in both halves: rows ``evict_first``.
    """
    rows, stored = streams["rows"], streams["sent"].distinct
    read = sum(stream.distinct for name, stream in streams.items() if name not in STORES)
    if rows.passes < _READ_AGAIN and rows.distinct > l2_bytes / 2 and stored <= _RESULTS_THAT_STAY * l2_bytes:
        return STATIC["loads evict_first"]
    if read + stored <= l2_bytes < 2 * read + stored:
        return _interned("rows", EVICT_FIRST)
    return OFF


def _of_update(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """* Few rows get many gradients, and all fits in the cache: all loads ``evict_first``.
    * Gradients fit in half of the cache, while the larger rows pass: gradients ``evict_last``.
    """
    gradients, rows = streams["gradients"], streams["old_rows"]
    # The places of new_rows are those of old_rows.
    touched = sum(stream.distinct for name, stream in streams.items() if name != "new_rows")
    if gradients.accessed >= _MOSTLY_GRADIENTS * rows.distinct and touched <= l2_bytes:
        return STATIC["loads evict_first"]
    if gradients.distinct <= l2_bytes / 2 < rows.distinct:
        return _interned("gradients", EVICT_LAST)
    return OFF


@cache
def _interned(stream: str, hint: Hint) -> CachePolicy:
    return with_hints(**{stream: hint})


SELECTED = "selected"
_used: CachePolicy | None = OFF  # None: selected for each launch
_zipf_exponent = 0.0


def use(policy: CachePolicy | str, zipf_exponent: float | None = None) -> None:
    """Launch the kernels of this process with a policy from now on, for measuring: hints never change results.

    CUDA graphs keep the policy under which they were captured.

    Args:
        policy: "off" or another of :data:`STATIC`, a policy of one's own, or "selected": :func:`select` for each launch.
        zipf_exponent: of the rows that are looked up, which a launch cannot know; "selected" needs it. 0: all equally frequent.

    Raises:
        UsageError: there is no policy of this name, or "selected" is told no exponent.
    """
    global _used, _zipf_exponent
    if isinstance(policy, str) and policy not in (SELECTED, *STATIC):
        raise UsageError(f"cache policy {policy!r}; allowed: {', '.join((SELECTED, *STATIC))}, or a CachePolicy")
    # Hints for rows that are taken for uniform, and are not, make lookups slower.
    if policy == SELECTED and zipf_exponent is None:
        raise UsageError("cache policy 'selected' needs zipf_exponent: of the rows that are looked up; 0: all equally frequent")
    _used = None if policy == SELECTED else STATIC[policy] if isinstance(policy, str) else policy
    _zipf_exponent = zipf_exponent or 0.0


def choose(device: torch.device, streams: Callable[[], Mapping[str, Stream]]) -> CachePolicy:
    """The policy of a launch.

    Args:
        streams: describes those of the launch; asked only where it matters.
    """
    return _used if _used is not None else select(streams(), gpu_of(device).l2)
