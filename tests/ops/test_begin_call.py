"""Every operator begins a call, forward and backward, before anything of it: so its calls keep their order on any streams. A
workspace that is released lets go of its memory, and has no more calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.common.workspace import Workspace
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout, pooled_all_to_all
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_all_to_all
from dlrm_fused.symmetric import BlockPool, Channel, SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.call_order import CallOrder

ROWS, WIDTH = 4, 16
FP32 = torch.float32
Forward = Callable[[Tensor], Tensor]
Made = tuple[Workspace, Forward]


@pytest.fixture
def group() -> Iterator[SymmetricGroup]:
    group = symmetric_group(device="cpu")
    yield group
    group.close()


def pooled(group: SymmetricGroup) -> Made:
    layout = ExchangeLayout(((LookupLayout((0,), (WIDTH,)),),), WIDTH)
    workspace = EmbeddingWorkspace(group, layout, name="pooled")
    return workspace, lambda x: pooled_all_to_all(workspace, [x], [ROWS])


def sequences(group: SymmetricGroup) -> Made:
    workspace = SequenceWorkspace(group, WIDTH, name="sequences")
    offsets = torch.arange(ROWS + 1)
    return workspace, lambda x: sequence_all_to_all(workspace, x, offsets, [ROWS], [[ROWS]])


def gemm(group: SymmetricGroup) -> Made:
    workspace = GemmWorkspace(group, name="gemm", max_rows=ROWS, max_columns=WIDTH, dtype=FP32)
    return workspace, lambda x: gemm_all_to_all(workspace, x, torch.eye(WIDTH))


def gemv(group: SymmetricGroup) -> Made:
    workspace = GemvWorkspace(group, name="gemv", max_rows=100, max_columns=WIDTH, dtype=FP32)
    return workspace, lambda x: gemv_all_reduce(workspace, x, torch.eye(WIDTH))[0]


def gather(group: SymmetricGroup) -> Made:
    workspace = ShardWorkspace(group, name="gather", max_rows=ROWS, max_columns=WIDTH, dtype=FP32)
    return workspace, lambda x: all_gather_gemm(workspace, x, torch.eye(WIDTH))


def scatter(group: SymmetricGroup) -> Made:
    workspace = ShardWorkspace(group, name="scatter", max_rows=ROWS, max_columns=WIDTH, dtype=FP32)
    return workspace, lambda x: gemm_reduce_scatter(workspace, x, torch.eye(WIDTH))


def experts(group: SymmetricGroup) -> Made:
    sizes = {"experts": 2, "top_k": 1, "max_tokens": ROWS, "width": WIDTH}
    workspace = ExpertWorkspace(group, name="experts", dtype=FP32, **sizes)
    weights = [torch.ones(2, WIDTH, WIDTH) for _ in range(2)]
    chosen, gates = torch.zeros(ROWS, 1, dtype=torch.int64), torch.ones(ROWS, 1)
    return workspace, lambda x: expert_layer(workspace, x, chosen, gates, *weights)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events in their order: ``begin`` of calls, and uses of memory that ranks share."""
    happened: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def method(*arguments: object, **named: object) -> object:
            happened.append(event)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, method)

    noted(CallOrder, "follow", "begin")
    noted(BlockPool, "receive", "memory")
    noted(Channel, "announce", "epoch")
    return happened


# The backward pass of the sum is local.
OPERATORS = [(pooled, True), (sequences, True), (gemm, True), (gemv, False), (gather, True), (scatter, True), (experts, True)]


@pytest.mark.parametrize(("make", "goes_back"), OPERATORS, ids=lambda value: getattr(value, "__name__", None))
def test_an_operator_begins_a_call_before_all_else(
    group: SymmetricGroup, events: list[str], make: Callable[[SymmetricGroup], Made], goes_back: bool
) -> None:
    _, forward = make(group)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward(x.detach())  # allocates what it allocates at the first call
    events.clear()
    output = forward(x)
    _expect_a_call(events)
    output.sum().backward()
    if goes_back:
        _expect_a_call(events)


def _expect_a_call(events: list[str]) -> None:
    assert events[:1] == ["begin"], events
    events.clear()


@pytest.mark.also_interpreted
@pytest.mark.parametrize(("make", "goes_back"), OPERATORS, ids=lambda value: getattr(value, "__name__", None))
def test_a_released_workspace_has_no_memory_and_no_calls(
    group: SymmetricGroup, make: Callable[[SymmetricGroup], Made], goes_back: bool
) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    before = list(group._memories)
    workspace, forward = make(group)
    output = forward(x)
    kept = output.detach().clone()
    workspace.release()
    workspace.release()
    assert group._memories == before
    _, forward_of_another = make(group)
    assert forward_of_another(2 * x).shape == kept.shape
    assert output.equal(kept)
    with pytest.raises(UsageError, match=r"released; make another one|no such \w+Workspace in this process; keep it alive"):
        forward(x.detach())
    if goes_back:
        with pytest.raises(UsageError, match=r"released; make another one|no such \w+Workspace in this process; keep it alive"):
            output.sum().backward()


def test_all_channels_of_a_workspace_share_an_order(group: SymmetricGroup) -> None:
    orders: Sequence[CallOrder] = [
        channel._order for channel in ShardWorkspace(group, name="two", max_rows=1, max_columns=WIDTH, dtype=FP32).channels
    ]
    assert len(orders) == 2
    assert len(set(orders)) == 1
