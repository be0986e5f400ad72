"""Which schedule and which tiles GEMM + All-to-All takes."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_fused.auto_choice import CallSeconds
from dlrm_fused.errors import CommunicationError
from dlrm_fused.ops.common import schedules
from dlrm_fused.ops.common.gpus import GPUS, H100
from dlrm_fused.ops.common.recorded import MEASURED_ON, recorded_schedules, recorded_tiles
from dlrm_fused.ops.common.schedules import Choice, Schedules
from dlrm_fused.ops.gemm_all_to_all import gemm_all_to_all, tuning
from dlrm_fused.ops.gemm_all_to_all.schedule import by_rule, schedule_of
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks
from tests.ops.gemm_all_to_all.cases import Case, call, draw, expected, new_workspace

EQUAL, WIDE = Case(72, 40, rows=24), Case(80, 40, rows=12)


def workspace_on(gpu: str, ranks: int = 4, *, hosts_are_many: bool = False) -> Any:
    hosts = SimpleNamespace(are_many=hosts_are_many)
    group = SimpleNamespace(device=torch.device("cuda"), process_group=None, hosts=hosts)
    channel: Any = SimpleNamespace(group=group)
    recorded = recorded_schedules(gpu, "gemm_all_to_all", ranks, torch.bfloat16)
    known = Schedules("products", channel, may_measure=True, recorded=recorded)
    return SimpleNamespace(world_size=ranks, schedules=known, dtype=torch.bfloat16, gpu=H100, group=group)


def test_what_was_measured_here_precedes_the_table_and_the_table_the_rule() -> None:
    shape = (16384, 4096, 1024)
    workspace = workspace_on(MEASURED_ON)
    assert schedule_of(workspace, *shape) == "kernel"
    assert schedule_of(workspace, 4096, 4096, 4096) == "chunks"
    workspace.schedules.measured_here[shape] = Choice("chunks_2", "chunks_2")
    assert schedule_of(workspace, *shape) == "chunks_2"


def test_the_table_holds_for_its_gpu_and_its_ranks() -> None:
    """The rule says otherwise of this shape."""
    shape = (32768, 4096, 4096)
    assert schedule_of(workspace_on(MEASURED_ON), *shape) == "kernel"
    assert schedule_of(workspace_on(MEASURED_ON, ranks=2), *shape) == "chunks"
    assert schedule_of(workspace_on("another GPU"), *shape) == "chunks"


def test_the_table_does_not_hold_between_hosts() -> None:
    assert schedule_of(workspace_on(MEASURED_ON, hosts_are_many=True), 32768, 4096, 4096) == "chunks"


def test_the_rule_knows_slow_links() -> None:
    """There more of a call has to be hidden behind its product, which one kernel makes where there is NVLink."""
    shape = (8192, 1024, 2048)
    assert by_rule(4, shape, 2, H100) == by_rule(4, shape, 2, GPUS["NVIDIA GH200 480GB"]) == "kernel"
    assert by_rule(4, shape, 2, GPUS["NVIDIA L40S"]) == "chunks_2"


class Clock:
    """Milliseconds of each schedule on a rank, in the order in which they are asked for; the calls are made."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds, self.asked = milliseconds, 0

    def __call__(self, run: Any, device: torch.device) -> CallSeconds:
        run()
        self.asked += 1
        return CallSeconds(self.milliseconds[(self.asked - 1) % len(self.milliseconds)] / 1e3, 0.0)


