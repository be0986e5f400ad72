"""The unfused computation, in plain torch and torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single


def reference(group: dist.ProcessGroup, rows: Tensor, order: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Return what :func:`~dlrm_fused.ops.sequence_all_to_all.sequence_all_to_all` does; differentiable, and collective.

    Args:
        group: the ranks that take part; the other arguments are those of the operator.
    """
    rank = group.rank()
    sent, received = [asked[rank] for asked in counts], list(counts[rank])
    out = rows.new_empty(sum(received), rows.shape[1])
    return all_to_all_single(out, rows.index_select(0, order), received, sent, group)
