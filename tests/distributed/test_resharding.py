"""Tables move to other ranks while a model trains, or paths are measured: results are TorchRec's, and no memory is kept."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from dlrm_fused.errors import UsageError
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder, paths
from tests.distributed.launch import measure_briefly, on_hosts, run_ranks
from tests.distributed.test_drop_in import (
    COLUMN_WISE,
    EVALUATE,
    MEAN,
    TABLE_WISE,
    TRACKED,
    TRAIN,
    Behind,
    Case,
    Table,
    batch_of,
    different,
    fused_params,
    group_of,
    plan_of,
    run,
    shard,
)
from tests.distributed.test_fused_sharder import WITH_KERNELS, with_kernels_too

TABLES = (
    Table(TABLE_WISE, 8, ("a", "b"), rank=1),
    Table(TABLE_WISE, 8, ("b",), rank=0),
    Table(COLUMN_WISE, 8, ("c",)),
    Table(TABLE_WISE, 8, ("d",), rank=0, pooling=MEAN),
)
CASE = Case((TABLES,), ("d", "b", "a", "c"), (3, 2), (TRAIN, TRACKED, TRAIN, EVALUATE))
# Ranks of the tables after each move.
MOVES = ((0, 0, 0, 1), (1, 0, 1, 1), (1, 0, 0, 0))


def fused_sharder(case: Case) -> FusedEmbeddingBagCollectionSharder:
    return FusedEmbeddingBagCollectionSharder(fused_params(case), **case.options)


def reshard(model: DistributedModelParallel, case: Case, ranks: tuple[int, ...]) -> Case:
    """Move the tables of the first module to other ranks; returns the case with these."""
    moved = replace(case, modules=(tuple(replace(table, rank=rank) for table, rank in zip(TABLES, ranks, strict=True)),))
    before, after = (plan_of(own, Behind(own), EmbeddingBagCollectionSharder())["collections.0"] for own in (case, moved))
    changed = {name: sharding for name, sharding in after.items() if sharding.ranks != before[name].ranks}
    model.reshard({"collections.0": (0.0, changed)}, "collections.0")
    return moved


def train_and_move(case: Case) -> list[str]:
    """Differences from TorchRec's sharder, before the tables move and after each move."""
    courses: list[dict[str, Any]] = []
    with group_of(case):
        for sharder in (fused_sharder(case), EmbeddingBagCollectionSharder(fused_params(case))):
            model, now = shard(case, sharder), case
            courses.append({f"0: {name}": value for name, value in run(case, model).items()})
            for number, ranks in enumerate(MOVES, start=1):
                now = reshard(model, now, ranks)
                courses[-1] |= {f"{number}: {name}": value for name, value in run(case, model).items()}
    return different(case, *courses)


@pytest.mark.parametrize("mode", [with_kernels_too("fused"), "auto"])
def test_after_every_move_outputs_and_tables_are_those_of_torchrecs_sharder(mode: str) -> None:
    assert run_ranks(2, train_and_move, replace(CASE, options={"mode": mode})) == [[], []]


def step(model: DistributedModelParallel, case: Case) -> None:
    loss, _ = model(batch_of(case, 0).to(case.device))
    loss.backward()


def symmetric_memory() -> int:
    """Bytes of it that this process has mapped, its own and its peers'."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dlrm_fused" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return sum(end - begin for begin, end in ranges)


def resources() -> tuple[int, int]:
    """Symmetric memory, and open files: connections to other hosts are among them."""
    if WITH_KERNELS:
        gc.collect()  # Triton's interpreter keeps what kernels were given
    return symmetric_memory(), len(list(Path("/proc/self/fd").iterdir()))


def resources_after_moves(case: Case) -> list[tuple[int, int]]:
    found = []
    with group_of(case):
        model, now = shard(case, fused_sharder(case)), case
        gc.disable()  # what is let go must not wait for it
        step(model, case)
        found.append(resources())
        for ranks in (*MOVES, *MOVES):
            now = reshard(model, now, ranks)
            step(model, case)
            found.append(resources())
    return found


@pytest.mark.parametrize("hosts", [with_kernels_too((0, 0)), (0, 1)], ids=["one host", "two hosts"])
def test_moves_let_go_of_all_that_they_replace(hosts: tuple[int, int]) -> None:
    for found in run_ranks(2, on_hosts, hosts, resources_after_moves, CASE):
        first, *after = found
        assert first[0] > 0
        assert after[len(MOVES) - 1 :: len(MOVES)] == [first] * 2  # the tables are where they were


def test_gradients_do_not_go_back_to_tables_that_have_moved() -> None:
    assert run_ranks(2, backward_after_move, CASE) == [True, True]


def backward_after_move(case: Case) -> bool:
    with group_of(case):
        model = shard(case, fused_sharder(case))
        loss, _ = model(batch_of(case, 0))
        reshard(model, case, MOVES[0])
        with pytest.raises(UsageError, match="no such EmbeddingWorkspace"):
            loss.backward()
        return True


def memory_after_choice(case: Case, fused_is_faster: bool) -> tuple[int, int]:
    """Symmetric memory of a model once its paths have been measured, and of one that is fused from the start."""
    measure_briefly()
    # Those of fused communication for each of two sharding types, and TorchRec's.
    seconds = [0.5, 0.5, 1.0] if fused_is_faster else [2.0, 2.0, 1.0]
    found = []
    with group_of(case), mock.patch.object(paths, "on_slowest_rank", return_value=seconds):
        gc.disable()
        for mode in ("auto", "fused"):
            before = symmetric_memory()
            model = shard(case, fused_sharder(replace(case, options={"mode": mode})))
            for _ in range(2 * len(seconds) + 1):
                step(model, case)
            found.append(symmetric_memory() - before)
    return found[0], found[1]


def test_auto_keeps_no_memory_of_what_it_has_measured() -> None:
    for chosen, _ in run_ranks(2, memory_after_choice, CASE, False):
        assert chosen == 0
    for chosen, fused in run_ranks(2, memory_after_choice, CASE, True):
        assert chosen == fused > 0
