"""StepTimer measures the device, and never waits for it."""

import time

import pytest
import torch

from dlrm_fused.training.step_timer import PARTS, StepTimer

pytestmark = pytest.mark.gpu(1)

# About 5 ms at the clock of a data center GPU.
CYCLES = 10_000_000


@pytest.fixture
def timer():
    return StepTimer(torch.device("cuda"))


def test_device_time_is_measured_without_waiting_for_it(timer):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        with timer.part("backward"):
            torch.cuda._sleep(10 * CYCLES)
        timer.step_done()
    assert timer.summary() == {}  # the device has not finished a step
    host_ms = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    means = timer.summary()
    assert means["backward_ms"] > 10
    assert means["step_ms"] == pytest.approx(means["backward_ms"], rel=0.1)
    assert host_ms < means["backward_ms"]


def test_parts_on_another_stream_are_measured(timer):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), timer.part("input_dist"):
        torch.cuda._sleep(CYCLES)
    with timer.part("backward"):
        torch.cuda._sleep(2 * CYCLES)
    timer.step_done()
    torch.cuda.synchronize()
    means = timer.summary()
    assert means["backward_ms"] == pytest.approx(2 * means["input_dist_ms"], rel=0.3)


def test_waiting_for_data_is_host_time(timer):
    with timer.part("data_wait"):
        time.sleep(0.02)
    timer.step_done()
    torch.cuda.synchronize()
    assert 20 <= timer.summary()["data_wait_ms"] < 40


def test_events_are_used_again_and_a_step_costs_little(timer):
    def step() -> None:
        for part in PARTS:
            with timer.part(part):
                pass
        timer.step_done()

    step()
    torch.cuda.synchronize()
    microseconds = []
    for _ in range(10):  # other tests may keep the cores busy for a while
        began = time.perf_counter()
        for _ in range(100):
            step()
        microseconds.append((time.perf_counter() - began) * 1e4)
        torch.cuda.synchronize()
        timer.summary()
    print(f"{min(microseconds):.1f} us a step")
    assert min(microseconds) < 200
    events = len(timer._clock._pool)
    for _ in range(10):
        step()
        torch.cuda.synchronize()
        timer.summary()
    assert len(timer._clock._pool) == events


def test_a_part_on_another_stream_is_exposed_for_what_the_main_stream_does_not_hide(timer):
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), timer.part("input_dist"):
        torch.cuda._sleep(3 * CYCLES)
    with timer.part("backward"):
        torch.cuda._sleep(CYCLES)
    torch.cuda.current_stream().wait_stream(stream)
    timer.step_done()
    torch.cuda.synchronize()
    means = timer.summary()
    assert means["backward_exposed_ms"] < 0.1 * means["backward_ms"]
    assert means["input_dist_exposed_ms"] == pytest.approx(means["input_dist_ms"] - means["backward_ms"], rel=0.1)
    assert means["idle_ms"] < 0.1 * means["step_ms"]


def test_what_another_stream_did_before_the_step_is_not_exposed_in_it(timer):
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(3 * CYCLES)  # the main stream gets to the step's begin when this is over
    timer.step_done()
    with torch.cuda.stream(stream), timer.part("input_dist"):
        torch.cuda._sleep(CYCLES)
    with timer.part("backward"):
        torch.cuda._sleep(CYCLES)
    timer.step_done()
    torch.cuda.synchronize()
    means = timer.summary()
    assert means["input_dist_ms"] > 0
    assert means["input_dist_exposed_ms"] == 0
    assert means["backward_exposed_ms"] == pytest.approx(means["backward_ms"], rel=0.1)
