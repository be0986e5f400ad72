"""The fused lookup in plain torch and torch.distributed: what it computes, and what tests compare it with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables


def reference(
    process_group: dist.ProcessGroup | None,
    layout: ExchangeLayout,
    tables: Sequence[LocalTables],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_sizes: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:
    """Pool this rank's features for all ranks' samples, exchange them by All-to-All, and put them side by side.

    Parts of row-wise tables are added in the order of ranks. Without a process group there is one rank.

    Collective, also in the backward pass. It is differentiable in the tables' weights and in the per-sample weights, whose
    gradients are those of the sum over all ranks; no optimizer is applied.

    Args:
        layout: of all ranks.
        tables: for each lookup of this rank.
        indices, offsets, per_sample_weights, batch_sizes: as for the operator.
        device: of this rank; needed where it has no tables.

    Returns:
        fp32 [batch_sizes[rank], layout.columns].
    """
    rank = 0 if process_group is None else process_group.rank()
    batch, local_batch = sum(batch_sizes), batch_sizes[rank]
    pooled = [
        _pool(own, indices[i], offsets[i], per_sample_weights[i] if per_sample_weights else None, batch)
        for i, own in enumerate(tables)
    ]
    # A rank without tables takes part in the backward pass too.
    sent = torch.cat(pooled, dim=1) if pooled else torch.zeros(batch, 0, device=device, requires_grad=True)
    widths = [layout.width(source) for source in range(len(layout.lookups))]
    received = all_to_all(
        sent.flatten(), process_group, [local_batch * width for width in widths], [size * sent.shape[1] for size in batch_sizes]
    )
    columns: dict[int, Tensor] = {}
    for source, results in enumerate(received.split([local_batch * width for width in widths])):
        features = [feature for lookup in layout.lookups[source] for feature in zip(lookup.columns, lookup.dims, strict=True)]
        parts = results.view(local_batch, widths[source]).split([dim for _, dim in features], dim=1)
        for (column, _), part in zip(features, parts, strict=True):
            # Partial sums of row-wise tables are added in the order of ranks.
            columns[column] = columns[column] + part if column in columns else part
    return torch.cat([columns[column] for column in sorted(columns)], dim=1)


def _pool(tables: LocalTables, indices: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
    """fp32 [batch, width]: the pooled embeddings of a lookup."""
    pooled = []
    for feature, table in enumerate(tables.feature_tables):
        rows, dim, first = tables.rows[table], tables.dims[table], tables.offsets[table]
        bags = offsets[feature * batch : (feature + 1) * batch + 1].long()
        begin, end = int(bags[0]), int(bags[-1])
        total = torch.nn.functional.embedding_bag(
            indices[begin:end].long(),
            tables.weights[first : first + rows * dim].view(rows, dim).float(),
            bags - begin,
            mode="sum",
            per_sample_weights=weights[begin:end] if weights is not None and weights.numel() else None,
            include_last_offset=True,
        )
        pooled.append(total / bags.diff().clamp(min=1)[:, None] if tables.mean else total)
    return torch.cat(pooled, dim=1)
