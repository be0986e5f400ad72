"""The unfused computation, in plain torch and torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.sequence_all_to_all.places import order_by_rank


def reference(
    group: dist.ProcessGroup | None,
    rows: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[int],
    counts: Sequence[Sequence[int]],
    places: Tensor | None = None,
) -> Tensor:
    """Return what :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all` does; differentiable, and collective.

    Args:
        group: the ranks that take part; None for one. The other arguments are those of the operator.
    """
    rank = 0 if group is None else group.rank()
    order = order_by_rank(offsets, batch_sizes, len(rows))
    received = all_to_all(rows.index_select(0, order), group, counts[rank], [asked[rank] for asked in counts])
    return received if places is None else received.index_select(0, places.argsort())
