"""Checks on all GPUs of the machine, in one launch of ranks, one after the other, each with a workspace of its own.

A machine with one GPU has two ranks that share it, and take turns there: their times say nothing, their results are those of
two. ``RANKS=4`` makes so many ranks share fewer GPUs. With ``TRITON_INTERPRET=1`` they run on the CPU too, without
CUDA graphs.
"""

from __future__ import annotations

import importlib
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.cuda import CudaGroup
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks
from tests.ops.checked_calls import SMALL_TILES

T = TypeVar("T")
Check = Callable[[SymmetricGroup], Any]

ON_GPU = torch.cuda.is_available()
GPUS = torch.cuda.device_count()
RANKS = int(os.environ.get("RANKS", max(2, min(4, GPUS))))
SHARE_A_GPU = ON_GPU and GPUS < RANKS
# The interpreter has no product of bf16.
HALF = torch.bfloat16 if ON_GPU else torch.float16
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device"),
]


def checked_on_all_ranks(module: str, checks: Mapping[str, Check]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """What a file of checks consists of: a fixture ``failures`` that runs them all, and a test for each.

    Args:
        module: the file's ``__name__``; ranks, which are processes of their own, find the checks there as ``CHECKS``.
    """

    @pytest.fixture(scope="module")
    def failures() -> list[dict[str, str]]:
        """By rank."""
        return run_ranks(RANKS, failures_of, module)

    @pytest.mark.parametrize("name", checks)
    def test_on_all_ranks(name: str, failures: list[dict[str, str]]) -> None:
        for rank, own in enumerate(failures):
            assert name not in own, f"rank {rank}:\n{own[name]}"

    return failures, test_on_all_ranks


def small_tiles_without_gpus() -> None:
    """Several tiles also of the small matrices with which the interpreter is patient."""
    if not ON_GPU:
        gemm_tuning.override(SMALL_TILES)


def failures_of(module: str) -> dict[str, str]:
    """On a rank: what went wrong, by check; nothing if all is well."""
    checks: Mapping[str, Check] = importlib.import_module(module).CHECKS
    small_tiles_without_gpus()
    rank = Rank.from_environment()
    failures = {}
    with process_group_of_checks(rank) as device:
        group = symmetric_group(device=device)
        for name, check in checks.items():
            began = time.monotonic()
            try:
                check(group)
            except BaseException:  # pytest's failures are no Exceptions
                failures[name] = traceback.format_exc()
            if rank.index == 0:
                print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
            dist.barrier()
        group.close()
    return failures


@contextmanager
def process_group_of_checks(rank: Rank) -> Iterator[torch.device]:
    """The default process group, of the ranks of the checks; gives this rank's device."""
    if not ON_GPU:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", rank.index % GPUS)
        torch.cuda.set_device(device)
    if ON_GPU and rank.world_size > GPUS:
        _let_ranks_share_a_gpu(rank)
    with process_group(rank, device):
        yield device


def _let_ranks_share_a_gpu(rank: Rank) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["NCCL_HOSTID"] = f"host{rank.index // GPUS}"  # NCCL refuses ranks of one host that share a GPU
    refused: Any = CudaGroup
    refused._check_gpus = refused._unreachable = lambda self, gpus: []


def delay(generator: random.Random) -> None:
    """Up to a millisecond, on the device, at random."""
    if ON_GPU:
        torch.cuda._sleep(generator.randrange(2_000_000))
    else:
        time.sleep(generator.uniform(0, 0.001))


def captured(step: Callable[[], T]) -> Callable[[], T]:
    """A CUDA graph of the step; on the CPU the step itself."""
    if not ON_GPU:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()

    def replay() -> T:
        graph.replay()
        return result

    return replay


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
