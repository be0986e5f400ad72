"""Small workloads of the kernels that take cache hints, with which tests see that hints change no result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LocalTables, LookupLayout, RowwiseAdagrad
from dlrm_fused.ops.embedding_all_to_all.kernel import Lookup, in_memory_of_ranks, lookup_and_scatter
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, sort_lookup
from dlrm_fused.symmetric import SymmetricGroup

_TIMEOUT_SECONDS = 60.0
# Computes from the same start at each call; results may share memory with those of the next one.
Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Workload:
    """A launch, or several.

    Attributes:
        make: allocates and draws its data, on one rank.
        zipf_exponent: of the rows that are looked up; 0: uniform.
    """

    name: str
    make: Callable[[SymmetricGroup], Run]
    zipf_exponent: float = 0.0


class _Embedding:
    """A table of fp32, and two sets of bags of three indices."""

    def __init__(self, group: SymmetricGroup, rows: int, dim: int, bags: int) -> None:
        torch.manual_seed(1)
        self.bags = bags
        self.tables = LocalTables(
            weights=torch.empty(rows * dim).uniform_(-0.1, 0.1),
            offsets=(0,),
            rows=(rows,),
            dims=(dim,),
            feature_tables=(0,),
            mean=False,
            optimizer=RowwiseAdagrad(torch.full((rows,), 0.1), torch.tensor(0.01), 1e-8),
            stochastic_rounding=False,
        )
        self.indices = [torch.randint(rows, (3 * bags,)) for _ in range(2)]
        self.offsets = torch.arange(0, 3 * bags + 1, 3)
        self.gradients = torch.randn(bags, dim)
        layout = ExchangeLayout(((LookupLayout((0,), (dim,)),),), dim)
        self._workspace = EmbeddingWorkspace(group, layout, name="lookup", timeout_seconds=_TIMEOUT_SECONDS)
        self._workspace.attach_tables([self.tables])
        self._workspace.reserve([bags])
        self._output = self._workspace.outputs.receive((bags, dim), torch.float32)

    def look_up(self, indices: Tensor) -> Tensor:
        workspace, plan = self._workspace, self._workspace.plan([self.bags])
        (features,) = workspace.feature_tables(0)
        lookup = Lookup(0, features, self.tables.weights, indices, self.offsets, None)
        to = in_memory_of_ranks(workspace, plan, 0)
        place = workspace.outputs.offset_of(self._output)
        lookup_and_scatter(workspace, plan, lookup, to, receive_offset=place, first=True, last=True)
        return self._output

    def update(self, indices: Tensor, gradients: Tensor) -> None:
        apply_gradients(self.tables, sort_lookup(self.tables, indices, self.offsets), gradients, indices, self.offsets)


def _lookup(group: SymmetricGroup) -> Run:
    embedding = _Embedding(group, rows=200, dim=16, bags=12)
    return lambda: [embedding.look_up(own).clone() for own in embedding.indices]


def _update(group: SymmetricGroup) -> Run:
    return _from_the_start(_Embedding(group, rows=50, dim=8, bags=6), with_lookup=False)


def _step(group: SymmetricGroup) -> Run:
    return _from_the_start(_Embedding(group, rows=50, dim=8, bags=6), with_lookup=True)


def _from_the_start(embedding: _Embedding, with_lookup: bool) -> Run:
    """Updates, each with the gradients that are there, or with ones that come from a lookup before."""
    assert isinstance(embedding.tables.optimizer, RowwiseAdagrad)
    state = embedding.tables.weights, embedding.tables.optimizer.momentum
    start = [tensor.clone() for tensor in state]

    def run() -> list[Tensor]:
        for tensor, first in zip(state, start, strict=True):
            tensor.copy_(first)
        for own in embedding.indices:
            embedding.update(own, 0.01 * embedding.look_up(own) if with_lookup else embedding.gradients)
        return list(state)

    return run


WORKLOADS = [
    Workload("lookup", _lookup, zipf_exponent=1.05),
    Workload("update", _update),
    Workload("lookup and update", _step, zipf_exponent=1.05),
]
