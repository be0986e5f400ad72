"""Loading for a GPU: pinned memory, and samples generated on the device, equal to the CPU's, fast, without waiting for it."""

from pathlib import Path

import pytest
import torch

from dlrm_fused.config import Config, DataSource, Split, SyntheticConfig
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.loader import EvaluationLoader, TrainLoader
from dlrm_fused.datasets.synthetic import SyntheticDataset
from tests.unit.prepared_sets import write_prepared_set

pytestmark = pytest.mark.gpu(1)

CPU = torch.device("cpu")
# Ids of each feature in MLPerf's DLRM-DCNv2.
MLPERF_POOLING = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("history_length", [0, 50])
@pytest.mark.parametrize("jagged", [False, True])
def test_generated_samples_equal_those_of_the_cpu(gpu: torch.device, jagged: bool, history_length: int) -> None:
    settings = SyntheticConfig(rows=[4_000_000], pooling=MLPERF_POOLING, jagged=jagged, history_length=history_length)
    rows = torch.arange(4096)
    expected = SyntheticDataset(settings, 1, CPU).read(Split.train, rows)
    samples = SyntheticDataset(settings, 1, gpu).read(Split.train, rows.to(gpu))
    assert samples.sparse.values().device == gpu
    assert torch.equal(samples.dense.cpu(), expected.dense)
    assert torch.equal(samples.labels.cpu(), expected.labels)
    assert torch.equal(samples.sparse.values().cpu(), expected.sparse.values())
    assert torch.equal(samples.sparse.lengths().cpu(), expected.sparse.lengths())
    if samples.tokens is not None and expected.tokens is not None:
        assert samples.tokens.values().device == gpu
        assert torch.equal(samples.tokens.values().cpu(), expected.tokens.values())
        assert torch.equal(samples.tokens.lengths().cpu(), expected.tokens.lengths())
        assert torch.equal(samples.token_times.cpu(), expected.token_times)
    assert (samples.tokens is None) == (expected.tokens is None) == (history_length == 0)


def test_batches_at_once_equal_those_of_the_cpu(gpu: torch.device) -> None:
    settings = SyntheticConfig(rows=[4_000_000], tables=3)
    rows = torch.arange(2000).view(4, 500)
    expected = SyntheticDataset(settings, 1, CPU).read_batches(Split.train, rows)
    on_gpu = SyntheticDataset(settings, 1, gpu).read_batches(Split.train, rows.to(gpu))
    for samples, of_cpu in zip(on_gpu, expected, strict=True):
        assert torch.equal(samples.dense.cpu(), of_cpu.dense)
        assert torch.equal(samples.labels.cpu(), of_cpu.labels)
        assert torch.equal(samples.sparse.values().cpu(), of_cpu.sparse.values())
        assert torch.equal(samples.sparse.lengths().cpu(), of_cpu.sparse.lengths())
        assert torch.equal(samples.sparse.offsets().cpu(), of_cpu.sparse.offsets())


def test_the_best_attainable_auc_is_that_of_the_cpu(gpu: torch.device) -> None:
    settings = SyntheticConfig(test_samples=50_000)
    on_gpu = SyntheticDataset(settings, 1, gpu).best_attainable_auc()
    on_cpu = SyntheticDataset(settings, 1, CPU).best_attainable_auc()
    assert on_gpu.auc == pytest.approx(on_cpu.auc, abs=1e-9)
    assert on_gpu.error == pytest.approx(on_cpu.error, rel=1e-6)


@pytest.mark.parametrize("history_length", [0, 50])
def test_generating_does_not_wait_for_the_device(gpu: torch.device, history_length: int) -> None:
    config = Config()
    config.data.source = DataSource.synthetic
    config.data.synthetic.history_length = history_length
    loader = TrainLoader(open_dataset(config, gpu), config, 0, 1, gpu)
    next(loader)  # sets up what belongs to this batch size
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = next(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.sparse.values().device == gpu


def test_generating_is_fast(gpu: torch.device) -> None:
    """16,384 samples with 214 ids each in well under 1 ms of the GPU."""
    dataset = SyntheticDataset(SyntheticConfig(rows=[4_000_000], pooling=MLPERF_POOLING), 1, gpu)
    rows = torch.arange(16_384, device=gpu)
    milliseconds = []
    dataset.read(Split.train, rows)  # compiles
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        dataset.read(Split.train, rows)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    median = sorted(milliseconds)[10]
    print(f"16,384 samples with 214 ids each: {median:.3f} ms")
    assert median < 1.0


def test_batches_read_from_files_come_in_pinned_memory(gpu: torch.device, tmp_path: Path) -> None:
    write_prepared_set(tmp_path / "set")
    config = Config()
    config.data.path = str(tmp_path / "set")
    config.training.global_batch_size = 20
    dataset = open_dataset(config, gpu)
    with TrainLoader(dataset, config, 0, 1, gpu) as pinned, TrainLoader(dataset, config, 0, 1, CPU) as plain:
        batch, expected = next(pinned), next(plain)
    tensors = [batch.dense, batch.sparse.values(), batch.sparse.lengths(), batch.labels, batch.weights]
    assert all(tensor.is_pinned() for tensor in tensors)
    moved = batch.to(gpu, non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    assert torch.equal(moved.dense.cpu(), expected.dense)
    assert torch.equal(moved.sparse.values().cpu(), expected.sparse.values())
    assert moved.global_size == 20
    assert sum(int(b.weights.sum()) for b in EvaluationLoader(dataset, Split.test, 4, 0, 1, gpu, config)) == 21