def calls_by_auto(clocks: list[Clock], is_capturing: bool) -> tuple[dict[Any, str], int, list[str], float]:
    """Return what was chosen, how often the clock was asked, the log, and the largest error of the results."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("dlrm_fused")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    rank = Rank.from_environment()
    clock = schedules.call_seconds = clocks[rank.index]  # type: ignore[assignment]
    Schedules._can_measure = lambda self: not is_capturing  # type: ignore[method-assign]
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = new_workspace(group)
        errors = []
        for number, case in enumerate([EQUAL, WIDE, EQUAL, EQUAL]):
            inputs = draw(case, rank.world_size, number, torch.float32)
            result = call(workspace, case, inputs[rank.index])
            errors.append((result.double() - expected(case, inputs, rank.index)).abs().max().item())
        group.close()
    return (
        workspace.schedules.measured_here,
        clock.asked,
        [message for message in messages if "schedule" in message],
        max(errors),
    )


@pytest.mark.parametrize(
    ("clocks", "fastest"),
    [
        ([Clock(1, 3, 2), Clock(5, 3, 2)], "chunks_2"),
        ([Clock(1, 3, 2), Clock(1, 3, 2)], "kernel"),
        ([Clock(4, 3, 5), Clock(2, 1, 0.5)], "chunks"),
    ],
)
def test_auto_takes_what_is_fastest_on_the_slowest_rank(clocks: list[Clock], fastest: str) -> None:
    first, second = run_ranks(2, calls_by_auto, clocks, False)
    for chosen, asked, _, error in (first, second):
        assert chosen == dict.fromkeys([(24, 72, 40), (12, 80, 40)], Choice(fastest, fastest))
        assert asked == 2 * 3 * schedules._ROUNDS, "each shape is measured once"
        assert error < 1e-4
    assert len(first[2]) == 2
    assert f"schedule {fastest} for x [24, 40] and weight [72, 40] (in graphs {fastest}; measured: kernel " in first[2][0]
    assert not second[2]


def test_auto_does_not_measure_in_a_capture() -> None:
    for chosen, asked, messages, error in run_ranks(2, calls_by_auto, [Clock(2, 1, 9, 1)] * 2, True):
        assert chosen == {}
        assert asked == 0
        assert error < 1e-4
        assert all("schedule kernel for" in message and "by rule" in message for message in messages)


def shapes_that_differ() -> None:
    rank = Rank.from_environment()
    Schedules._can_measure = lambda self: True  # type: ignore[method-assign]
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = new_workspace(group)
        with pytest.raises(CommunicationError, match="differ in shapes or settings"):
            gemm_all_to_all(workspace, torch.ones(24, 40), torch.ones(72 + 4 * rank.index, 40))


def test_ranks_that_make_other_calls_are_noticed_while_auto_measures() -> None:
    run_ranks(2, shapes_that_differ)


def test_tiles_of_products() -> None:
    wide, narrow = (128, 256), (128, 128)
    assert tuning.tiles_of_product(1024, 1024, 4096, 2, H100) == tuning.Tiles(*recorded_tiles()[1024, 1024, 4096, 2])
    for shape, sizes, splits in (
        ((4096, 2048, 512, 2), wide, 1),
        ((2048, 1024, 4096, 2), narrow, 1),
        ((1024, 2048, 512, 4), narrow, 1),
        ((512, 1024, 16384, 2), (64, 128), 2),
        ((256, 1024, 8192, 2), (64, 64), 2),
        ((256, 256, 8200, 2), (64, 64), 4),
        ((16, 16, 64, 2), (64, 64), 1),
    ):
        tiles = tuning.tiles_of_product(*shape, H100)
        assert (tiles.rows, tiles.columns) == sizes, shape
        assert tiles.splits == splits, shape


KIB = 1 << 10


@pytest.mark.parametrize("kib", [64, 100, 164, 228], ids=["gfx942", "sm_86, sm_89, sm_120", "sm_80", "sm_90, sm_100"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_fit_in_shared_memory(kib: int, element_size: int) -> None:
    """On an H100 or H200 all tiles are as they were chosen."""
    chosen = [tuning.tiles_of_groups(columns, element_size, rows) for columns in (64, 4096) for rows in (16, 64, 128)]
    chosen += [tuning.tiles_of_product(2**k, 4096, 2**k, element_size, H100) for k in range(4, 16)]
    chosen += [
        *(tuning.weight_gradient_tiles(element_size, expected_rows) for expected_rows in (0, 4096)),
        *(tuning.Tiles(*fields) for shape, fields in recorded_tiles().items() if shape[3] == element_size),
    ]
    for tiles in chosen:
        fitted = tuning.fitted(tiles, element_size, kib * KIB)
        assert fitted.programs * (tuning.needed_memory(fitted, element_size) + KIB) <= kib * KIB, (tiles, fitted)
        assert fitted.rows == tiles.rows
        assert kib < 228 or fitted == tiles


def test_short_shared_memory_takes_stages_then_steps_then_columns() -> None:
    wide = tuning.Tiles(rows=128, columns=256, depth=64, band=8, warps=8, stages=4, programs=1)
    assert tuning.fitted(wide, 2, 200 * KIB) == replace(wide, stages=3)
    assert tuning.fitted(wide, 2, 164 * KIB) == replace(wide, depth=32)
    assert tuning.fitted(wide, 2, 100 * KIB) == replace(wide, depth=32, columns=128)
    two = replace(wide, columns=128, stages=3, programs=2)
    assert tuning.fitted(two, 2, 164 * KIB) == replace(two, programs=1)
