"""Inputs of 2^31 elements and more, whose places 32 bits do not hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, reference
from dlrm_fused.ops.all_gather_gemm.op import NAMES
from dlrm_fused.ops.embedding_all_to_all.reduce import add_up
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import MARKS, ON_GPU, SHARE_A_GPU, checked_on_all_ranks

pytestmark = [*MARKS, pytest.mark.skipif(not ON_GPU or SHARE_A_GPU, reason="needs the memory of two GPUs")]


def sums_of_many_partial_results(group: SymmetricGroup) -> None:
    count, rows, columns = 9, 2**18, 1024
    column = torch.arange(columns, device=group.device) % 3
    sources = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=group.device)
    assert sources.numel() >= 2**31
    for number, source in enumerate(sources):
        source.copy_(number + column)
    output = torch.empty(rows, columns, device=group.device)
    add_up(sources, output)
    assert (output == sum(range(count)) + count * column).all()


def shards_of_many_elements(group: SymmetricGroup) -> None:
    rows, depth, columns = 65_664, 32_768, 64
    assert rows * depth >= 2**31
    workspace = ShardWorkspace(
        group, name="large", max_rows=rows * group.world_size, max_columns=depth, dtype=torch.bfloat16, timeout_seconds=20.0
    )
    generator = torch.Generator(group.device).manual_seed(group.rank)
    x = torch.empty(rows, depth, dtype=torch.bfloat16, device=group.device).random_(-2, 3, generator=generator)
    weight = torch.empty(columns, depth, dtype=torch.bfloat16, device=group.device).random_(-2, 3, generator=generator)
    expected = reference(dist.group.WORLD, x, weight)
    for schedule in NAMES[Pair.all_gather_gemm]:
        found = all_gather_gemm(workspace, x, weight, schedule=schedule)
        # Sums of whole numbers are exact until they are rounded, unless a schedule rounds parts of them.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2.0, msg=lambda text: f"{schedule}: {text}")  # noqa: B023
    workspace.release()


CHECKS = {"add_up": sums_of_many_partial_results, "all_gather_gemm": shards_of_many_elements}
failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
