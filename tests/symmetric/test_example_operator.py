"""The operator of docs/extending.md as the package has them: on CPUs with and without kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import UserError
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from docs.examples.normalize_all_gather import normalize, reference
from docs.examples.normalize_operator import NormalizeWorkspace, normalize_all_gather
from tests.distributed.launch import cpu_group, run_ranks

pytestmark = pytest.mark.also_interpreted

MAX_ROWS, WIDTH = 3, 12


def rows_of(rank: int, call: int = 0, rows: int = MAX_ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * call + rank))


def with_workspace(work: Callable[[NormalizeWorkspace], object]) -> object:
    with cpu_group() as group:
        workspace = NormalizeWorkspace(group, name="rows", max_rows=MAX_ROWS, width=WIDTH)
        done = work(workspace)
        return done


def hold_all(workspace: NormalizeWorkspace) -> float:
    """The largest difference of results that are all held, more than the pool has blocks for, from the reference."""
    held = [
        (normalize_all_gather(workspace, x), reference(workspace.group.process_group, x))
        for x in (rows_of(workspace.rank, call, rows=1 + call % MAX_ROWS) for call in range(6))
    ]
    return max(float((result - expected).abs().max()) for result, expected in held)


def test_results_are_those_of_the_reference_however_many_are_held() -> None:
    assert max(run_ranks(3, with_workspace, hold_all)) < 1e-6


def gradient_of_x(workspace: NormalizeWorkspace) -> tuple[Tensor, Tensor]:
    x = rows_of(workspace.rank).requires_grad_()
    given = torch.randn(workspace.world_size * MAX_ROWS, WIDTH, generator=torch.Generator().manual_seed(workspace.rank))
    normalize_all_gather(workspace, x).backward(given)
    assert x.grad is not None
    return x.grad, given


def test_the_gradient_is_a_sum_over_ranks() -> None:
    gradients, given = zip(*run_ranks(3, with_workspace, gradient_of_x), strict=True)
    for rank, gradient in enumerate(gradients):
        x = rows_of(rank).requires_grad_()
        normalize(x).backward(sum(given)[rank * MAX_ROWS : (rank + 1) * MAX_ROWS])
        torch.testing.assert_close(gradient, x.grad)


def check_operator(workspace: NormalizeWorkspace) -> None:
    operator = torch.ops.dlrm_fused_example.normalize_all_gather.default
    torch.library.opcheck(operator, (rows_of(workspace.rank).requires_grad_(), workspace.handle))


def test_autograd_and_the_compiler_know_it() -> None:
    run_ranks(2, with_workspace, check_operator)


def give_too_many_rows_on_rank_1(workspace: NormalizeWorkspace) -> tuple[str, str]:
    with pytest.raises(UserError) as raised:
        normalize_all_gather(workspace, rows_of(workspace.rank, rows=MAX_ROWS + (workspace.rank == 1)))
        workspace.raise_fault()
    dist.barrier()  # none is lost before the others have looked
    return raised.type.__name__, str(raised.value)


def test_a_wrong_argument_of_one_rank_is_an_error_on_all() -> None:
    (of_0, message), of_1 = run_ranks(2, with_workspace, give_too_many_rows_on_rank_1)
    assert of_1 == ("UsageError", "rows: x has 4 rows; allowed: 1 to max_rows=3")
    assert of_0 == "CommunicationError"
    assert "rank 1 on" in message
    assert "did not take part because of an error" in message


def make_narrow() -> str:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")), pytest.raises(UserError) as raised:
        NormalizeWorkspace(symmetric_group(), name="rows", max_rows=1, width=3)
    return str(raised.value)


def test_rows_that_are_not_aligned_are_refused() -> None:
    assert run_ranks(2, make_narrow) == ["rows: width=3; needed: a multiple of 4"] * 2
