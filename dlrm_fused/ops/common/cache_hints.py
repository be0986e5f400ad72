"""Cache hints for what kernels load and store: the *streams* of memory accesses, and how a kernel applies the hint of each.

A stream is what a kernel reads or writes for one purpose, such as the rows of a table. PTX takes cache operators and eviction
priorities "as performance hints only": they change neither results nor the order of memory accesses. None are given where
they would be lost, since Triton pipelines the operands of products, by cp.async or TMA, without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import triton
import triton.language as tl


@dataclass(frozen=True)
class Hint:
    """The cache hint of a load or store. PTX knows a cache operator or an eviction priority, not both at once.

    Attributes:
        modifier: of loads .ca, .cg or .cv; of stores .wb, .cg, .cs or .wt; or none.
        eviction: evict_first, evict_last, or none: the normal priority.
    """

    modifier: str = ""
    eviction: str = ""

    def __str__(self) -> str:
        return self.modifier or self.eviction or "off"


HARDWARE = Hint()
EVICT_FIRST, EVICT_LAST = Hint(eviction="evict_first"), Hint(eviction="evict_last")
LOAD_HINTS = {str(hint): hint for hint in (HARDWARE, Hint(".ca"), Hint(".cg"), Hint(".cv"), EVICT_FIRST, EVICT_LAST)}
STORE_HINTS = {
    str(hint): hint for hint in (HARDWARE, Hint(".wb"), Hint(".cg"), Hint(".cs"), Hint(".wt"), EVICT_FIRST, EVICT_LAST)
}


# Each launch looks a compiled kernel up by this constant: by its identity, since to hash all fields takes microseconds.
@dataclass(frozen=True, eq=False)
class CachePolicy:
    """The hint of every stream, a constant to the compiler; the defaults are how the kernels run unless told otherwise."""

    # Loads.
    rows: Hint = HARDWARE  # of tables, by the lookup
    indices: Hint = HARDWARE  # of the lookup, and its per-sample weights
    offsets: Hint = HARDWARE
    # A row passes once; the gradients, which are read again and again, shall stay in the cache.
    old_rows: Hint = EVICT_FIRST  # of tables, by the update
    gradients: Hint = HARDWARE
    order: Hint = HARDWARE  # of the sorted lookup
    activations: Hint = HARDWARE  # rows that are sent
    received: Hint = HARDWARE  # what peers have stored
    routes: Hint = HARDWARE  # of tokens to experts
    # Stores.
    sent: Hint = HARDWARE  # to peers, and what a rank sends to itself
    results: Hint = HARDWARE  # in memory of this rank, for the next kernel
    new_rows: Hint = EVICT_FIRST  # of tables, by the update

    def hints(self) -> dict[str, str]:
        """Return the hints by stream, as words."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}


OFF = CachePolicy()
STORES = ("sent", "results", "new_rows")
LOADS = tuple(field.name for field in fields(CachePolicy) if field.name not in STORES)
# Streams that a launch may read more than once.
_REUSED = ("rows", "gradients", "activations")


def with_hints(loads: Hint | None = None, stores: Hint | None = None, **streams: Hint) -> CachePolicy:
    """The defaults but for all loads, all stores, or the streams that are named."""
    of_loads = {} if loads is None else dict.fromkeys(LOADS, loads)
    of_stores = {} if stores is None else dict.fromkeys(STORES, stores)
    return replace(OFF, **{**of_loads, **of_stores, **streams})


# One choice for all loads or all stores, whatever the launch; by name.
STATIC: Mapping[str, CachePolicy] = {
    "off": OFF,
    "no hints": with_hints(HARDWARE, HARDWARE),
    "loads .cg": with_hints(LOAD_HINTS[".cg"]),
    "loads evict_first": with_hints(EVICT_FIRST),
    "reused evict_last, rest evict_first": with_hints(EVICT_FIRST, EVICT_FIRST, **dict.fromkeys(_REUSED, EVICT_LAST)),
    "stores .cs": with_hints(stores=STORE_HINTS[".cs"]),
    "stores .cg": with_hints(stores=STORE_HINTS[".cg"]),
    "stores .wt": with_hints(stores=STORE_HINTS[".wt"]),
    "stores evict_first": with_hints(stores=EVICT_FIRST),
}


@triton.jit
def load(pointer, CACHE: tl.constexpr, STREAM: tl.constexpr, mask=None, other=None):
    """``tl.load`` with the hint of a stream, which is named."""
    return tl.load(
        pointer,
        mask=mask,
        other=other,
        cache_modifier=getattr(CACHE, STREAM).modifier,
        eviction_policy=getattr(CACHE, STREAM).eviction,
    )


@triton.jit
def store(pointer, values, CACHE: tl.constexpr, STREAM: tl.constexpr, mask=None):
    """``tl.store`` with the hint of a stream, which is named."""
    tl.store(
        pointer,
        values,
        mask=mask,
        cache_modifier=getattr(CACHE, STREAM).modifier,
        eviction_policy=getattr(CACHE, STREAM).eviction,
    )
