"""The operator of docs/extending.md, whose kernel docs/symmetric.md shows, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.errors import UserError
from dlrm_fused.symmetric import Channel, symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from docs.examples.normalize_all_gather import NormalizeAllGather, normalize, normalize_all_gather, reference
from tests.distributed.launch import cpu_group, run_ranks

pytestmark = pytest.mark.interpreted

ROWS, WIDTH = 3, 12


def rows_of(rank: int, epoch: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * epoch + rank))


def largest_difference() -> float:
    with cpu_group() as group:
        memory = group.allocate("rows", group.world_size * ROWS * WIDTH * 4)
        channel = Channel(group, "normalize")
        difference = 0.0
        for epoch in range(5):
            output = normalize_all_gather(rows_of(group.rank, epoch), memory, channel)
            expected = torch.cat([rows_of(other, epoch) for other in range(group.world_size)])
            expected *= torch.rsqrt(expected.square().mean(dim=1, keepdim=True) + 1e-6)
            difference = max(difference, float((output - expected).abs().max()))
        return difference


def compare_with_reference() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of both, the gradient of x, and the gradient that this rank gives for the output."""
    with cpu_group() as group:
        memory = group.allocate("rows", group.world_size * ROWS * WIDTH * 4)
        x = rows_of(group.rank, 0).requires_grad_()
        output = NormalizeAllGather.apply(x, memory, Channel(group, "normalize"))
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(group.rank))
        output.backward(gradient)
        assert x.grad is not None
        compared = output.detach().clone(), reference(group.process_group, x.detach()), x.grad, gradient
        return compared


def test_results_and_gradients_are_those_of_the_reference() -> None:
    outputs, references, gradients, given = zip(*run_ranks(3, compare_with_reference), strict=True)
    for rank, gradient in enumerate(gradients):
        torch.testing.assert_close(outputs[rank], references[rank])
        x = rows_of(rank, 0).requires_grad_()
        normalize(x).backward(torch.stack(given).sum(dim=0)[rank * ROWS : (rank + 1) * ROWS])
        torch.testing.assert_close(gradient, x.grad)


def give_one_rank_another_dtype() -> tuple[str, str]:
    """What each rank raises, and rank 1 has fp64."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        memory, channel = group.allocate("rows", group.world_size * ROWS * WIDTH * 4), Channel(group, "normalize")
        x = rows_of(rank.index, 0).to(torch.float64 if rank.index == 1 else torch.float32)
        with pytest.raises(UserError) as raised:
            normalize_all_gather(x, memory, channel)
            channel.raise_fault()
        dist.barrier()  # none is lost before the others have looked
        return raised.type.__name__, str(raised.value)


def test_a_wrong_argument_of_one_rank_is_an_error_on_all() -> None:
    of_0, of_1, of_2 = run_ranks(3, give_one_rank_another_dtype)
    assert of_1[0] == "UsageError"
    assert of_1[1].startswith("x is torch.float64 [3, 12]; needed: contiguous fp32")
    for kind, message in (of_0, of_2):
        assert kind == "CommunicationError"
        assert "rank 1 on" in message
        assert "did not take part because of an error" in message


def test_every_rank_has_the_normalized_rows_of_all() -> None:
    assert max(run_ranks(3, largest_difference)) < 1e-6
