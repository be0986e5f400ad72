"""GEMM + All-to-All in plain torch and torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.gemm_all_to_all.kernel import Routes


def reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """Row block s is this rank's block of rank s's ``x @ weight.T``: a product, then an All-to-All."""
    return all_to_all(torch.nn.functional.linear(x, weight), process_group)


def routed_reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor, routes: Routes) -> Tensor:
    """Each row of x times its group's weight, in the slot of its destination; zeros in slots that are no row's destination.

    Counts pass through the host: All-to-All needs them there.
    """
    ranks = 1 if process_group is None else process_group.size()
    products = torch.cat([x[own] @ matrix.T for own, matrix in zip(routes.groups.slices(), weight, strict=True)])
    destinations = routes.destinations[: len(products)].long()
    # Rows by their destination; those that belong nowhere come first, and are left out.
    order = torch.argsort(destinations)[int((destinations < 0).sum()) :]
    counts = torch.bincount(destinations[order] // routes.slots, minlength=ranks)
    sent, received = counts.tolist(), all_to_all(counts, process_group).tolist()
    rows = all_to_all(products[order], process_group, received, sent)
    slots = all_to_all(destinations[order] % routes.slots, process_group, received, sent)
    return rows.new_zeros(routes.slots, rows.shape[1]).index_copy(0, slots, rows)
