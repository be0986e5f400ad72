"""Cache hints of lookups and updates: the defaults, or what the selector makes of the sizes of a launch's streams.

A stream is what a kernel reads or writes for one purpose, such as the rows of a table. Some pass once and only displace what
others read again. What decides is how large the streams are and how often each place is read, which follows from the skew of
the rows looked up. PTX takes eviction priorities "as performance hints only": they change neither results nor the order of
memory accesses. Other kernels have none, since hints gained next to nothing there (docs/cache_policies.md).

Source: Alsop et al., *Optimizing GPU Cache Policies for MI Workloads*, arXiv 1910.00134.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.gpus import gpu_of

_NORMAL, _FIRST, _LAST = "", "evict_first", "evict_last"


# A tuple: Triton writes constants as JSON for hooks that are told of compiled kernels.
class CachePolicy(NamedTuple):
    """The eviction priority of every stream, a constant to the compiler; the defaults are how the kernels run unless told
    otherwise."""

    # Loads.
    rows: str = _NORMAL  # of tables, by the lookup
    indices: str = _NORMAL  # of the lookup, and its per-sample weights
    offsets: str = _NORMAL
    # A row passes once; the gradients, which are read again and again, shall stay in the cache.
    old_rows: str = _FIRST  # of tables, by the update
    gradients: str = _NORMAL
    order: str = _NORMAL  # of the sorted lookup
    # Stores.
    new_rows: str = _FIRST  # of tables, by the update


OFF = CachePolicy()
ALL_LOADS_FIRST = CachePolicy(rows=_FIRST, indices=_FIRST, offsets=_FIRST, gradients=_FIRST, order=_FIRST)
ROWS_FIRST, GRADIENTS_LAST = CachePolicy(rows=_FIRST), CachePolicy(gradients=_LAST)


@triton.jit
def load(pointer, CACHE: tl.constexpr, STREAM: tl.constexpr, mask=None, other=None):
    """``tl.load`` with the hint of a stream, which is named."""
    return tl.load(pointer, mask=mask, other=other, eviction_policy=getattr(CACHE, STREAM))


@triton.jit
def store(pointer, values, CACHE: tl.constexpr, STREAM: tl.constexpr, mask=None):
    """``tl.store`` with the hint of a stream, which is named."""
    tl.store(pointer, values, mask=mask, eviction_policy=getattr(CACHE, STREAM))


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


# Passes from which on a stream counts as read again. Measured: 1.2 gain from evict_first, 2.1 lose.
_READ_AGAIN = 1.5
# The share of the L2 cache for results that stay there while rows pass. Measured: 0.32 of it gain, 0.48 lose.
_RESULTS_THAT_STAY = 0.4
# Gradients that are read, in bytes of the rows that they update, from which on they are most of an update's work. Measured: 4
# times gain, 2.3 times lose.
_MOSTLY_GRADIENTS = 3.0


def select(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """The hints of a lookup or an update.

    The L2 cache has two halves, and both may hold what both read.
    """
    return _of_lookup(streams, l2_bytes) if "rows" in streams else _of_update(streams, l2_bytes)


def _of_lookup(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """* Rows pass once and are larger than half of the cache, results are small: all loads ``evict_first``. Hardly a row is
      found again, and the results stay in the cache, which then need not be written to memory to make room.
    * All that the launch touches fits in the cache if it is there once, but not in both halves: rows ``evict_first``.
    """
    rows, stored = streams["rows"], streams["sent"].distinct
    read = sum(stream.distinct for name, stream in streams.items() if name != "sent")
    if rows.passes < _READ_AGAIN and rows.distinct > l2_bytes / 2 and stored <= _RESULTS_THAT_STAY * l2_bytes:
        return ALL_LOADS_FIRST
    return ROWS_FIRST if read + stored <= l2_bytes < 2 * read + stored else OFF


def _of_update(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
    """* Few rows get many gradients, and all fits in the cache: all loads ``evict_first``.
    * Gradients fit in half of the cache, while the larger rows pass: gradients ``evict_last``.
    """
    gradients, rows = streams["gradients"], streams["old_rows"]
    # The places of new_rows are those of old_rows.
    touched = sum(stream.distinct for name, stream in streams.items() if name != "new_rows")
    if gradients.accessed >= _MOSTLY_GRADIENTS * rows.distinct and touched <= l2_bytes:
        return ALL_LOADS_FIRST
    return GRADIENTS_LAST if gradients.distinct <= l2_bytes / 2 < rows.distinct else OFF


_is_selected = False
_zipf_exponent = 0.0


def use(policy: str, zipf_exponent: float | None = None) -> None:
    """Launch lookups and updates of this process so from now on. Hints never change results.

    CUDA graphs keep the policy under which they were captured.

    Args:
        policy: "off", or "selected": :func:`select` for each launch.
        zipf_exponent: of the rows that are looked up, which a launch cannot know; "selected" needs it. 0: all equally frequent.

    Raises:
        UsageError: there is no policy of this name, or "selected" is told no exponent.
    """
    global _is_selected, _zipf_exponent
    if policy not in ("selected", "off"):
        raise UsageError(f"cache policy {policy!r}; allowed: selected, off")
    # Hints for rows that are taken for uniform, and are not, make lookups slower.
    if policy == "selected" and zipf_exponent is None:
        raise UsageError("cache policy 'selected' needs zipf_exponent: of the rows that are looked up; 0: all equally frequent")
    _is_selected, _zipf_exponent = policy == "selected", zipf_exponent or 0.0


def choose(device: torch.device, streams: Callable[[], Mapping[str, Stream]]) -> CachePolicy:
    """The policy of a launch.

    Args:
        streams: describes those of the launch; asked only where it matters.
    """
    return select(streams(), gpu_of(device).l2) if _is_selected else OFF
