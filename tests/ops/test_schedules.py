"""``auto`` takes one of several schedules: from a table, by a measurement on all ranks, or by a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_fused.auto_choice import CallSeconds
from dlrm_fused.errors import CommunicationError
from dlrm_fused.ops.common import schedules
from dlrm_fused.ops.common.recorded import recorded_schedules
from dlrm_fused.ops.common.schedules import Choice, Schedules
from dlrm_fused.ops.gemv_all_reduce import op as gemv
from dlrm_fused.ops.gemv_all_reduce.workspace import Inputs

SHAPE, OTHER = (1024, 512, 256), (8, 512, 256)
NAMES = ("kernel", "chunks")


class TwoRanks:
    """A channel whose other rank measures its own times; collects the faults that are to be raised.

    Args:
        of_other: its device's times by schedule; one stands for all rounds.
    """

    def __init__(self, of_other: Mapping[str, float | list[float]], fault: Exception | None = None) -> None:
        in_rounds = {
            name: [CallSeconds(time, 0.0) for time in (times if isinstance(times, list) else 3 * [times])]
            for name, times in of_other.items()
        }

        def gather(own: Callable[[], Any]) -> list[Any]:
            assert self._are_assembled, "the wait for the other rank has no limit"
            return [own(), in_rounds]

        self.group: Any = SimpleNamespace(rank=0, process_group=None, device=torch.device("cuda"), gather=gather)
        self._fault, self._are_assembled = fault, False

    def assemble(self) -> None:
        self._are_assembled = True

    def raise_fault(self) -> None:
        if self._fault:
            raise self._fault


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU on which the run of a schedule takes the seconds that it returns: of the device, or of both."""
    state = {"capturing": False}

    def seconds(run: Callable[[], Any], device: torch.device) -> CallSeconds:
        told = run()
        return told if isinstance(told, CallSeconds) else CallSeconds(float(told), 0.0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(schedules, "call_seconds", seconds)
    return state


def make(channel: Any, may_measure: bool = True) -> Schedules:
    return Schedules("sums", channel, may_measure=may_measure, recorded={SHAPE: "chunks"})


def never(name: str) -> float:
    raise AssertionError(f"{name} was measured")


def test_a_shape_of_the_table_is_not_measured() -> None:
    assert make(TwoRanks({})).choose(SHAPE, NAMES, never, rule=lambda: "kernel") == "chunks"


def test_without_a_record_the_rule_decides_where_nothing_may_be_measured() -> None:
    choice = make(TwoRanks({}), may_measure=False)
    assert choice.choose(OTHER, NAMES, never, rule=lambda: "kernel") == "kernel"
    assert choice.known(OTHER) is None


def test_records_are_of_a_gpu_an_operator_a_number_of_ranks_and_a_dtype() -> None:
    recorded = partial(recorded_schedules, operator="gemm_all_to_all", ranks=4, dtype=torch.bfloat16)
    assert recorded("NVIDIA H200")[4096, 4096, 4096] == "chunks"
    assert recorded("another GPU") == recorded("NVIDIA H200", ranks=2) == recorded("NVIDIA H200", dtype=torch.float32) == {}
    assert recorded("NVIDIA H200", operator="gemv_all_reduce", ranks=2).keys().isdisjoint(recorded("NVIDIA H200"))


def test_the_slowest_rank_decides_and_the_choice_stays(caplog: pytest.LogCaptureFixture) -> None:
    choice = make(TwoRanks({"kernel": 0.003, "chunks": 0.002}))
    own = {"kernel": 0.001, "chunks": 0.0025}
    with caplog.at_level(logging.INFO, "dlrm_fused"):
        assert choice.choose(OTHER, NAMES, own.__getitem__, rule=lambda: "kernel") == "chunks"
        assert choice.choose(OTHER, NAMES, never, rule=lambda: "kernel") == "chunks"
    assert [record.getMessage() for record in caplog.records] == [
        "sums: schedule chunks for x [8, 256] and weight [512, 256] "
        "(in graphs chunks; measured: kernel 3.000 ms, host 0.000; chunks 2.500 ms, host 0.000)"
    ]


def test_the_hosts_time_counts_where_it_launches_and_not_in_graphs(gpu: dict[str, Any]) -> None:
    own = {"kernel": CallSeconds(0.002, 0.001), "chunks": CallSeconds(0.001, 0.003)}
    choice = make(TwoRanks({"kernel": 0.002, "chunks": 0.001}))
    assert choice.choose(OTHER, NAMES, own.__getitem__, rule=lambda: "chunks") == "kernel"
    gpu["capturing"] = True
    assert choice.choose(OTHER, NAMES, never, rule=lambda: "kernel") == "chunks"


def test_a_recorded_schedule_that_cannot_run_here_is_not_taken() -> None:
    choice = make(TwoRanks({}), may_measure=False)
    assert choice.choose(SHAPE, ["kernel", "chunks"], never, rule=lambda: "chunks") == "chunks"


def test_one_disturbed_round_decides_nothing() -> None:
    own = iter([0.001, 0.002, 0.009, 0.002, 0.001, 0.002])  # kernel and chunks take turns
    choice = make(TwoRanks({"kernel": [0.001, 0.001, 0.001], "chunks": [0.002, 0.0001, 0.002]}))
    assert choice.choose(OTHER, NAMES, lambda _: next(own), rule=lambda: "chunks") == "kernel"


def test_a_rule_is_asked_once_for_a_shape() -> None:
    asked = iter(["kernel"])
    choice = make(TwoRanks({}), may_measure=False)
    assert [choice.choose(OTHER, NAMES, never, rule=lambda: next(asked)) for _ in range(3)] == ["kernel"] * 3


def test_nothing_is_measured_while_a_graph_is_captured_but_later(gpu: dict[str, Any]) -> None:
    choice = make(TwoRanks({"kernel": 0.003, "chunks": 0.002}))
    gpu["capturing"] = True
    assert choice.choose(OTHER, NAMES, never, rule=lambda: "kernel") == "kernel"
    gpu["capturing"] = False
    assert choice.choose(OTHER, NAMES, {"kernel": 0.001, "chunks": 0.001}.__getitem__, rule=lambda: "kernel") == "chunks"


def test_what_graphs_take_has_run_with_a_layout_before_one_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout has measured this shape already: in a capture no kernel may be compiled."""
    ran: list[str] = []
    monkeypatch.setattr(gemv, "choose_schedule", lambda *_: "chunks")
    monkeypatch.setattr(gemv, "_call_of", lambda schedule, *_: lambda *_: ran.append(schedule))
    workspace: Any = SimpleNamespace(schedules=SimpleNamespace(measured_here={(66, 8, 4): Choice("chunks", "copies")}))
    inputs, call = Inputs(torch.empty(66, 4), torch.empty(8, 4), None, None, None, 1e-6), gemv.AutoCall()
    for _ in range(2):
        call(workspace, inputs)
    assert ran == ["copies", "chunks", "chunks"]


def test_a_fault_ends_the_measurement() -> None:
    measured = []

    def run(name: str) -> float:
        measured.append(name)
        return 0.001

    choice = make(TwoRanks({}, CommunicationError("rank 1 makes another call")))
    with pytest.raises(CommunicationError, match="rank 1"):
        choice.choose(OTHER, NAMES, run, rule=lambda: "kernel")
    assert measured == ["kernel"]
    assert choice.known(OTHER) is None
