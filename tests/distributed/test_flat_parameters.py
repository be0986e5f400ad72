"""Flat parameters are trained as DistributedDataParallel (DDP) and an optimizer of many parameters train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm_fused.errors import UsageError
from dlrm_fused.sharding.flat_parameters import FlatOptimizer, FlatParameters
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks

STEPS = 5
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


def model_of_rank() -> nn.Sequential:
    """Other weights on each rank; the second layer's bias is the one parameter whose size is no multiple of the alignment."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 5))


def batch_of_rank(step: int) -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def set_rate(optimizer: KeyedOptimizerWrapper, step: int) -> None:
    for group in cast(Any, optimizer.param_groups):
        group["lr"] = 0.1 / (step + 1)


def losses_weights_and_state(model: nn.Module, optimizer: KeyedOptimizerWrapper, step: Callable[[Tensor], Tensor]) -> list[Any]:
    losses = []
    for number in range(STEPS):
        set_rate(optimizer, number)
        optimizer.zero_grad()
        losses.append(step(batch_of_rank(number)))
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return [losses, weights, optimizer.state_dict()["state"]]


def trained_by_ddp(name: str) -> list[Any]:
    model = model_of_rank()
    wrapped = DistributedDataParallel(model)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), OPTIMIZERS[name])

    def step(batch: Tensor) -> Tensor:
        loss = wrapped(batch).square().sum()
        loss.backward()
        return cast(Tensor, loss.detach())

    return losses_weights_and_state(model, optimizer, step)


def trained_flat(name: str) -> list[Any]:
    model = model_of_rank()
    parameters = dict(reversed(list(model.named_parameters())))  # any order
    flat = FlatParameters(list(model.parameters()), cast(dist.ProcessGroup, dist.GroupMember.WORLD))
    optimizer = KeyedOptimizerWrapper(parameters, lambda _: FlatOptimizer(flat, OPTIMIZERS[name]))

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().sum()
        flat.store(torch.autograd.grad(loss, flat.parameters))
        flat.use()
        return cast(Tensor, loss.detach())

    return losses_weights_and_state(model, optimizer, step)


def both(name: str) -> tuple[list[Any], list[Any]]:
    with process_group(Rank.from_environment(), torch.device("cpu")):
        return trained_flat(name), trained_by_ddp(name)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_weights_and_states_are_those_of_ddp(optimizer: str, ranks: int) -> None:
    for flat, expected in run_ranks(ranks, both, optimizer):
        torch.testing.assert_close(flat, expected, rtol=0, atol=0)


def other_gradients() -> None:
    with process_group(Rank.from_environment(), torch.device("cpu")):
        first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
        flat = FlatParameters([first, second], cast(dist.ProcessGroup, dist.GroupMember.WORLD))
        optimizer = FlatOptimizer(flat, lambda values: SGD(values, lr=1.0))

        flat.store([torch.full((3,), 2.0 * dist.get_rank()), torch.ones(2, 2)])
        flat.use()
        optimizer.step()
        assert first.eq(1 - 1).all()  # the mean of 0 and 2
        assert second.eq(1 - 1).all()

        flat.store([None, torch.ones(2, 2)])  # not what the first gradient was before
        flat.use()
        optimizer.step()
        assert first.eq(0).all()
        assert second.eq(-1).all()

        flat.store([torch.zeros(3), torch.zeros(2, 2)])
        flat.use()
        with pytest.raises(RuntimeError, match="second backward pass"):
            flat.use()
        optimizer.step()

        first.grad, second.grad = torch.full((3,), 1.0 + dist.get_rank()), None
        optimizer.step()  # nobody has given gradients: those that autograd has left
        assert first.eq(-1.5).all()
        assert second.eq(-1).all()

        second.data = second.data.clone()
        with pytest.raises(UsageError, match=r"dense parameter 1 of shape \[2, 2\] has moved"):
            optimizer.step()


def test_gradients_that_are_missing_or_left_by_autograd() -> None:
    run_ranks(2, other_gradients)
