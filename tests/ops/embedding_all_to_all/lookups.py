"""Random lookups, and what their update must do to the tables, computed in float64 one position at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import LocalTables, RowwiseAdagrad, Sgd


@dataclass
class Lookup:
    """One lookup and the gradients of its result."""

    tables: LocalTables
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    gradients: Tensor

    @property
    def batch_size(self) -> int:
        return self.tables.batch_size(self.offsets)


def make_tables(
    rows: Sequence[int],
    dims: Sequence[int],
    feature_tables: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    mean: bool = False,
    adagrad: bool = True,
    stochastic_rounding: bool = False,
    learning_rate: float = 0.1,
    rate_on_device: bool = False,
    device: str = "cpu",
    generator: torch.Generator | None = None,
) -> LocalTables:
    offsets, end = [], 0
    for count, dim in zip(rows, dims, strict=True):
        offsets.append(end)
        end += count * dim
    weights = torch.randn(end, generator=generator).to(dtype).to(device)
    rate = torch.tensor(learning_rate, device=device if rate_on_device else "cpu")
    momentum = torch.rand(sum(rows), generator=generator).to(device)
    return LocalTables(
        weights=weights,
        offsets=tuple(offsets),
        rows=tuple(rows),
        dims=tuple(dims),
        feature_tables=tuple(feature_tables),
        mean=mean,
        optimizer=RowwiseAdagrad(momentum, rate, eps=1e-8) if adagrad else Sgd(rate),
        stochastic_rounding=stochastic_rounding,
    )


def make_lookup(
    tables: LocalTables,
    batch_size: int,
    longest_bag: int,
    *,
    hot: float = 0.0,
    weighted: bool = False,
    index_dtype: torch.dtype = torch.int64,
    gradient_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    generator: torch.Generator | None = None,
) -> Lookup:
    """Bags of 0 to ``longest_bag`` rows; a share ``hot`` of positions reads the table's row 1. Gradients have rows of
    ``padding`` elements more than they need, filled with NaN."""
    device = tables.weights.device
    features = len(tables.feature_tables)
    lengths = torch.randint(0, longest_bag + 1, (features * batch_size,), generator=generator)
    offsets = torch.zeros(features * batch_size + 1, dtype=index_dtype)
    offsets[1:] = lengths.cumsum(0)
    parts = []
    for feature, table in enumerate(tables.feature_tables):
        count = int(offsets[(feature + 1) * batch_size] - offsets[feature * batch_size])
        part = torch.randint(0, tables.rows[table], (count,), generator=generator)
        is_hot = torch.rand(count, generator=generator) < hot
        parts.append(torch.where(is_hot, min(1, tables.rows[table] - 1), part))
    indices = torch.cat([*parts, torch.empty(0, dtype=torch.int64)]).to(index_dtype)
    width = sum(tables.feature_dims)
    gradients = torch.full((batch_size, width + padding), torch.nan)
    gradients[:, :width] = torch.randn(batch_size, width, generator=generator)
    return Lookup(
        tables=tables,
        indices=indices.to(device),
        offsets=offsets.to(device),
        per_sample_weights=torch.rand(indices.numel(), generator=generator).to(device) if weighted else None,
        gradients=gradients.to(gradient_dtype).to(device)[:, :width],
    )


def bags_of(lookup: Lookup) -> Tensor:
    """The bag of each position."""
    lengths = lookup.offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def row_gradients(lookup: Lookup, scale: float = 1.0) -> list[Tensor]:
    """float64 [rows, dim] for each table: the sum over all positions."""
    tables = lookup.tables
    bags, lengths = bags_of(lookup), lookup.offsets.diff().double()
    sums = [
        torch.zeros(rows, dim, dtype=torch.float64, device=lookup.indices.device)
        for rows, dim in zip(tables.rows, tables.dims, strict=True)
    ]
    for feature, (table, column, dim) in enumerate(
        zip(tables.feature_tables, tables.feature_columns, tables.feature_dims, strict=True)
    ):
        own = (bags // max(lookup.batch_size, 1)) == feature
        bag = bags[own]
        values = lookup.gradients[bag - feature * lookup.batch_size, column : column + dim].double() * scale
        if tables.mean:
            values /= lengths[bag][:, None]
        if lookup.per_sample_weights is not None:
            values *= lookup.per_sample_weights[own].double()[:, None]
        sums[table].index_add_(0, lookup.indices[own].long(), values)
    return sums


def expected_update(lookup: Lookup, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """float64 weights and momentum after the update, both flat."""
    tables, optimizer = lookup.tables, lookup.tables.optimizer
    assert optimizer is not None
    rate = optimizer.learning_rate.double().item()
    weights = tables.weights.double()
    momentum = optimizer.momentum.double() if isinstance(optimizer, RowwiseAdagrad) else None
    for table, gradient in enumerate(row_gradients(lookup, scale)):
        rows, dim, offset = tables.rows[table], tables.dims[table], tables.offsets[table]
        step = rate * gradient
        if isinstance(optimizer, RowwiseAdagrad) and momentum is not None:
            own = momentum[tables.first_rows[table] :][:rows]
            own += gradient.square().mean(1)
            touched = (gradient != 0).any(1)
            step = torch.where(touched, rate / (own.sqrt() + optimizer.eps), 0.0)[:, None] * gradient
        weights[offset : offset + rows * dim] -= step.flatten()
    return weights, momentum


def expected_products(lookup: Lookup, scale: float = 1.0) -> Tensor:
    """float64 [N]: gradients of the per-sample weights."""
    tables, bags, lengths = lookup.tables, bags_of(lookup), lookup.offsets.diff()
    products = torch.empty(lookup.indices.numel(), dtype=torch.float64, device=lookup.indices.device)
    for feature, (table, column, dim) in enumerate(
        zip(tables.feature_tables, tables.feature_columns, tables.feature_dims, strict=True)
    ):
        own = (bags // max(lookup.batch_size, 1)) == feature
        bag = bags[own]
        rows = tables.weights[tables.offsets[table] :][: tables.rows[table] * dim].view(-1, dim)[lookup.indices[own].long()]
        gradients = lookup.gradients[bag - feature * lookup.batch_size, column : column + dim].double() * scale
        products[own] = (rows.double() * gradients).sum(1) / (lengths[bag] if tables.mean else 1)
    return products
