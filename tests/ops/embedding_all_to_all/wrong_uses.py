"""Wrong uses of symmetric memory, of embeddings' workspaces, and of the fused lookup and what is around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UserError
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    ExchangeLayout,
    LookupLayout,
    embedding_all_to_all,
    pooled_all_to_all,
)
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables, RowwiseAdagrad
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from tests.ops.embedding_all_to_all.world import Features, Traffic, World, run_epochs
from tests.ops.workspace_wrong_use import (
    LATE_CALL,
    Attempt,
    WorkspaceScene,
    calls_that_differ,
    dropped,
    settings,
    wrong_setting,
)
from tests.ops.wrong_use import RANKS, SECOND, TIMEOUT_SECONDS, Scene, WrongUse

BATCHES = [3, 2]
NAME = "embeddings"

# Exchanges of embeddings that are looked up elsewhere.

WIDTH = 28
LOOKUPS = (LookupLayout((0, 8), (8, 4)), LookupLayout((12, 20), (8, 4)))
ROW_WISE = LookupLayout((24,), (4,), row_wise=True)
LAYOUT = ExchangeLayout(tuple((own, ROW_WISE) for own in LOOKUPS), WIDTH)


class Pooled(WorkspaceScene):
    """``pooled_all_to_all`` over a workspace that is in use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.by_rank = [[torch.randn(sum(BATCHES), width, generator=generator) for width in (12, 4)] for _ in range(RANKS)]
        self.gradients = [torch.randn(batch, WIDTH, generator=generator) for batch in BATCHES]
        self.pooled = self.by_rank[self.rank]
        self.hold_results()

    def create(self, group: SymmetricGroup, **settings: Any) -> EmbeddingWorkspace:
        return EmbeddingWorkspace(group, **{"layout": LAYOUT, "name": NAME, "gradient_scale": 0.5, **settings})

    def tables(self) -> Sequence[Tensor]:
        return self.pooled

    def results(
        self, workspace: EmbeddingWorkspace, pooled: Sequence[Tensor] | None = None, batch_sizes: Sequence[int] = BATCHES
    ) -> list[Tensor]:
        return [pooled_all_to_all(workspace, self.pooled if pooled is None else pooled, batch_sizes).detach()]

    def call(self, **changes: Any) -> list[Tensor]:
        return self.results(self.workspace, **changes)

    def backward(self, upstream: Tensor) -> None:
        torch.ops.dlrm_fused.pooled_all_to_all_backward(upstream, BATCHES, self.workspace.handle)

    def difference(self) -> float:
        inputs = [tensor.clone().requires_grad_() for tensor in self.pooled]
        output = pooled_all_to_all(self.correct, inputs, BATCHES)
        output.backward(self.gradients[self.rank])
        begin = sum(BATCHES[: self.rank])
        (own, partial_), (other, other_partial) = self.by_rank
        expected = torch.cat([own, other, partial_ + other_partial], dim=1)[begin : begin + BATCHES[self.rank]]
        upstream = torch.cat(self.gradients) / RANKS
        pairs = [
            (output, expected),
            (inputs[0].grad, upstream[:, 12 * self.rank : 12 * self.rank + 12]),
            (inputs[1].grad, upstream[:, 24:]),
        ]
        return max(float((found - right).abs().max()) for found, right in pairs)  # type: ignore[operator]


def layout(*lookups: Sequence[LookupLayout], columns: int = WIDTH) -> Attempt:
    """Make a workspace with another layout."""
    return settings(layout=ExchangeLayout(tuple(tuple(own) for own in lookups), columns))


def pooled(change: Callable[[list[Tensor]], Sequence[Tensor]]) -> Attempt:
    """Give other tensors."""
    return lambda scene, is_wrong: scene.call(pooled=change(list(scene.pooled)) if is_wrong else None)


def in_the_first_call(attempt: Attempt) -> Attempt:
    """Before there is memory, which all ranks allocate together."""

    def first(scene: Pooled, is_wrong: bool) -> None:
        scene.workspace = scene.make()
        attempt(scene, is_wrong)

    return first


def batch_sizes(wrong: list[int]) -> Attempt:
    return lambda scene, is_wrong: scene.call(batch_sizes=wrong if is_wrong else BATCHES)


