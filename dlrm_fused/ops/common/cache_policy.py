"""Which cache hints a launch gives its kernel's streams: off, one choice for all, or each by its reuse distance.

Some streams pass once and only displace what others read again, so that one choice for all streams is rarely the best. The
selector estimates for each how much it would find in the cache again, from its size, how often it is read, and the skew of the
rows that are looked up.

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

# What launches say of their streams.


@dataclass(frozen=True)
class Stream:
    """What a launch does with one stream.

    Attributes:
        distinct: bytes of different places, as expected.
        accessed: bytes of all accesses.
        rows: of each table, among which the launch picks by chance; 0: all places are accessed in turn.
        row_bytes, tables: of the same.
        zipf_exponent: of the frequencies of a table's rows; 0: all are equally frequent.
    """

    distinct: float
    accessed: float
    rows: float = 0.0
    row_bytes: float = 0.0
    tables: int = 1
    zipf_exponent: float = 0.0

    @property
    def passes(self) -> float:
        """How often a place is accessed."""
        return self.accessed / self.distinct if self.distinct else 1.0

    def kept_share(self, capacity: float) -> float:
        """The share of accesses whose reuse distance a cache of so many bytes bridges, if it keeps the most frequent places."""
        if not self.rows:
            return min(1.0, capacity / self.distinct) if self.distinct else 1.0
        return _share_of_hottest(capacity / self.row_bytes / self.tables, self.rows, self.zipf_exponent)


def once(size: float) -> Stream:
    """So many bytes, each accessed once."""
    return Stream(size, size)


def picked(count: float, rows: float, row_bytes: float, tables: int = 1, zipf_exponent: float | None = None) -> Stream:
    """``count`` rows that are looked up in tables of ``rows`` rows each.

    Args:
        zipf_exponent: unless given, what :func:`use` was told.
    """
    exponent = _zipf_exponent if zipf_exponent is None else zipf_exponent
    distinct = tables * _distinct(count / tables, rows, exponent)
    return Stream(distinct * row_bytes, count * row_bytes, rows, row_bytes, tables, exponent)


def _harmonic(count: float, exponent: float) -> float:
    """sum of i^-exponent for i = 1 .. count, by the formula of Euler and Maclaurin."""
    if count <= 1:
        return count
    integral = math.log(count) if abs(exponent - 1) < 1e-9 else (count ** (1 - exponent) - 1) / (1 - exponent)
    return integral + (1 + count**-exponent) / 2 + exponent * (1 - count ** (-exponent - 1)) / 12


def _share_of_hottest(count: float, rows: float, exponent: float) -> float:
    """Of accesses that follow Zipf's law, the share on the ``count`` most frequent rows."""
    return _harmonic(min(count, rows), exponent) / _harmonic(rows, exponent)


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

# Of the L2 cache, what one launch can hold: the other half has other data, and both halves of the chip hold what both read.
CAPACITY = 0.5
# Passes from which on a stream counts as read again.
_READ_AGAIN = 1.5
# Of a stream that is read again, the share of accesses that must find their place in the cache for it to be kept there.
_WORTH_KEEPING = 0.3


def select(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """The hints of a launch.

    * The cache holds all that the launch touches: none, since nothing displaces anything.
    * A stream is read again, and enough of that finds its place in the cache: ``evict_last``.
    * Beside such a stream, one that passes once and is larger than the cache: ``evict_first``, whether read or stored: the next
      kernel would not find it in the cache either.
    * Else none: with nothing to protect, the hardware's choice is as good.
    """
    capacity = CAPACITY * l2_bytes  # what comes again after more bytes than that is not there any more
    if sum(stream.distinct for stream in streams.values()) <= capacity:
        return OFF
    kept = {
        name
        for name, stream in streams.items()
        if name not in STORES and stream.passes >= _READ_AGAIN and stream.kept_share(capacity) >= _WORTH_KEEPING
    }
    if not kept:
        return OFF
    passing = {name for name, stream in streams.items() if stream.passes < _READ_AGAIN and stream.distinct > capacity}
    return _interned(tuple((name, EVICT_LAST if name in kept else EVICT_FIRST) for name in sorted(kept | passing)))


@cache
def _interned(hints: tuple[tuple[str, Hint], ...]) -> CachePolicy:
    return with_hints(**dict(hints))


SELECTED = "selected"
_used: CachePolicy | None = OFF  # None: selected for each launch
_zipf_exponent = 0.0


def use(policy: CachePolicy | str, zipf_exponent: float = 0.0) -> None:
    """From now on launch the kernels of this process with a policy, for measuring: hints never change results.

    CUDA graphs keep the policy under which they were captured.

    Args:
        policy: "off" or another of :data:`STATIC`, a policy of one's own, or "selected": :func:`select` for each launch.
        zipf_exponent: of the rows that are looked up, which a launch cannot know; for "selected".

    Raises:
        UsageError: there is no policy of this name.
    """
    global _used, _zipf_exponent
    if isinstance(policy, str) and policy not in (SELECTED, *STATIC):
        raise UsageError(f"cache policy {policy!r}; allowed: {', '.join((SELECTED, *STATIC))}, or a CachePolicy")
    _used = None if policy == SELECTED else STATIC[policy] if isinstance(policy, str) else policy
    _zipf_exponent = zipf_exponent


def choose(device: torch.device, streams: Callable[[], Mapping[str, Stream]]) -> CachePolicy:
    """The policy of a launch.

    Args:
        streams: describes those of the launch; asked only where it matters.
    """
    return _used if _used is not None else select(streams(), _l2_bytes(device))


@cache
def _l2_bytes(device: torch.device) -> int:
    """Of the GPU; without one, of a small one."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 1 << 20
