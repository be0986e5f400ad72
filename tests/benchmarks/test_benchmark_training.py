"""The benchmarks of training: what they make of runs, and runs on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import compare_settings, scaling, timeline, trainer_throughput

SMALL = [
    "data.synthetic.tables=3",
    "data.synthetic.rows=[50]",
    "data.synthetic.train_samples=4000",
    "data.synthetic.validation_samples=256",
    "data.synthetic.test_samples=256",
    "embedding.dim=8",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8,1]",
]


def one(
    batch: int | None,
    settings: str,
    rate: float,
    step_ms: float,
    peak: float | None = None,
    loss: float = 0.5,
    floor: float | None = None,
) -> dict[str, Any]:
    return {
        "batch": batch,
        "settings": settings,
        "samples_per_second": rate,
        "median_parts": {"step_ms": step_ms, **({} if floor is None else {"floor_ms": floor})},
        "peak_memory_gib": peak,
        "losses": [[10, 0.7], [20, loss]],
    }


def test_the_first_settings_are_compared_with_the_others_of_their_batch() -> None:
    runs = [
        *(one(1024, "comm=fused", rate, ms, peak) for rate, ms, peak in ((8e6, 1.0, 2.0), (4e6, 3.0, 2.5), (6e6, 2.0, 1.0))),
        one(1024, "comm=baseline", 3e6, 4.0, 3.0, loss=0.45, floor=0.75),
        one(2048, "comm=fused", 1e6, 5.0),
        one(2048, "comm=baseline", 2e6, 6.0),
    ]
    rows = compare_settings.summarize(runs)
    assert [(row["batch"], row["settings"], row["rounds"]) for row in rows] == [
        (1024, "comm=fused", 3),
        (1024, "comm=baseline", 1),
        (2048, "comm=fused", 1),
        (2048, "comm=baseline", 1),
    ]
    assert [row["samples_per_second"] for row in rows] == [6e6, 3e6, 1e6, 2e6]
    assert [row["first_over_this"] for row in rows] == [1.0, 2.0, 1.0, 0.5]
    assert [row["step_ms"] for row in rows] == [2.0, 4.0, 5.0, 6.0]
    assert [row["peak_memory_gib"] for row in rows] == [2.5, 3.0, None, None]
    assert [row["loss"] for row in rows] == [0.5, 0.45, 0.5, 0.5]
    assert [row["loss_off"] for row in rows] == pytest.approx([0, 0.1, 0, 0])
    lines = compare_settings.table(rows).splitlines()
    assert lines[1].split() == ["1024", "6.000", "2.00", "-", "2.50", "1.00", "0.50000", "0.0e+00", "comm=fused"]
    assert lines[2].split() == ["1024", "3.000", "4.00", "0.75", "3.00", "2.00", "0.45000", "1.0e-01", "comm=baseline"]
    assert lines[4].split() == ["2048", "2.000", "6.00", "-", "-", "0.50", "0.50000", "0.0e+00", "comm=baseline"]


@pytest.mark.slow
def test_settings_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    steps = ["--warmup", "2", "--steps", "4", "--interval", "2", "--rounds", "1", "--commit", "abc"]
    settings = [" ".join([comm, *SMALL]) for comm in ("comm=fused", "comm=baseline")]
    files = ["--output", str(output), "--plot", str(tmp_path / "throughput.png")]
    compare_settings.main(["--config", "configs/synthetic.yaml", "--batches", "64", *steps, *files, *settings])
    assert (tmp_path / "throughput.png").stat().st_size > 5_000
    report = json.loads(output.read_text())
    assert [(run["batch"], run["settings"]) for run in report["runs"]] == [(64, own) for own in settings]
    for run in report["runs"]:
        assert [step for step, _ in run["intervals"]] == [4, 6]
        assert run["samples_per_second"] > 0
        assert run["median_parts"]["step_ms"] > 0
    fused, baseline = report["summary"]
    assert fused["loss_off"] == 0
    assert baseline["loss_off"] < 1e-5
    assert report["commit"] == "abc"


def test_both_kinds_of_scaling_share_the_runs_on_most_gpus() -> None:
    cells = [(cell.gpus, cell.batch) for cell in scaling.cells([1, 2, 4], 4096) if cell.comm == "fused"]
    assert cells == [(4, 4096), (2, 4096), (2, 2048), (1, 4096), (1, 1024)]
    rates = {(4, 4096): 3e6, (2, 4096): 2e6, (2, 2048): 1.5e6, (1, 4096): 1e6, (1, 1024): 1e6}
    runs = [
        {"gpus": gpus, "batch": batch, "comm": comm, "samples_per_second": rate / slower, "median_parts": {"step_ms": 1.0}}
        for (gpus, batch), rate in rates.items()
        for comm, slower in (("fused", 1), ("baseline", 2))
    ]
    rows = scaling.summarize(runs, 4096)
    fused = {kind: [row for row in rows if (row["scaling"], row["comm"]) == (kind, "fused")] for kind in ("strong", "weak")}
    assert [(row["gpus"], row["batch"]) for row in fused["strong"]] == [(1, 4096), (2, 4096), (4, 4096)]
    assert [(row["gpus"], row["batch"]) for row in fused["weak"]] == [(1, 1024), (2, 2048), (4, 4096)]
    assert [row["efficiency"] for row in fused["weak"]] == [1, 0.75, 0.75]
    assert {row["over_baseline"] for row in fused["strong"]} == {2}
    assert scaling.table(rows).splitlines()[3].split() == ["strong", "fused", "4", "4096", "3.000", "1.00", "0.75", "2.00"]
    assert scaling.summarize(runs[:1], 4096)[0]["over_baseline"] is None


@pytest.mark.exhaustive
def test_scaling_is_measured_and_drawn(tmp_path: Path) -> None:
    output, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    steps = ["--gpus", "1", "2", "--warmup", "2", "--steps", "4", "--interval", "2"]
    settings = [*SMALL, "training.global_batch_size=64"]
    scaling.main(["--config", "configs/synthetic.yaml", *steps, "--output", str(output), "--plot", str(picture), *settings])
    report = json.loads(output.read_text())
    assert [(run["gpus"], run["batch"]) for run in report["runs"][::2]] == [(2, 64), (1, 64), (1, 32)]
    assert len(report["summary"]) == 8
    assert all(row["samples_per_second"] > 0 for row in report["summary"])
    assert picture.stat().st_size > 5_000


@pytest.mark.exhaustive
def test_the_trainer_takes_turns_with_a_bare_loop_of_the_same_settings(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    steps = ["--gpus", "2", "--warmup", "2", "--steps", "4", "--rounds", "1"]
    settings = [*SMALL, "training.global_batch_size=64", "telemetry.log_every_steps=2", "embedding.output_dtype=fp16"]
    trainer_throughput.main(["--config", "configs/synthetic.yaml", *steps, "--output", str(output), *settings])
    report = json.loads(output.read_text())
    assert report["samples_per_second"].keys() == {"trainer", "bare_generated", "bare_resident"}
    assert min(report["samples_per_second"].values()) > 0
    (only,) = report["rounds"]
    assert [step for step, _ in only["trainer"]["intervals"]] == [4, 6]
    assert len(only["trainer"]["checkpoints"]) == 2
    assert "table_0" in only["trainer"]["plan"]


def device_event(name: str, begin_us: float, end_us: float, stream: int = 7, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": {"stream": stream}}


def steps_of_a_trace(count: int) -> list[dict[str, Any]]:
    """Each of 10 ms: lookup 2, products 4 with AllReduce beside the last, which goes on for 1, update 1, and nothing 2."""
    events: list[dict[str, Any]] = []
    for step in range(count):
        at = 1e4 * step
        events += [
            {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 1e4},
            device_event("lookup_and_scatter_kernel", at, at + 2e3),
            device_event("nvjet_sm90_tst", at + 2e3, at + 5e3),
            device_event("nvjet_sm90_tst", at + 5e3, at + 6e3),
            device_event("ncclDevKernel_AllReduce_Sum_f32", at + 5e3, at + 7e3, stream=17),
            device_event("update_kernel", at + 7e3, at + 8e3),
            {"cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": at + 1e3, "dur": 500.0},
            {"cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 9e3},
        ]
    of_the_profiler = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 1e4 * count, "dur": 7e3}
    as_often_as_steps = [device_event("relu", 2e3 + 100 * i, 2.05e3 + 100 * i, stream=17) for i in range(count)]
    return [*events, of_the_profiler, *as_often_as_steps]


def test_a_part_is_exposed_where_nothing_else_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, output, picture = tmp_path / "trace.json.gz", tmp_path / "timeline.json", tmp_path / "timeline.png"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": steps_of_a_trace(3)}).encode()))
    timeline.main([str(trace), "--output", str(output), "--plot", str(picture)])
    report = json.loads(output.read_text())
    assert report["step_ms"] == pytest.approx(10)
    assert report["nothing_runs_ms"] == pytest.approx(2)
    assert report["waits_of_the_host_ms"] == pytest.approx([0.5] * 3)
    expected = {
        "lookup": (2, 2),
        "matrix products": (4, 3 - 0.15 / 2),
        "AllReduce": (2, 1),
        "update of tables": (1, 1),
        "elementwise": (0.15 / 2, 0),
    }
    assert report["parts"].keys() == expected.keys()
    for part, (busy, exposed) in expected.items():
        assert (report["parts"][part]["busy_ms"], report["parts"][part]["exposed_ms"]) == pytest.approx((busy, exposed))
    assert report["kernels"][0] == [0.0, 2.0, 7, "lookup_and_scatter_kernel"]
    assert len(report["kernels"]) == 5 + 3
    assert picture.stat().st_size > 5_000
    assert capsys.readouterr().out.splitlines()[1].split() == ["matrix", "products", "4.00", "2.93"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ncclDevKernel_SendRecv", "SendRecv of NCCL"),
        ("void fbgemm_gpu::permute_2D_data_kernel", "features"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel", "matrix products"),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel", "sort of indices"),
        ("split_embedding_backward_codegen_rowwise_adagrad", "update of tables"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("send_kernel", "features"),
        ("adagrad_kernel", "dense optimizer"),
        ("scatter_rows_kernel", "routing and sending of tokens"),
        ("triton_poi_fused_relu_16", "elementwise"),
    ],
)
def test_parts_of_kernels(name: str, part: str) -> None:
    assert timeline.Kernel(name, 7, 0.0, 1.0).part == part


def test_a_trace_of_one_step_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": steps_of_a_trace(1)}))
    with pytest.raises(SystemExit, match=r"1 steps, and no kernel .* telemetry.profile_steps"):
        timeline.main([str(trace)])
