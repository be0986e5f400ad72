"""Tensor parallelism: on any number of ranks encoders of histories have the encodings and gradients that they have on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_fused.config import ModelConfig
from dlrm_fused.errors import UsageError
from dlrm_fused.models.history import HistoryEncoder
from dlrm_fused.models.hstu import Hstu
from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.models.transformer import HistoryTransformer
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace
from dlrm_fused.sharding.groups import tensor_parallel_groups
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks

SAMPLES, HISTORY, WIDTH = 12, 3, 5
SHAPE = {"token_width": WIDTH, "d_model": 24, "heads": 12, "layers": 2, "d_ff": 48, "history_length": HISTORY}
# Heads wide enough for a norm of each.
OF_HSTU = {"token_width": WIDTH, "d_model": 96, "heads": 12, "layers": 2, "history_length": HISTORY}


def transformer(product: LayerProducts | None = None, **changes: int) -> HistoryTransformer:
    torch.manual_seed(1)
    return HistoryTransformer(**(SHAPE | changes), product=product)


def hstu(product: LayerProducts | None = None) -> Hstu:
    torch.manual_seed(1)
    model = Hstu(**OF_HSTU, product=product, reads_times=True)
    with torch.no_grad():
        for block, _ in model.stages():
            for parameter in (block.by_distance, block.by_time, block.gated_norm):
                # The same on all ranks as on one: each head has other values.
                first = 0 if product is None else dist.get_rank(product.group) * len(parameter)
                parameter += 0.3 * torch.randn(SHAPE["heads"], parameter.shape[1])[first : first + len(parameter)]
    return model


ENCODERS: dict[str, Callable[..., HistoryEncoder[Any]]] = {"transformer": transformer, "hstu": hstu}


def encodings_and_gradients(model: HistoryEncoder[Any], share: int, shares: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one of so many equal shares of the samples; the loss is the mean over the share."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(SAMPLES, HISTORY + 1, WIDTH, generator=generator).chunk(shares)[share].clone().requires_grad_()
    lengths = torch.randint(0, HISTORY + 1, (SAMPLES,), generator=generator).chunk(shares)[share]
    direction = torch.randn(SAMPLES, model.d_model, generator=generator).chunk(shares)[share]
    times = torch.randint(0, 10_000, (SAMPLES, HISTORY + 1), generator=generator).cumsum(1).chunk(shares)[share]
    encoded = model(tokens.flatten(0, 1), lengths, token_times=times)
    torch.tanh(encoded * direction).sum(dim=1).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return encoded.detach(), {"tokens": tokens.grad / shares, **gradients}


def average(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
        x /= group.size()
    return x


def whole(piece: Tensor, dim: int | None, group: dist.ProcessGroup | None) -> Tensor:
    if dim is None or group is None:
        return piece
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(pieces, piece.contiguous(), group)
    return torch.cat(pieces, dim)


def on_ranks(encoder: str, tensor_parallel: int, how: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Encodings, gradients as a trainer gets them, and weights, put together from all ranks."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        groups = tensor_parallel_groups(ModelConfig(tensor_parallel=tensor_parallel, heads=SHAPE["heads"]))
        products = LayerProducts(groups.model_parallel)
        if how != "unfused":
            memory = symmetric_group(groups.model_parallel)
            rows = SAMPLES * (HISTORY + 1) // 3  # fewer than there are: several calls
            sizes = {"max_rows": rows, "max_columns": OF_HSTU["d_model"], "dtype": torch.float32}
            if how == "sums":
                products = replace(products, workspace=GemvWorkspace(memory, name="test", **sizes))
            else:
                products = replace(products, shards=ShardWorkspace(memory, name="test", **sizes))
        model = ENCODERS[encoder](products)
        encoded, gradients = encodings_and_gradients(model, rank.index, rank.world_size)
        gathered = {"encoded": whole(encoded, 0, dist.group.WORLD), "tokens": whole(gradients["tokens"], 0, dist.group.WORLD)}
        weights = {}
        for name, parameter in model.named_parameters():
            dim = getattr(parameter, "shard_dim", None)
            # What data parallelism does: cut parameters have no copies within the group.
            mean = average(gradients[name], dist.group.WORLD if dim is None else groups.data_parallel)
            gathered[name] = whole(mean, dim, groups.model_parallel)
            weights[name] = whole(parameter.detach(), dim, groups.model_parallel)
        if how != "unfused":
            memory.close()
        return gathered.pop("encoded"), gathered, weights


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "how"),
    [
        (2, 2, "unfused"),
        (3, 3, "unfused"),
        (4, 2, "unfused"),
        (2, 1, "unfused"),
        (2, 2, "sums"),
        (4, 2, "sums"),
        (2, 2, "shards"),
        (3, 3, "shards"),
        (4, 2, "shards"),
    ],
)
def test_any_number_of_ranks_gives_the_same(ranks: int, tensor_parallel: int, how: str) -> None:
    assert_the_same("transformer", ranks, tensor_parallel, how)


@pytest.mark.parametrize(("ranks", "tensor_parallel", "how"), [(3, 3, "unfused"), (4, 2, "sums"), (2, 2, "shards")])
def test_hstu_on_any_number_of_ranks_gives_the_same(ranks: int, tensor_parallel: int, how: str) -> None:
    assert_the_same("hstu", ranks, tensor_parallel, how)


def assert_the_same(encoder: str, ranks: int, tensor_parallel: int, how: str) -> None:
    model = ENCODERS[encoder]()
    encoded, gradients = encodings_and_gradients(model, 0, 1)
    for result in run_ranks(ranks, on_ranks, encoder, tensor_parallel, how):
        torch.testing.assert_close(result[0], encoded, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[1], gradients, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result[2], dict(model.state_dict()), rtol=0, atol=0)


def rows_of_column_parallel_layers() -> list[int]:
    """Of each, where the samples of rank 0 have no history, and those of rank 1 all of it."""
    rank, rows, columns = Rank.from_environment(), list[int](), LayerProducts.columns

    def note(product: LayerProducts, x: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(x))
        return columns(product, x, weight)

    LayerProducts.columns = note  # type: ignore[method-assign]
    with process_group(rank, torch.device("cpu")):
        groups = tensor_parallel_groups(ModelConfig(tensor_parallel=2, heads=SHAPE["heads"]))
        lengths = torch.full((SAMPLES // 2,), HISTORY * rank.index)
        transformer(LayerProducts(groups.model_parallel))(torch.randn(SAMPLES // 2 * (HISTORY + 1), WIDTH), lengths)
        return rows


def test_ranks_compute_the_tokens_of_all_not_as_many_as_the_rank_with_the_most() -> None:
    of_all = SAMPLES // 2 + SAMPLES // 2 * (HISTORY + 1)
    # Of the last block queries, and what follows attention, are of candidates alone.
    assert run_ranks(2, rows_of_column_parallel_layers) == [[of_all, of_all, SAMPLES, of_all, SAMPLES]] * 2


class Products(TorchDispatchMode):
    """Notes products of matrices, beside what others note."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._events.append("product")
        return func(*args, **(kwargs or {}))


def test_gradients_travel_while_those_of_the_weight_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def all_reduce(gradient: Tensor, group: object, async_op: bool) -> SimpleNamespace:
        assert gradient.is_contiguous()
        assert async_op
        events.append("begin")
        return SimpleNamespace(wait=lambda: events.append("wait"))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    x, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    group: Any = SimpleNamespace(size=lambda: 2)
    out = LayerProducts(group).columns(x, weight)
    with Products(events):
        out.sin().sum().backward()
    assert events == ["product", "begin", "product", "wait"]
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight).sin().sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


def error_of(changes: dict[str, int]) -> str:
    with process_group(Rank.from_environment(), torch.device("cpu")), pytest.raises(UsageError) as raised:
        transformer(LayerProducts(dist.group.WORLD), **changes)
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 1}, "heads=1: must be a positive multiple of the 2 tensor-parallel ranks"),
        ({"heads": 3}, "heads=3: must be a positive multiple of the 2 tensor-parallel ranks"),
        ({"d_ff": 7}, "d_ff=7: must be a positive multiple of the 2 tensor-parallel ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(changes: dict[str, int], message: str) -> None:
    assert run_ranks(2, error_of, changes) == [message, message]