def gradient(change: Callable[[Tensor], Tensor]) -> Attempt:
    """Give the backward operator another gradient."""

    def attempt(scene: Any, is_wrong: bool) -> None:
        right = torch.ones(BATCHES[scene.rank], scene.workspace.layout.columns)
        scene.backward(change(right) if is_wrong else right)

    return attempt


def allocate(name: str, sizes: Sequence[int]) -> Attempt:
    return lambda scene, is_wrong: scene.group.allocate(name, sizes[scene.rank])


def join_as_a_stranger(scene: Scene, is_wrong: bool) -> None:
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    symmetric_group(groups[1 - scene.rank])


def go_on_after_an_error(scene: Pooled, is_wrong: bool) -> None:
    for attempt in (pooled(lambda own: own[:1]), pooled(list)):
        try:
            attempt(scene, is_wrong)
        except UserError as error:
            first = error
    assert first is not None
    scene.call()


EXCHANGES = [
    WrongUse("a process group that the rank is not in", join_as_a_stranger, "this process is not a member of it"),
    WrongUse('`device="meta"`', lambda *_: symmetric_group(device="meta"), "device=meta: symmetric memory exists for"),
    WrongUse("`allocate`: sizes that differ", allocate("buffer", (100, 200)), "rank 1: buffer with 200 bytes"),
    WrongUse("`allocate`: nothing", allocate("buffer", (0, 0)), "size=0: must be positive"),
    WrongUse(
        "batches that do not fit into memory",
        lambda scene, _: scene.workspace.reserve([10**11] * RANKS),
        "but this host has",
        error=CommunicationError,
    ),
    WrongUse("`layout`: columns of one lookup only", settings(layout=ROW_WISE), "needed: an ExchangeLayout"),
    WrongUse("`layout` for another number of ranks", layout(LOOKUPS), "layout.lookups has 1 ranks, the process group 2"),
    WrongUse(
        "`layout`: lookups that overlap",
        layout([LOOKUPS[0]], [LookupLayout((8, 20), (12, 4))], columns=24),
        "column 8 of the output is produced 2 times",
    ),
    WrongUse("`layout`: columns of nobody", layout([LOOKUPS[0]], [LOOKUPS[1]]), "column 24 of the output is produced 0 times"),
    WrongUse(
        "`layout`: a dim that is no multiple of 4",
        layout([LookupLayout((0,), (6,))], [], columns=6),
        "layout.lookups[0][0]: column=0, dim=6",
    ),
    WrongUse(
        "`layout`: columns outside the output", layout([LOOKUPS[0]], [LOOKUPS[1]], columns=20), "lie outside the output's 20"
    ),
    WrongUse("`layout`: more dims than columns", layout([LookupLayout((0,), (8, 4))], []), "1 columns but 2 dims"),
    WrongUse(
        "`layout`: row-wise lookups that differ",
        layout([LOOKUPS[0], ROW_WISE], [LOOKUPS[1]]),
        "layout.lookups[1]: its row-wise lookups differ",
    ),
    WrongUse(
        "`layout` that differs between ranks",
        layout([LOOKUPS[1], ROW_WISE], [LOOKUPS[0], ROW_WISE]),
        "layout.lookups[0][0] differs between ranks",
        SECOND,
        "layout.lookups[0][0] differs between ranks",
    ),
    WrongUse("`output_dtype=torch.int8`", settings(output_dtype=torch.int8), "output_dtype=torch.int8", SECOND, NAME),
    WrongUse("`forward_wire=torch.float64`", settings(forward_wire=torch.float64), "forward_wire=torch.float64", SECOND, NAME),
    WrongUse(
        "`backward_wire` that differs between ranks",
        settings(backward_wire=torch.bfloat16),
        "backward_wire differs between ranks",
        SECOND,
        "backward_wire differs between ranks",
    ),
    WrongUse("`gradient_scale=0`", settings(gradient_scale=0.0), "gradient_scale=0.0"),
    WrongUse("`held_outputs=0`", settings(held_outputs=0), "held_outputs=0"),
    wrong_setting("`timeout_seconds=0`", timeout_seconds=0.0),
    WrongUse("`name` that differs between ranks", settings(name="other"), "rank 1: other", SECOND, "rank 1: other"),
]

