"""BinaryMetrics and LossTracker on a GPU: no waiting for the device, and the CPU's results."""

from dataclasses import asdict

import pytest
import torch

from dlrm_fused.training.metrics import BinaryMetrics, BinaryMetricValues, LossTracker

pytestmark = pytest.mark.gpu(1)


@pytest.fixture
def no_synchronization():
    torch.cuda.set_sync_debug_mode("error")
    yield lambda: torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_sync_debug_mode("default")


def measure(device: str, exact_samples: int) -> BinaryMetricValues:
    generator = torch.Generator().manual_seed(0)
    metrics = BinaryMetrics(torch.device(device), exact_samples)
    for _ in range(10):
        logits = torch.randn(1000, generator=generator)
        labels = (torch.rand(1000, generator=generator) < logits.sigmoid()).float()
        metrics.update(logits.to(device), labels.to(device), (logits > -2).to(device))
    return metrics.compute()


@pytest.mark.parametrize("exact_samples", [10_000, 1000], ids=["exact", "bounded"])
def test_results_are_those_of_the_cpu(exact_samples):
    gpu, cpu = measure("cuda", exact_samples), measure("cpu", exact_samples)
    assert (gpu.auc, gpu.auc_error, gpu.samples) == (cpu.auc, cpu.auc_error, cpu.samples)
    assert asdict(gpu) == pytest.approx(asdict(cpu), rel=1e-6)


def test_update_does_not_wait_for_the_device(no_synchronization):
    logits, ones = torch.zeros(100, device="cuda"), torch.ones(100, device="cuda")
    metrics = BinaryMetrics(torch.device("cuda"), exact_samples=1000)
    for _ in range(5):
        metrics.update(logits, ones, ones)
    no_synchronization()
    assert metrics.compute().samples == 500


def test_adding_a_loss_does_not_wait_for_the_device(no_synchronization):
    loss = torch.full((), float("inf"), device="cuda")
    tracker = LossTracker()
    for step in (7, 8):
        tracker.add(step, loss)
    no_synchronization()
    assert tracker.read().first_nonfinite_step == 7
