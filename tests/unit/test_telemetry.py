"""RunWriter and Profiler: what a run leaves in its folder, also when it is killed and resumed."""

import gzip
import io
import json
import logging
import math
import os
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_fused.config import Config
from dlrm_fused.training import telemetry
from dlrm_fused.training.telemetry import Profiler, RunWriter, gpu_memory_gib, write_json


@pytest.fixture
def config():
    config = Config()
    config.training.max_steps = 40
    return config


def lines(run_dir):
    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


def tensorboard(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def train_until(run_dir, config, last, resume_step=0):
    """A run that logs every 10 steps; it is not closed, as if killed."""
    writer = RunWriter(run_dir, config, rank=0, resume_step=resume_step)
    for step in range(resume_step + 10, last + 1, 10):
        writer.train(step, {"loss": 1 / step})
    return writer


def test_a_line_for_each_record(tmp_path, config):
    writer = RunWriter(tmp_path, config, rank=0)
    writer.train(10, {"loss": 0.5, "samples_per_second": 1e6, "step_ms": 2.0})
    writer.evaluation(10, "validation", {"auc": 0.8, "samples": 100})
    assert lines(tmp_path) == [  # without close(): lines are flushed
        {"kind": "train", "step": 10, "loss": 0.5, "samples_per_second": 1e6, "step_ms": 2.0},
        {"kind": "evaluation", "step": 10, "split": "validation", "auc": 0.8, "samples": 100},
    ]
    writer.close()


def test_nonfinite_numbers_are_null(tmp_path, config):
    writer = RunWriter(tmp_path, config, rank=0)
    writer.train(10, {"loss": math.nan})
    writer.evaluation(10, "test", {"auc": math.nan, "log_loss": math.inf})
    writer.summary({"test_auc": -math.inf, "steps": 10})
    assert [line.get("loss", line.get("auc")) for line in lines(tmp_path)] == [None, None]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"test_auc": None, "steps": 10}
    writer.close()


def flush_events(killed: RunWriter) -> None:
    """Leave the events of a killed run as the only ones that begin in this second.

    TensorBoard reads files in the order of their names: by the second, then by a number of the process, 10 before 9.
    """
    killed._tensorboard.flush()
    time.sleep(1.01 - time.time() % 1.0)


def test_a_resumed_run_has_every_step_once(tmp_path, config):
    killed = train_until(tmp_path, config, last=30)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line
    flush_events(killed)
    train_until(tmp_path, config, last=40, resume_step=20).close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30, 40]
    assert [event.step for event in tensorboard(tmp_path).Scalars("train/loss")] == [10, 20, 30, 40]
    killed.close()


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path, config):
    killed = train_until(tmp_path, config, last=20)
    flush_events(killed)
    train_until(tmp_path, config, last=30).close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]
    assert [event.step for event in tensorboard(tmp_path).Scalars("train/loss")] == [10, 20, 30]
    killed.close()


def test_tensorboard_groups_scalars_and_shows_texts(tmp_path, config):
    writer = RunWriter(tmp_path, config, rank=0)
    writer.text("plan", "table  ranks\nitem   0, 1")
    writer.train(
        10,
        {
            "loss": 0.5,
            "samples_per_second": 1e6,
            "samples_per_second_per_gpu": 5e5,
            "learning_rate": 0.1,
            "step_ms": 2.0,
            "backward_ms": 1.0,
            "backward_exposed_ms": 0.5,
            "idle_ms": 0.25,
            "floor_ms": 0.125,
            "model_flops_utilization": 0.4,
            "hbm_gb_per_second": 1000.0,
            "link_gb_per_second": 100.0,
            "gpu_memory_gib": 3.0,
        },
    )
    writer.evaluation(10, "test", {"auc": 0.8})
    writer.close()
    events = tensorboard(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "throughput/samples_per_second",
        "throughput/samples_per_second_per_gpu",
        "schedule/learning_rate",
        "time_ms/step",
        "time_ms/backward",
        "exposed_ms/backward",
        "exposed_ms/nothing",
        "time_ms/floor",
        "efficiency/model_flops_utilization",
        "efficiency/hbm_gb_per_second",
        "efficiency/link_gb_per_second",
        "memory/gpu_memory_gib",
        "evaluation/test_auc",
    }
    texts = {tag: events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode() for tag in ("config", "plan")}
    assert "max_steps: 40" in texts["config"]
    assert "item   0, 1" in texts["plan"]


def test_other_ranks_write_nothing(tmp_path, config):
    writer = RunWriter(tmp_path / "run", config, rank=1)
    writer.text("plan", "")
    writer.train(10, {"loss": 0.5})
    writer.evaluation(10, "test", {"auc": 0.5})
    writer.summary({"steps": 10})
    writer.close()
    assert not (tmp_path / "run").exists()


def test_a_json_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "eval.json"
    write_json(path, {"auc": 0.5})

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"auc": 0.6})
    assert json.loads(path.read_text()) == {"auc": 0.5}


def test_without_a_terminal_progress_goes_to_the_log_now_and_then(tmp_path, config, caplog):
    caplog.set_level(logging.INFO)
    train_until(tmp_path, config, last=40).close()
    assert [message.split(":")[0] for message in caplog.messages] == ["step 10/40", "step 40/40"]


def test_on_a_terminal_progress_is_a_bar(tmp_path, config, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train_until(tmp_path, config, last=40, resume_step=20).close()
    assert "40/40" in terminal.getvalue()
    assert "loss" in terminal.getvalue()


def test_gpu_memory_is_not_reported_on_the_cpu():
    assert gpu_memory_gib(torch.device("cpu")) == {}


def test_gpu_memory_is_that_of_tensors_and_what_other_ranks_map(monkeypatch):
    """Torch's allocator does not count the latter, and ``comm=fused`` would seem to need less than it does."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
    monkeypatch.setattr(telemetry, "mapped_bytes", lambda _: 1 << 29)
    assert gpu_memory_gib(torch.device("cuda", 0)) == {"gpu_memory_gib": 3.5}


def profiled_steps(run_dir, steps, first_step, last_step):
    """The steps in the trace, from markers that each step leaves there."""
    profiler = Profiler(run_dir, steps, rank=3, device=torch.device("cpu"))
    for step in range(first_step, last_step + 1):
        profiler.before_step(step)
        with torch.profiler.record_function(f"marker {step}"):
            torch.ones(2).sum()
    profiler.close()
    traces = list(run_dir.glob("profile/*_rank3.json.gz"))
    if not traces:
        return []
    (trace,) = traces
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    return sorted(int(name.split()[1]) for name in names if name.startswith("marker"))


@pytest.mark.parametrize(
    ("steps", "first_step", "last_step", "expected"),
    [
        ([3, 4], 1, 6, [3, 4]),
        ([1, 1], 1, 3, [1]),
        ([5, 9], 1, 6, [5, 6]),
        ([3, 5], 4, 9, [4, 5]),
        ([3, 5], 6, 9, []),
        ([], 1, 3, []),
    ],
    ids=["with warm-up", "from the first step", "run ends before", "resumed between", "resumed after", "none"],
)
def test_the_trace_holds_the_chosen_steps(tmp_path, steps, first_step, last_step, expected):
    assert profiled_steps(tmp_path, steps, first_step, last_step) == expected