POOLED = [
    WrongUse("fp16 instead of fp32", pooled(lambda own: [own[0].half(), own[1]]), "pooled[0] is torch.float16", SECOND),
    WrongUse("too few columns", pooled(lambda own: [own[0][:, :8], own[1]]), "needed: [5, 12]", SECOND),
    WrongUse("bags of the local batch only", pooled(lambda own: [own[0], own[1][:3]]), "pooled[1] has shape [3, 4]", SECOND),
    WrongUse(
        "rows that are not contiguous",
        pooled(lambda own: [own[0].t().contiguous().t(), own[1]]),
        "contiguous rows",
        SECOND,
    ),
    WrongUse("a lookup is missing", pooled(lambda own: own[:1]), "1 pooled tensors for 2 lookups", SECOND),
    WrongUse("a lookup too many", pooled(lambda own: [*own, own[0]]), "3 pooled tensors for 2 lookups", SECOND),
    WrongUse("`batch_sizes` of three ranks", batch_sizes([3, 2, 1]), "batch_sizes=[3, 2, 1]"),
    WrongUse("a negative batch size", batch_sizes([6, -1]), "batch_sizes=[6, -1]", SECOND),
    calls_that_differ("batch sizes that differ between ranks", batch_sizes([2, 3])),
    WrongUse(
        "too few columns, in the first call",
        in_the_first_call(pooled(lambda own: [own[0][:, :8], own[1]])),
        "rank 1: embeddings: pooled[0] has shape [5, 8]",
        SECOND,
        "rank 1: embeddings: pooled[0] has shape [5, 8]",
    ),
    WrongUse(
        "batch sizes that differ between ranks, in the first call",
        in_the_first_call(batch_sizes([2, 3])),
        "batch_sizes=[3, 2] on rank 0, [2, 3] on rank 1",
        SECOND,
        "batch_sizes=[3, 2] on rank 0, [2, 3] on rank 1",
    ),
    dropped(
        "EmbeddingWorkspace in this process",
        lambda scene, handle: torch.ops.dlrm_fused.pooled_all_to_all(scene.correct.anchor, scene.pooled, BATCHES, handle),
    ),
    WrongUse("backward: a gradient in fp64", gradient(Tensor.double), "the gradient is torch.float64", SECOND),
    WrongUse("backward: a gradient of another batch", gradient(lambda g: g[:1]), "the gradient has shape [1, 28]", SECOND),
    LATE_CALL,
    WrongUse(
        "calls after one that failed",
        go_on_after_an_error,
        "did not take part because of an error",
        SECOND,
        error=CommunicationError,
    ),
    WrongUse(
        "`embedding_all_to_all` without GPU and interpreter",
        lambda scene, _: embedding_all_to_all(scene.workspace, [], [], [], BATCHES),
        "its kernels need a GPU or TRITON_INTERPRET=1",
    ),
]


# The fused lookup.


class Fused(Scene):
    """``embedding_all_to_all`` over tables that are being trained."""

    def __init__(self) -> None:
        super().__init__()
        own = [Features((7, 5), (8, 4), (0, 1), weighted=True), Features((6,), (4,), (0,), row_wise=True)]
        self.world = World([own] * RANKS, Traffic(longest_bag=2, largest_batch=2, held_outputs=8), seed=1)
        self.correct = self.world.workspace(self.group, NAME, timeout_seconds=TIMEOUT_SECONDS)
        batches = self.world.draw_batches(BATCHES)[self.rank]
        self.inputs = {
            "indices": [batch.indices for batch in batches],
            "offsets": [batch.offsets for batch in batches],
            "per_sample_weights": [batch.weights for batch in batches],
        }
        self.held = [embedding_all_to_all(self.correct, **self.inputs, batch_sizes=BATCHES).detach()]
        self.check_indices = False

    def begin(self) -> None:
        self.workspace = self.make()
        self.held[1:] = [self.call().detach()]

    def make(self, **settings: Any) -> EmbeddingWorkspace:
        workspace = self.world.workspace(self.group, NAME, timeout_seconds=TIMEOUT_SECONDS, **settings)
        workspace.attach_tables(self.correct.tables)
        return workspace

    def tables(self) -> Sequence[Tensor]:
        momenta = [tables.optimizer.momentum for tables in self.correct.tables]  # type: ignore[union-attr]
        return [*(tables.weights for tables in self.correct.tables), *momenta]

    def call(self, *, batch_sizes: Sequence[int] = BATCHES, **changes: list[Tensor]) -> Tensor:
        output = embedding_all_to_all(self.workspace, **{**self.inputs, **changes}, batch_sizes=batch_sizes)
        self.workspace.raise_fault()
        return output

    def backward(self, upstream: Tensor) -> None:
        torch.ops.dlrm_fused.embedding_all_to_all_backward(upstream, *self.inputs.values(), BATCHES, self.workspace.handle)
        self.workspace.raise_fault()

    def difference(self) -> float:
        return run_epochs(self.world, self.correct, 1).largest()


