"""The workloads of the benchmark of cache policies: one kernel family each, with data that the L2 cache does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, zip_longest
from typing import Literal

import torch
from torch import Tensor

from benchmarks.common.harness import World
from benchmarks.gemv_all_reduce.simulated_ranks import SimulatedRanks, multiply
from dlrm_fused.inference.online.cached_attention import cached_attention
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LocalTables, LookupLayout, RowwiseAdagrad
from dlrm_fused.ops.embedding_all_to_all.kernel import Lookup, in_memory_of_ranks, lookup_and_scatter
from dlrm_fused.ops.embedding_all_to_all.reduce import add_up
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, sort_lookup
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm, gemm_combine
from dlrm_fused.ops.moe.activations import ACTIVATIONS
from dlrm_fused.ops.moe.dispatch import route
from dlrm_fused.ops.moe.steps import KernelSteps
from dlrm_fused.symmetric import Channel

TIMEOUT_SECONDS = 60.0
_TILE_ROWS = 64


@dataclass
class Run:
    """A workload whose data are there.

    Attributes:
        calls: each with a set of data of its own, in turn; they return what they have computed.
        state: what all calls share, and may change.
        reset: puts the state back.
    """

    calls: Sequence[Callable[[], Sequence[Tensor]]]
    state: Sequence[Tensor] = ()
    reset: Callable[[], object] = field(default=lambda: None)

    def results(self) -> list[Tensor]:
        """Of one pass over all sets of data, from the same start; copies."""
        self.reset()
        outputs = [output.clone() for call in self.calls for output in call()]
        return outputs + [tensor.clone() for tensor in self.state]


@dataclass(frozen=True)
class Workload:
    """One row of the report.

    Attributes:
        streams: those for which its kernels take hints.
        make: allocates and draws its data. Collective.
        zipf_exponent: of the rows that are looked up; 0: uniform.
    """

    name: str
    streams: tuple[str, ...]
    make: Callable[[World], Run]
    zipf_exponent: float = 0.0


@dataclass(frozen=True)
class _Embedding:
    """Tables of equal shape, and bags that are looked up in them: ids by frequency, so that row 0 of a table is its hottest."""

    dim: int
    dtype: torch.dtype
    zipf: float
    rows: int
    bags: int
    pooling: int
    tables: int = 1
    sets: int = 3
    # Of updates. Those that all calls share may be in the cache from the call before; those that are just stored, by a kernel
    # that is timed, too, are there as if peers had sent them.
    gradients: Literal["shared", "of each call", "just stored"] = "shared"

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        skew = f"zipf {self.zipf}" if self.zipf else "uniform"
        return f"{self.tables} x {self.rows} rows dim {self.dim} {dtype}, {self.bags} bags of {self.pooling}, {skew}"

    def local_tables(self, device: torch.device) -> LocalTables:
        size = self.rows * self.dim
        generator = torch.Generator(device).manual_seed(1)
        weights = torch.empty(self.tables * size, dtype=self.dtype, device=device).uniform_(-0.1, 0.1, generator=generator)
        momentum = torch.full((self.tables * self.rows,), 0.1, device=device)
        return LocalTables(
            weights=weights,
            offsets=tuple(size * table for table in range(self.tables)),
            rows=(self.rows,) * self.tables,
            dims=(self.dim,) * self.tables,
            feature_tables=tuple(range(self.tables)),
            mean=False,
            optimizer=RowwiseAdagrad(momentum, torch.tensor(0.01), 1e-8),
            stochastic_rounding=False,
        )

    def draw(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Indices and offsets of each set."""
        generator = torch.Generator(device).manual_seed(2)
        count = self.tables * self.bags * self.pooling
        offsets = torch.arange(0, count + 1, self.pooling, device=device)
        points = (torch.rand(count, dtype=torch.float64, device=device, generator=generator) for _ in range(self.sets))
        ranks = torch.arange(1, self.rows + 1, dtype=torch.float64, device=device)
        cumulative = ranks.pow_(-self.zipf).cumsum(0)
        indices = (torch.searchsorted(cumulative, own * cumulative[-1]).clamp_(max=self.rows - 1) for own in points)
        return [(own, offsets) for own in indices]

    def lookups(self, world: World) -> Run:
        return self._lookups_in(self.local_tables(world.device), world)

    def _lookups_in(self, tables: LocalTables, world: World) -> Run:
        columns, dims = tuple(self.dim * table for table in range(self.tables)), (self.dim,) * self.tables
        layout = ExchangeLayout(((LookupLayout(columns, dims),),), self.tables * self.dim)
        workspace = EmbeddingWorkspace(world.symmetric, layout, name=self.name, timeout_seconds=TIMEOUT_SECONDS)
        workspace.attach_tables([tables])
        workspace.reserve([self.bags])
        plan, pool = workspace.plan([self.bags]), workspace.outputs
        output = pool.receive((self.bags, layout.columns), torch.float32)
        (features,) = workspace.feature_tables(0)
        to = in_memory_of_ranks(workspace, plan, 0)

        def look_up(indices: Tensor, offsets: Tensor) -> list[Tensor]:
            lookup = Lookup(0, features, tables.weights, indices, offsets, None)
            lookup_and_scatter(workspace, plan, lookup, to, receive_offset=pool.offset_of(output), first=True, last=True)
            return [output]

        return Run([partial(look_up, *own) for own in self.draw(world.device)])

    def updates(self, world: World) -> Run:
        sets = self.sets if self.gradients == "of each call" else 1
        gradients = torch.randn(sets, self.bags, self.tables * self.dim, device=world.device)
        return self._updates_of(self.local_tables(world.device), gradients)

    def steps(self, world: World) -> Run:
        """A lookup, and the update of what it has read; between them one kernel reads the results and stores the gradients."""
        tables = self.local_tables(world.device)
        gradients = torch.empty(1, self.bags, self.tables * self.dim, device=world.device)
        lookups, updates = self._lookups_in(tables, world), self._updates_of(tables, gradients)

        def call(look_up: Callable[[], Sequence[Tensor]], update: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
            (pooled,) = look_up()
            torch.mul(pooled, 0.01, out=gradients[0])
            return [pooled, *update()]

        calls = [partial(call, *pair) for pair in zip(lookups.calls, updates.calls, strict=True)]
        return Run(calls, state=updates.state, reset=updates.reset)

    def _updates_of(self, tables: LocalTables, sets_of_gradients: Tensor) -> Run:
        assert isinstance(tables.optimizer, RowwiseAdagrad)
        state = tables.weights, tables.optimizer.momentum
        start = [tensor.clone() for tensor in state]

        def call(indices: Tensor, offsets: Tensor, gradients: Tensor) -> Callable[[], list[Tensor]]:
            order = sort_lookup(tables, indices, offsets)

            def update() -> list[Tensor]:
                if self.gradients == "just stored":
                    gradients.fill_(0.01)
                apply_gradients(tables, order, gradients, indices, offsets)
                return []

            return update

        def reset() -> None:
            for tensor, first in zip(state, start, strict=True):
                tensor.copy_(first)

        drawn = self.draw(sets_of_gradients.device)
        calls = [call(*own, gradients) for own, gradients in zip(drawn, cycle(sets_of_gradients), strict=False)]
        return Run(calls, state=state, reset=reset)


LOOKUP_STREAMS = ("rows", "indices", "offsets", "sent")
_UPDATE_STREAMS = ("old_rows", "gradients", "order", "new_rows")


def _lookup(embedding: _Embedding) -> Workload:
    return Workload(f"lookup {embedding.name}", LOOKUP_STREAMS, embedding.lookups, embedding.zipf)


def _update(embedding: _Embedding) -> Workload:
    gradients = "" if embedding.gradients == "shared" else f", gradients {embedding.gradients}"
    return Workload(f"update {embedding.name}{gradients}", _UPDATE_STREAMS, embedding.updates, embedding.zipf)


def _step(embedding: _Embedding) -> Workload:
    return Workload(f"lookup and update {embedding.name}", LOOKUP_STREAMS + _UPDATE_STREAMS, embedding.steps, embedding.zipf)


def _half(world: World) -> torch.dtype:
    """The interpreter has no product of bf16."""
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


def _gemv(m: int, n: int, k: int, sets: int) -> Workload:
    def make(world: World) -> Run:
        device, dtype = world.device, _half(world)
        simulated = SimulatedRanks(1, device, m, n)
        x = torch.randn(sets, m, k, device=device).to(dtype)
        weight = torch.randn(sets, n, k, device=device).to(dtype)

        def call(own: int) -> list[Tensor]:
            return [multiply(simulated.workspaces[0], x[own], weight[own])]

        return Run([partial(call, own) for own in range(sets)])

    return Workload(f"GEMV [{m}, {k}] x [{n}, {k}]", ("results",), make)


def _window(world: World, name: str, size: int) -> ReceiveWindow:
    memory = world.symmetric.allocate(name, size)
    return ReceiveWindow(memory, Channel(world.symmetric, name, TIMEOUT_SECONDS), offset=0, fingerprint=1)


def _gemm(rows: int, columns: int, depth: int, *, sends: bool) -> Workload:
    name = f"GEMM {rows} x {columns} x {depth}, {'sent' if sends else 'stored'}"

    def make(world: World) -> Run:
        device, dtype = world.device, _half(world)
        x, weight = (torch.randn(size, depth, device=device).to(dtype) for size in (rows, columns))
        if not sends:
            out = torch.empty(rows, columns, dtype=dtype, device=device)

            def multiply_here() -> list[Tensor]:
                gemm(x, weight, out)
                return [out]

            return Run([multiply_here])
        size = rows * columns * dtype.itemsize
        window = _window(world, name, size)

        def multiply_there() -> list[Tensor]:
            gemm_combine(x, weight, window)
            return [window.memory.local[:size]]

        return Run([multiply_there])

    return Workload(name, ("sent",) if sends else ("results",), make)


def _put(rows: int, width: int, repeats: int, *, shuffled: bool) -> Workload:
    name = f"{'gather and put' if shuffled else 'put'} {rows} x {width}, each {repeats} times"

    def make(world: World) -> Run:
        device, dtype, count = world.device, torch.float16, rows * repeats
        source = torch.randn(rows, width, device=device).to(dtype)
        generator = torch.Generator(device).manual_seed(3)
        places = torch.randperm(count, generator=generator, device=device) if shuffled else torch.arange(count, device=device)
        size, targets = count * width * dtype.itemsize, places.int()
        window = _window(world, name, size)

        def call() -> list[Tensor]:
            scatter_rows(source, targets, window, rows_per_rank=count, repeats=repeats)
            return [window.memory.local[:size]]

        return Run([call])

    return Workload(name, ("activations", "routes", "sent"), make)


def _reduce(sources: int, rows: int, width: int, dtype: torch.dtype) -> Workload:
    def make(world: World) -> Run:
        parts = torch.randn(sources, rows, width, device=world.device).to(dtype)
        output = torch.empty(rows, width, device=world.device)

        def call() -> list[Tensor]:
            add_up(parts, output)
            return [output]

        return Run([call])

    name = f"sum of {sources} parts {rows} x {width} {str(dtype).removeprefix('torch.')}"
    return Workload(name, ("received", "results"), make)


def _sum_slots(tokens: int, top_k: int, width: int) -> Workload:
    def make(world: World) -> Run:
        device, steps = world.device, KernelSteps(ACTIVATIONS["silu"])
        slots = torch.randn(tokens * top_k, width, device=device).half()
        targets, gates = torch.arange(tokens * top_k, device=device).int(), torch.rand(tokens, top_k, device=device)
        return Run([lambda: [steps.sum_slots(slots, targets, gates, tokens, top_k)]])

    return Workload(f"sum of {top_k} experts {tokens} x {width}", ("received", "results"), make)


def _route(tokens: int, top_k: int, experts: int, sets: int) -> Workload:
    name = f"routing of {tokens} tokens to {top_k} of {experts} experts"

    def make(world: World) -> Run:
        device = world.device
        window = _window(world, name, 4 * experts)
        generator = torch.Generator(device).manual_seed(4)
        scores = (torch.rand(tokens, experts, device=device, generator=generator) for _ in range(sets))
        chosen = [own.argsort(1)[:, :top_k].contiguous() for own in scores]
        rows = tokens * top_k + experts * _TILE_ROWS

        def call(ids: Tensor) -> list[Tensor]:
            return [route(ids, window, count=experts, tile_rows=_TILE_ROWS, rows_per_rank=rows).targets]

        return Run([partial(call, ids) for ids in chosen])

    return Workload(name, ("routes", "results"), make)


def _attention(rows: int, heads: int, keys: int, d_head: int, layers: int) -> Workload:
    def make(world: World) -> Run:
        device, dtype = world.device, torch.float16
        projected = torch.randn(rows, heads, 3, d_head, device=device).to(dtype)
        kept = torch.randn(layers, 2, heads, keys, d_head, device=device).to(dtype)
        cache = torch.tensor([kept.data_ptr(), keys], device=device)

        def call(layer: int) -> list[Tensor]:
            return [cached_attention(projected, cache, layer, keys)]

        return Run([partial(call, layer) for layer in range(layers)], state=[kept])

    name = f"attention of {rows} rows to {keys} keys, {heads} heads of {d_head}"
    return Workload(name, ("results",), make)


_SINGLE, _HALF = torch.float32, torch.float16


def full() -> list[Workload]:
    """Of every kernel that takes hints, the kinds in turn, so that a run that is cut short has some of each. Sets of data
    together are larger than the L2 cache, except of small tables and the gradients that the calls of an update share."""
    lookups = [
        _lookup(_Embedding(128, _SINGLE, 0.0, 4_000_000, 32768, 16)),
        # Uniform rows of 256 bytes with results of 33.6, 16.8 and 25.2 MB, and of 512 bytes with 33.6 MB: whether it is the
        # size of rows or of results that decides about evict_first.
        *(_lookup(_Embedding(128, _HALF, 0.0, 4_000_000, bags, 16)) for bags in (65536, 32768, 49152)),
        _lookup(_Embedding(128, _SINGLE, 0.0, 4_000_000, 65536, 16)),
        _lookup(_Embedding(64, _HALF, 0.0, 8_000_000, 65536, 16)),
        *(_lookup(_Embedding(128, _SINGLE, zipf, 4_000_000, 32768, 16)) for zipf in (1.05, 1.2, 0.9, 0.6, 1.3)),
        _lookup(_Embedding(64, _SINGLE, 1.2, 8_000_000, 65536, 16)),
        _lookup(_Embedding(64, _SINGLE, 0.9, 8_000_000, 65536, 16)),
        _lookup(_Embedding(128, _SINGLE, 1.05, 4_000_000, 131072, 1)),
        _lookup(_Embedding(256, _HALF, 1.05, 4_000_000, 32768, 16)),
        _lookup(_Embedding(128, _HALF, 1.05, 500_000, 8192, 16, tables=8)),
        _lookup(_Embedding(32, _SINGLE, 1.05, 8_000_000, 131072, 16)),
        _lookup(_Embedding(128, _SINGLE, 0.0, 20_000, 32768, 16)),
        _lookup(_Embedding(128, _SINGLE, 0.0, 100_000, 32768, 16)),
    ]
    updates = [
        _update(_Embedding(128, _SINGLE, 1.05, 1_000_000, 16384, 16)),
        _update(_Embedding(128, _SINGLE, 1.05, 1_000_000, 16384, 16, gradients="of each call")),
        _update(_Embedding(64, _HALF, 1.05, 4_000_000, 131072, 1)),
        _update(_Embedding(64, _HALF, 1.05, 4_000_000, 131072, 1, gradients="of each call")),
        _update(_Embedding(64, _HALF, 1.05, 4_000_000, 131072, 1, gradients="just stored")),
        *(_update(_Embedding(128, _SINGLE, zipf, 1_000_000, 16384, 16)) for zipf in (0.0, 1.2, 0.9, 0.6)),
        # Uniform rows, but all that a call touches fits in the cache.
        _update(_Embedding(64, _HALF, 0.0, 4_000_000, 16384, 16)),
        _update(_Embedding(128, _SINGLE, 0.0, 1_000_000, 131072, 1)),
    ]
    steps = [_step(_Embedding(128, _SINGLE, zipf, 1_000_000, 16384, 16)) for zipf in (1.05, 0.0)]
    products = [_gemm(8192, 8192, 1024, sends=True), _gemv(1, 4096, 8192, sets=4), _attention(16, 16, 8192, 64, layers=4)]
    rows = [
        _put(32768, 1024, 4, shuffled=True),
        _reduce(4, 16384, 512, _SINGLE),
        _route(262144, 4, 64, sets=8),
        _put(65536, 1024, 1, shuffled=False),
        _sum_slots(32768, 2, 1024),
    ]
    turns = zip_longest(lookups, updates, steps, products, rows)
    return [workload for workload in chain.from_iterable(turns) if workload is not None]


def tiny() -> list[Workload]:
    """One of each kind, for a test on the CPU."""
    return [
        _lookup(_Embedding(16, _SINGLE, 1.05, 200, 12, 3, sets=2)),
        _update(_Embedding(8, _SINGLE, 0.0, 50, 6, 2, sets=2)),
        _step(_Embedding(8, _SINGLE, 1.05, 50, 6, 2, sets=2)),
        _gemv(1, 32, 64, sets=2),
        _gemm(32, 32, 32, sends=False),
        _gemm(32, 32, 32, sends=True),
        _put(8, 16, 2, shuffled=True),
        _reduce(2, 6, 16, _SINGLE),
        _sum_slots(4, 2, 16),
        _route(8, 2, 4, sets=1),
        _attention(2, 2, 70, 16, layers=1),
    ]


WORKLOADS: dict[str, Callable[[], list[Workload]]] = {"full": full, "tiny": tiny}
