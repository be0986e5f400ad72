"""Dense gradients are averaged over ranks once those of embeddings have been sent, and in any case in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_fused.sharding.late_all_reduce import LateAllReduce
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks

CPU = torch.device("cpu")
RANKS = 2
STEPS = 3  # DDP makes its buckets anew after the first


class Stage(nn.Module):
    """Stands for the embedding stage; its backward pass sends gradients, and then updates tables."""

    def __init__(self, events: list[str], exchanges_gradients: bool) -> None:
        super().__init__()
        self.events = events
        self.exchanges_gradients = exchanges_gradients
        self.callbacks: list[Callable[[], None]] = []

    def on_gradients_sent(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(x.requires_grad_(), self))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Stage) -> Tensor:
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        stage: Stage = ctx.stage
        stage.events.append("exchange")
        if stage.exchanges_gradients:
            for callback in stage.callbacks:
                callback()
        stage.events.append("update")
        return gradient, None


class Recorded(LateAllReduce):
    def __init__(self, events: list[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._events = events

    def _average(self, gradients: Tensor) -> None:
        self._events.append("AllReduce")
        super()._average(gradients)


def backward_passes(exchanges_gradients: bool, uses_embeddings: bool) -> tuple[list[list[str]], list[Tensor], list[Tensor]]:
    """What happened in each step, the gradients that DDP left, and the mean over ranks of those of each."""
    events: list[str] = []
    with process_group(Rank.from_environment(), CPU):
        torch.manual_seed(0)
        # Each weight is larger than a bucket.
        dense, stage = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)), Stage(events, exchanges_gradients)
        model = DistributedDataParallel(dense, bucket_cap_mb=1, gradient_as_bucket_view=True)
        late = Recorded(events, [cast(FusedShardedEmbeddingBagCollection, stage)], model.process_group, CPU)
        model.register_comm_hook(None, lambda _, bucket: late.postpone(bucket))
        by_step = []
        for step in range(STEPS):
            events.clear()
            x = torch.randn(8, 600, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model.zero_grad()
            model(stage(x) if uses_embeddings else x).square().sum().backward()
            by_step.append(list(events))
        averaged = [cast(Tensor, parameter.grad) for parameter in dense.parameters()]
        expected = list(torch.autograd.grad(dense(x).square().sum(), list(dense.parameters())))
        for gradient in expected:
            dist.all_reduce(gradient)
    return by_step, averaged, [gradient / RANKS for gradient in expected]


@pytest.mark.parametrize(
    ("exchanges_gradients", "uses_embeddings", "order"),
    [
        pytest.param(True, True, ["exchange", "AllReduce", "update"], id="after the exchange"),
        pytest.param(False, True, ["AllReduce", "exchange", "update"], id="at once: another path takes the embeddings"),
        pytest.param(True, False, ["AllReduce"], id="at the end: nothing was exchanged"),
    ],
)
def test_dense_gradients_are_averaged(exchanges_gradients: bool, uses_embeddings: bool, order: list[str]) -> None:
    for by_step, averaged, expected in run_ranks(RANKS, backward_passes, exchanges_gradients, uses_embeddings):
        for events in by_step:
            assert list(dict.fromkeys(events)) == order
        assert by_step[-1].count("AllReduce") > 1, "one bucket only, which tells nothing of others"
        for gradient, mean in zip(averaged, expected, strict=True):
            assert torch.allclose(gradient, mean, rtol=1e-5)