def given(key: str, change: Callable[[Tensor], Tensor]) -> Attempt:
    """Change an input of the first lookup."""

    def attempt(scene: Fused, is_wrong: bool) -> None:
        first, *others = scene.inputs[key]
        scene.call(**({key: [change(first), *others]} if is_wrong else {}))

    return attempt


def checked(key: str, change: Callable[[Tensor], Tensor]) -> Attempt:
    """The same with ``check_indices``."""

    def attempt(scene: Fused, is_wrong: bool) -> None:
        scene.workspace = scene.make(check_indices=True)
        given(key, change)(scene, is_wrong)

    return attempt


def with_first(value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([torch.full_like(tensor[:1], value), tensor[1:]])


def end_earlier(offsets: Tensor) -> Tensor:
    return torch.cat([offsets[:-1], offsets[-1:] - 1])


def one_list_shorter(key: str) -> Attempt:
    return lambda scene, is_wrong: scene.call(**({key: scene.inputs[key][:1]} if is_wrong else {}))


def weights(change: Callable[[Tensor], Tensor]) -> Attempt:
    """Give the operator other weights than those of the attached tables."""

    def attempt(scene: Fused, is_wrong: bool) -> None:
        given = [tables.weights for tables in scene.workspace.tables]
        if is_wrong:
            given[0] = change(given[0])
        torch.ops.dlrm_fused.embedding_all_to_all(
            scene.workspace.anchor, given, *scene.inputs.values(), BATCHES, scene.workspace.handle
        )
        scene.workspace.raise_fault()

    return attempt


def attach(change: Callable[[tuple[LocalTables, ...]], Sequence[LocalTables]]) -> Attempt:
    return lambda scene, _: scene.workspace.attach_tables(change(scene.workspace.tables))


def tables(**changes: Callable[[LocalTables], object]) -> Attempt:
    """Describe the tables of the first lookup otherwise."""

    def attempt(scene: Fused, _: bool) -> None:
        first = scene.workspace.tables[0]
        dataclasses.replace(first, **{key: change(first) for key, change in changes.items()})

    return attempt


def attach_nothing(scene: Fused, is_wrong: bool) -> None:
    scene.workspace = EmbeddingWorkspace(scene.group, scene.world.layout, name=NAME, timeout_seconds=TIMEOUT_SECONDS)
    if not is_wrong:
        scene.workspace.attach_tables(scene.correct.tables)
    scene.call()


def short_momentum(own: LocalTables) -> RowwiseAdagrad:
    assert isinstance(own.optimizer, RowwiseAdagrad)
    return dataclasses.replace(own.optimizer, momentum=own.optimizer.momentum[:-1])


def integer_rate(own: LocalTables) -> RowwiseAdagrad:
    assert isinstance(own.optimizer, RowwiseAdagrad)
    return dataclasses.replace(own.optimizer, learning_rate=torch.tensor(1))


TABLES = [
    WrongUse("weights in fp64", tables(weights=lambda own: own.weights.double()), "weights are torch.float64"),
    WrongUse("weights of two dimensions", tables(weights=lambda own: own.weights.view(-1, 4)), "one flat, contiguous tensor"),
    WrongUse("a table beyond the weights", tables(rows=lambda own: (7, 6)), "table 1 of 6 rows x 4 at offset 56"),
    WrongUse("a dim that is no multiple of 4", tables(dims=lambda own: (8, 3)), "table 1 has dim 3"),
    WrongUse("a feature of no table", tables(feature_tables=lambda own: (0, 2)), "feature 1 reads table 2"),
    WrongUse("a momentum for fewer rows", tables(optimizer=short_momentum), "momentum is torch.float32 [11]"),
    WrongUse("a learning rate of whole numbers", tables(optimizer=integer_rate), "learning_rate is torch.int64"),
    WrongUse("`attach_tables`: those of one lookup of two", attach(lambda own: own[:1]), "1 groups of tables for 2 lookups"),
    WrongUse("`attach_tables`: in another order", attach(lambda own: own[::-1]), "tables[0] gives features of dims (4,)"),
    WrongUse(
        "`attach_tables`: row-wise, with mean pooling",
        attach(lambda own: [own[0], dataclasses.replace(own[1], mean=True)]),
        "tables[1] is row-wise with mean pooling",
    ),
    WrongUse(
        "`attach_tables` was not called", attach_nothing, "call attach_tables first", SECOND, "rank 1: embeddings: no tables"
    ),
]

FUSED = [
    WrongUse("indices in fp32", given("indices", Tensor.float), "indices[0] is torch.float32", SECOND),
    WrongUse(
        "indices that are not contiguous",
        given("indices", lambda own: own.repeat_interleave(2)[::2]),
        "needed: 1-D, contiguous",
        SECOND,
    ),
    WrongUse("indices of two dimensions", given("indices", lambda own: own[None]), "indices[0] has shape [1, ", SECOND),
    WrongUse("offsets in int16", given("offsets", Tensor.short), "offsets[0] is torch.int16", SECOND),
    WrongUse("lengths for offsets", given("offsets", torch.diff), "offsets[0] has 10 entries", SECOND),
    WrongUse("indices of one lookup of two", one_list_shorter("indices"), "1 indices for 2 lookups", SECOND),
    WrongUse(
        "weights of samples in fp64",
        given("per_sample_weights", Tensor.double),
        "per_sample_weights[0] is torch.float64",
        SECOND,
    ),
    WrongUse(
        "weights of too few samples", given("per_sample_weights", lambda own: own[1:]), "per_sample_weights[0] has", SECOND
    ),
    WrongUse(
        "weights of samples for one lookup of two", one_list_shorter("per_sample_weights"), "1 per_sample_weights for 2", SECOND
    ),
    WrongUse("tables in another dtype than attached", weights(Tensor.half), "weights[0] is torch.float16", SECOND),
    WrongUse("tables of another size than attached", weights(lambda own: own[4:]), "weights[0] is torch.float32 [72]", SECOND),
    calls_that_differ("batch sizes that differ between ranks", batch_sizes([2, 3])),
    WrongUse("`batch_sizes` of one rank", batch_sizes([5]), "batch_sizes=[5]"),
    WrongUse(
        "`check_indices`: an index beyond its table",
        checked("indices", with_first(7)),
        "holds 7 for feature 0",
        SECOND,
        "rank 1",
    ),
    WrongUse(
        "`check_indices`: a negative index", checked("indices", with_first(-1)), "holds -1 for feature 0", SECOND, "rank 1"
    ),
    WrongUse(
        "`check_indices`: offsets that fall", checked("offsets", with_first(2)), "offsets[0] must rise from 0", SECOND, "rank 1"
    ),
    WrongUse(
        "`check_indices`: offsets that end too early",
        checked("offsets", end_earlier),
        "offsets[0] must rise from 0",
        SECOND,
        "rank 1",
    ),
    WrongUse(
        "`check_indices`: indices in fp32",
        checked("indices", Tensor.float),
        "indices[0] is torch.float32",
        SECOND,
        "indices[0]",
    ),
    WrongUse("backward: a gradient in fp64", gradient(Tensor.double), "the gradient is torch.float64", SECOND),
    WrongUse("backward: a gradient of another batch", gradient(lambda own: own[:1]), "the gradient has shape [1, 28]", SECOND),
]
