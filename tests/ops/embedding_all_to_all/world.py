"""A small world of sharded tables that every rank knows in full, to compare the fused lookup and its update with.

All ranks draw the same tables, batches and gradients from one seed, so that each can compute what it must receive, and how its
own tables must change, without any communication, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables, RowwiseAdagrad
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.embedding_all_to_all.lookups import make_optimizer

EPS = 1e-3


@dataclass(frozen=True)
class Features:
    """The tables of one lookup of one rank, one feature each unless ``feature_tables`` says otherwise."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    feature_tables: tuple[int, ...]
    mean: bool = False
    weighted: bool = False
    row_wise: bool = False
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Traffic:
    """How workspaces are made."""

    output_dtype: torch.dtype = torch.float32
    forward_wire: torch.dtype = torch.float32
    backward_wire: torch.dtype = torch.float32
    optimizer: str = "rowwise_adagrad"
    longest_bag: int = 5
    largest_batch: int = 4
    held_outputs: int = 2


@dataclass
class _Shard:
    """One lookup of one rank in float64."""

    features: Features
    tables: list[np.ndarray]
    momentum: list[np.ndarray]


@dataclass
class _Batch:
    indices: Tensor
    offsets: Tensor
    weights: Tensor


@dataclass
class Result:
    """Largest differences seen from what was expected."""

    output: float = 0.0
    tables: float = 0.0
    momentum: float = 0.0
    weight_gradients: float = 0.0
    held: float = 0.0
    epochs: int = 0

    def largest(self) -> float:
        """Of all differences; infinite if one is no number."""
        values = (self.output, self.tables, self.momentum, self.weight_gradients, self.held)
        return max(values) if all(value == value for value in values) else float("inf")


def mixed_world(world_size: int) -> list[list[Features]]:
    """Table- and row-wise lookups of different dims, dtypes and poolings; the last of three ranks or more has no own table."""
    ranks: list[list[Features]] = []
    for rank in range(world_size):
        own: list[Features] = []
        if world_size < 3 or rank < world_size - 1:
            own.append(Features((11, 7), (8, 4), (0, 1, 0)))
            own.append(Features((5 + rank, 9), (12, 16), (0, 1), mean=True, weighted=rank == 0, index_dtype=torch.int32))
        own.append(Features((6,), (8,), (0,), row_wise=True))
        ranks.append(own)
    return ranks


