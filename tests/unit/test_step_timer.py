"""StepTimer on the CPU, with a clock that the test moves."""

import time

import pytest
import torch

from dlrm_fused import clocks
from dlrm_fused.training.step_timer import PARTS, StepTimer


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def pass_ms(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    return clock


@pytest.fixture
def timer(clock):
    return StepTimer(torch.device("cpu"))


def test_means_of_the_parts_and_of_the_whole_step(timer, clock):
    for backward_ms in (2, 4):
        with timer.part("data_wait"):
            clock.pass_ms(1)
        with timer.part("backward"):
            clock.pass_ms(backward_ms)
        clock.pass_ms(5)
        timer.step_done()
    assert timer.summary() == pytest.approx(
        {"step_ms": 9, "data_wait_ms": 1, "backward_ms": 3, "backward_exposed_ms": 3, "idle_ms": 6}
    )


def test_a_summary_covers_the_steps_since_the_last_one(timer, clock):
    for milliseconds in (1, 7):
        timer.start("optimizer")
        clock.pass_ms(milliseconds)
        timer.stop("optimizer")
        timer.step_done()
        expected = {"step_ms": milliseconds, "optimizer_ms": milliseconds, "optimizer_exposed_ms": milliseconds, "idle_ms": 0}
        assert timer.summary() == pytest.approx(expected)
    assert timer.summary() == {}


def test_a_part_that_runs_twice_in_a_step_adds_up(timer, clock):
    for _ in range(2):
        with timer.part("embedding"):
            clock.pass_ms(3)
    timer.step_done()
    assert timer.summary()["embedding_ms"] == pytest.approx(6)


def test_time_between_parts_belongs_to_the_step_unless_interrupted(timer, clock):
    def step() -> None:
        with timer.part("backward"):
            clock.pass_ms(1)
        timer.step_done()

    step()
    clock.pass_ms(10)
    step()
    assert timer.summary()["step_ms"] == pytest.approx((1 + 11) / 2)
    clock.pass_ms(1000)  # an evaluation
    timer.interrupt()
    step()
    assert timer.summary()["step_ms"] == pytest.approx(1)


def test_an_unfinished_step_is_not_counted(timer, clock):
    with timer.part("backward"):
        clock.pass_ms(1)
    assert timer.summary() == {}


def test_a_part_ends_when_its_code_raises(timer, clock):
    def fail() -> None:
        with timer.part("backward"):
            clock.pass_ms(2)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    timer.step_done()
    assert timer.summary()["backward_ms"] == pytest.approx(2)


def test_only_one_in_so_many_steps_is_measured(clock):
    timer = StepTimer(torch.device("cpu"), every=3)
    for milliseconds in (1, 10, 100, 3, 10, 100):
        with timer.part("backward"):
            clock.pass_ms(milliseconds)
        timer.step_done()
    assert timer.summary() == pytest.approx({"step_ms": 2, "backward_ms": 2, "backward_exposed_ms": 2, "idle_ms": 0})


def test_a_part_that_another_hides_is_exposed_for_the_rest_only(timer, clock):
    for rest in (1, 3):
        timer.start("input_dist")
        with timer.part("backward"):
            clock.pass_ms(4)
        clock.pass_ms(rest)
        timer.stop("input_dist")
        clock.pass_ms(2)
        timer.step_done()
    found = timer.summary()
    assert (found["input_dist_ms"], found["input_dist_exposed_ms"]) == pytest.approx((6, 2))
    assert (found["backward_ms"], found["backward_exposed_ms"]) == pytest.approx((4, 0))
    assert found["idle_ms"] == pytest.approx(2)


def test_what_began_before_the_step_counts_from_its_begin(timer, clock):
    """As on GPUs, where a stream beside the main one gets to a part before the step's begin."""
    timer.start("input_dist")
    clock.pass_ms(5)
    timer._step.begin = clock.perf_counter()
    clock.pass_ms(2)
    timer.stop("input_dist")
    timer.step_done()
    found = timer.summary()
    assert (found["step_ms"], found["input_dist_ms"], found["input_dist_exposed_ms"]) == pytest.approx((2, 7, 2))


def test_waiting_for_data_hides_nothing(timer, clock):
    with timer.part("data_wait"), timer.part("backward"):
        clock.pass_ms(3)
    timer.step_done()
    found = timer.summary()
    assert found["backward_exposed_ms"] == pytest.approx(3)
    assert "data_wait_exposed_ms" not in found


def test_a_step_costs_little_beside_the_events_of_the_device():
    timer = StepTimer(torch.device("cpu"))
    microseconds = []
    for _ in range(10):
        began = time.thread_time()
        for _ in range(100):
            for part in PARTS:
                with timer.part(part):
                    pass
            timer.step_done()
        microseconds.append((time.thread_time() - began) * 1e4)
    assert min(microseconds) < 100
