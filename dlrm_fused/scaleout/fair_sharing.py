"""Max-min fair rates of flows that share links (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.errors import UsageError

# A link is full when this share of its capacity is left: rates are sums of floating-point numbers.
_FULL = 1e-12


def max_min_rates(usage: NDArray[np.float64], capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rates, in bytes/s, at which no flow can go faster without slowing one that is not faster.

    Args:
        usage: ``(links, flows)``, the capacity that a flow takes of a link at a rate of one byte/s. 0: the flow does not
            cross it. A class of equal flows takes their sum.
        capacity: ``(links,)``, in bytes/s; a class of equal links has their sum.

    Raises:
        UsageError: a flow crosses no link; its rate has no limit.
    """
    if not (usage > 0).any(axis=0).all():
        raise UsageError("every flow must cross at least one link")
    rates = np.zeros(usage.shape[1])
    rising = np.ones(usage.shape[1], dtype=bool)
    left = capacity.astype(np.float64)
    while rising.any():
        demand = usage[:, rising].sum(axis=1)
        used = demand > 0
        step = (left[used] / demand[used]).min()
        rates[rising] += step
        left = np.maximum(left - step * demand, 0)
        full = used & (left <= _FULL * capacity)
        rising &= ~(usage[full] > 0).any(axis=0)
    return rates