class World:
    """The tables of all ranks, and what each epoch does to them."""

    def __init__(self, ranks: Sequence[Sequence[Features]], traffic: Traffic, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._traffic = traffic
        self.ranks = ranks
        self.layout = self._layout()
        self._shards = [[self._shard(features) for features in own] for own in ranks]

    def _layout(self) -> ExchangeLayout:
        lookups, column = [], 0
        row_wise: dict[int, tuple[int, ...]] = {}
        for own in self.ranks:
            mine, ordinal = [], 0
            for features in own:
                dims = tuple(features.dims[table] for table in features.feature_tables)
                if features.row_wise and ordinal in row_wise:
                    columns = row_wise[ordinal]
                else:
                    columns = tuple(column + sum(dims[:i]) for i in range(len(dims)))
                    column += sum(dims)
                if features.row_wise:
                    row_wise[ordinal] = columns
                    ordinal += 1
                mine.append(LookupLayout(columns, dims, features.row_wise))
            lookups.append(tuple(mine))
        return ExchangeLayout(tuple(lookups), column)

    def _shard(self, features: Features) -> _Shard:
        tables = [
            torch.from_numpy(self._random.uniform(-1, 1, (rows, dim))).to(features.dtype).double().numpy()
            for rows, dim in zip(features.rows, features.dims, strict=True)
        ]
        return _Shard(features, tables, [np.zeros(rows) for rows in features.rows])

    def workspace(self, group: SymmetricGroup, name: str, **settings: object) -> EmbeddingWorkspace:
        """A workspace over this rank's tables."""
        traffic = self._traffic
        workspace = EmbeddingWorkspace(
            group,
            self.layout,
            name=name,
            output_dtype=traffic.output_dtype,
            forward_wire=traffic.forward_wire,
            backward_wire=traffic.backward_wire,
            gradient_scale=1 / group.world_size,
            held_outputs=traffic.held_outputs,
            **settings,  # type: ignore[arg-type]
        )
        workspace.attach_tables([self.local_tables(shard, group.device) for shard in self._shards[group.rank]])
        return workspace

    def local_tables(self, shard: _Shard, device: torch.device) -> LocalTables:
        """A shard as FBGEMM keeps it."""
        features = shard.features
        weights = torch.cat([torch.from_numpy(table).reshape(-1) for table in shard.tables]).to(features.dtype).to(device)
        offsets = np.cumsum([0, *(table.size for table in shard.tables)])[:-1]
        rate = torch.tensor(0.1, dtype=torch.float32)
        steps = torch.zeros(1, dtype=torch.int64, device=device)
        optimizer = make_optimizer(
            self._traffic.optimizer,
            sum(features.rows),
            weights.numel(),
            rate,
            lambda count: torch.zeros(count, device=device),
            steps,
            eps=EPS,
        )
        return LocalTables(
            weights,
            tuple(int(offset) for offset in offsets),
            features.rows,
            features.dims,
            features.feature_tables,
            features.mean,
            optimizer,
            stochastic_rounding=False,
        )

    def draw_batch_sizes(self) -> list[int]:
        sizes = self._random.integers(0, self._traffic.largest_batch + 1, len(self.ranks))
        return [int(size) for size in sizes]

    def draw_batches(self, batch_sizes: Sequence[int]) -> list[list[_Batch]]:
        return [[self._batch(shard, sum(batch_sizes)) for shard in own] for own in self._shards]

    def _batch(self, shard: _Shard, bags: int) -> _Batch:
        features = shard.features
        lengths = self._random.integers(0, self._traffic.longest_bag + 1, len(features.feature_tables) * bags)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat([features.rows[table] for table in features.feature_tables], bags) if bags else np.zeros(0, int)
        indices = (self._random.random(offsets[-1]) * np.repeat(rows, lengths)).astype(np.int64)
        weights = self._random.uniform(0.5, 1.5, len(indices)) if features.weighted else np.zeros(0)
        return _Batch(
            torch.from_numpy(indices).to(features.index_dtype),
            torch.from_numpy(offsets).to(features.index_dtype),
            torch.from_numpy(weights).float(),
        )

    def output(self, batches: list[list[_Batch]], batch_sizes: Sequence[int], rank: int) -> Tensor:
        """float64 [batch_sizes[rank], columns]: what a rank must receive."""
        first = sum(batch_sizes[:rank])
        output = np.zeros((batch_sizes[rank], self.layout.columns))
        for lookups, own, shards in zip(self.layout.lookups, batches, self._shards, strict=True):
            for lookup, batch, shard in zip(lookups, own, shards, strict=True):
                for feature, bag, index, factor in _entries(shard.features, batch, sum(batch_sizes)):
                    if first <= bag < first + batch_sizes[rank]:
                        column, dim = lookup.columns[feature], lookup.dims[feature]
                        row = shard.tables[shard.features.feature_tables[feature]][index]
                        output[bag - first, column : column + dim] += factor * row
        return torch.from_numpy(output)

    def draw_gradients(self, batch_sizes: Sequence[int]) -> list[Tensor]:
        return [torch.from_numpy(self._random.normal(size=(size, self.layout.columns))).float() for size in batch_sizes]

    def update(self, batches: list[list[_Batch]], gradients: list[Tensor], rank: int) -> list[Tensor]:
        """Let the optimizer change all tables; returns the gradients of this rank's per-sample weights, by lookup."""
        upstream = torch.cat(gradients).double().numpy()
        weight_gradients = []
        for workspace, (lookups, own, shards) in enumerate(zip(self.layout.lookups, batches, self._shards, strict=True)):
            for lookup, batch, shard in zip(lookups, own, shards, strict=True):
                sums = [np.zeros_like(table) for table in shard.tables]
                of_weights = np.zeros(len(batch.indices))
                for position, (feature, bag, index, factor) in enumerate(_entries(shard.features, batch, len(upstream))):
                    column, dim = lookup.columns[feature], lookup.dims[feature]
                    table = shard.features.feature_tables[feature]
                    gradient = upstream[bag, column : column + dim] / len(self.ranks)
                    sums[table][index] += factor * gradient
                    length = _length(batch, feature, bag, len(upstream)) if shard.features.mean else 1
                    of_weights[position] = gradient @ shard.tables[table][index] / length
                if workspace == rank and shard.features.weighted:
                    weight_gradients.append(torch.from_numpy(of_weights))
                elif workspace == rank:
                    weight_gradients.append(torch.zeros(0))
                for table, momentum, total in zip(shard.tables, shard.momentum, sums, strict=True):
                    if self._traffic.optimizer == "rowwise_adagrad":
                        momentum += (total**2).mean(axis=1)
                        table -= (0.1 / (np.sqrt(momentum) + EPS))[:, None] * total * (total != 0).any(axis=1)[:, None]
                    else:
                        table -= 0.1 * total
        return weight_gradients

    def table_errors(self, workspace: EmbeddingWorkspace) -> tuple[float, float]:
        """Largest differences of this rank's weights and momenta from what they must be."""
        tables = momentum = 0.0
        for shard, local in zip(self._shards[workspace.rank], workspace.tables, strict=True):
            expected = np.concatenate([table.reshape(-1) for table in shard.tables])
            tables = max(tables, float(np.abs(local.weights.detach().double().cpu().numpy() - expected).max()))
            if isinstance(local.optimizer, RowwiseAdagrad):
                found = local.optimizer.momentum.double().cpu().numpy()
                momentum = max(momentum, float(np.abs(found - np.concatenate(shard.momentum)).max()))
        return tables, momentum


def _entries(features: Features, batch: _Batch, bags: int) -> list[tuple[int, int, int, float]]:
    """(feature, bag, row, factor) of every index, in order."""
    offsets, indices, weights = batch.offsets.tolist(), batch.indices.tolist(), batch.weights.tolist()
    entries = []
    for feature in range(len(features.feature_tables)):
        for bag in range(bags):
            begin, end = offsets[feature * bags + bag], offsets[feature * bags + bag + 1]
            for position in range(begin, end):
                factor = (weights[position] if features.weighted else 1.0) / ((end - begin) if features.mean else 1)
                entries.append((feature, bag, indices[position], factor))
    return entries


def _length(batch: _Batch, feature: int, bag: int, bags: int) -> int:
    return int(batch.offsets[feature * bags + bag + 1] - batch.offsets[feature * bags + bag])


def run_epochs(
    world: World,
    workspace: EmbeddingWorkspace,
    epochs: int,
    delay: Callable[[int], None] = lambda epoch: None,
    hold: int = 3,
    backward_every: int = 1,
) -> Result:
    """Look up, compare, go backward, compare; with outputs of earlier epochs kept, and compared again."""
    from dlrm_fused.ops.embedding_all_to_all.op import embedding_all_to_all

    result = Result()
    held: list[tuple[Tensor, Tensor]] = []
    for epoch in range(epochs):
        batch_sizes = world.draw_batch_sizes()
        batches = world.draw_batches(batch_sizes)
        expected = world.output(batches, batch_sizes, workspace.rank)
        own = batches[workspace.rank]
        device = workspace.device
        weights = [batch.weights.to(device).requires_grad_(batch.weights.numel() > 0) for batch in own]
        delay(epoch)
        output = embedding_all_to_all(
            workspace,
            [batch.indices.to(device) for batch in own],
            [batch.offsets.to(device) for batch in own],
            weights,
            batch_sizes,
        )
        result.output = max(result.output, _difference(output, expected))
        held.append((output.detach(), expected))
        for kept, right in held:
            result.held = max(result.held, _difference(kept, right))
        held = held[-hold:]
        result.epochs += 1
        if epoch % backward_every:
            continue
        gradients = world.draw_gradients(batch_sizes)
        expected_weight_gradients = world.update(batches, gradients, workspace.rank)
        delay(epoch)
        gradient = gradients[workspace.rank].to(device, output.dtype)
        if epoch % 2:
            # Some columns of a wider tensor.
            gradient = F.pad(gradient, (4, 8))[:, 4:-8]
        output.backward(gradient)
        for found, right in zip(weights, expected_weight_gradients, strict=True):
            if right.numel():
                assert found.grad is not None
                result.weight_gradients = max(result.weight_gradients, _difference(found.grad, right))
    result.tables, result.momentum = world.table_errors(workspace)
    return result


def _difference(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found.detach().double().cpu() - expected).abs().max())
