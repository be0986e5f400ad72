"""Random lookups, and what their update must do to the tables, computed in float64 one position at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.tables import Adagrad, Adam, LocalTables, Optimizer, RowwiseAdagrad, RowwiseAdam, Sgd
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, sort_lookup

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adagrad", "adam", "rowwise_adam")
EPS = 1e-8


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


def update(lookup: Lookup, **arguments: Any) -> None:
    order = sort_lookup(lookup.tables, lookup.indices, lookup.offsets)
    apply_gradients(
        lookup.tables, order, lookup.gradients, lookup.indices, lookup.offsets, lookup.per_sample_weights, **arguments
    )


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_tables(
    rows: Sequence[int],
    dims: Sequence[int],
    feature_tables: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    mean: bool = False,
    optimizer: str = "rowwise_adagrad",
    weight_decay: float = 0.0,
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
    return LocalTables(
        weights=weights,
        offsets=tuple(offsets),
        rows=tuple(rows),
        dims=tuple(dims),
        feature_tables=tuple(feature_tables),
        mean=mean,
        optimizer=make_optimizer(
            optimizer,
            sum(rows),
            end,
            rate,
            lambda count: torch.rand(count, generator=generator).to(device),
            steps=torch.full((1,), 3, device=device),
            weight_decay=weight_decay,
        ),
        stochastic_rounding=stochastic_rounding,
    )


def make_optimizer(
    kind: str,
    rows: int,
    elements: int,
    rate: Tensor,
    state: Callable[[int], Tensor],
    steps: Tensor,
    weight_decay: float = 0.0,
    eps: float = EPS,
) -> Optimizer:
    """One of OPTIMIZERS; ``state`` makes a state of so many values, ``steps`` is Adam's count."""
    match kind:
        case "sgd":
            return Sgd(rate)
        case "rowwise_adagrad":
            return RowwiseAdagrad(state(rows), rate, eps)
        case "adagrad":
            return Adagrad(state(elements), rate, eps)
        case "adam":
            return Adam(state(elements), state(elements), steps, rate, eps, 0.9, 0.99, weight_decay)
        case "rowwise_adam":
            return RowwiseAdam(state(elements), state(rows), steps, rate, eps, 0.9, 0.99, weight_decay)
    raise ValueError(kind)


def states_of(tables: LocalTables) -> list[Tensor]:
    """The states of the tables' optimizer, flat; Adam's count of steps is the last."""
    match tables.optimizer:
        case RowwiseAdagrad() | Adagrad():
            return [tables.optimizer.momentum]
        case Adam():
            return [tables.optimizer.momentum1, tables.optimizer.momentum2, tables.optimizer.steps]
    return []


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


def is_looked_up(lookup: Lookup) -> list[Tensor]:
    """bool [rows] for each table."""
    tables, features = lookup.tables, bags_of(lookup) // max(lookup.batch_size, 1)
    looked_up = [torch.zeros(rows, dtype=torch.bool, device=features.device) for rows in tables.rows]
    for feature, table in enumerate(tables.feature_tables):
        looked_up[table][lookup.indices[features == feature].long()] = True
    return looked_up


def expected_update(lookup: Lookup, scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """float64 weights and states of the optimizer after the update, flat, as :func:`states_of` lists them."""
    tables = lookup.tables
    weights, states = tables.weights.double(), [state.double() for state in states_of(tables)]
    if isinstance(tables.optimizer, Adam):
        states[-1] += 1
    gradients = row_gradients(lookup, scale)
    for table, (gradient, looked_up) in enumerate(zip(gradients, is_looked_up(lookup), strict=True)):
        rows, dim, offset, first = tables.rows[table], tables.dims[table], tables.offsets[table], tables.first_rows[table]
        of_elements = slice(offset, offset + rows * dim)
        own = [
            state[of_elements].view(rows, dim) if state.numel() == weights.numel() else state[first : first + rows, None]
            for state in states[:2]
        ]
        table_weights = weights[of_elements].view(rows, dim)
        step, new_states = _step(tables.optimizer, table_weights, gradient, own, states[-1:])
        table_weights -= torch.where(looked_up[:, None], step, 0.0)
        for old, new in zip(own, new_states, strict=False):
            old.copy_(torch.where(looked_up[:, None], new, old))
    return weights, states


def _step(
    optimizer: Optimizer | None, weights: Tensor, gradient: Tensor, own: list[Tensor], steps: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """What a table's rows lose, as if all were looked up, and their new states, [rows, dim] or [rows, 1]."""
    assert optimizer is not None
    rate = optimizer.learning_rate.double().item()
    match optimizer:
        case Sgd():
            return rate * gradient, []
        case RowwiseAdagrad() | Adagrad():
            squares = gradient.square()
            momentum = own[0] + (squares.mean(1, keepdim=True) if isinstance(optimizer, RowwiseAdagrad) else squares)
            return rate * gradient / (momentum.sqrt() + optimizer.eps), [momentum]
        case Adam():
            # Kernels of FBGEMM, as ours, take fp32 betas.
            beta1, beta2 = (torch.tensor(beta).double().item() for beta in (optimizer.beta1, optimizer.beta2))
            squares, number = gradient.square(), steps[0].item()
            mean = beta1 * own[0] + (1 - beta1) * gradient
            squares = squares.mean(1, keepdim=True) if isinstance(optimizer, RowwiseAdam) else squares
            variance = beta2 * own[1] + (1 - beta2) * squares
            deviation = (variance / (1 - beta2**number)).sqrt() + optimizer.eps
            return rate * (mean / (1 - beta1**number) / deviation + optimizer.weight_decay * weights), [mean, variance]


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
