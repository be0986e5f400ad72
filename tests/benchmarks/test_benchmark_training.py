"""The benchmarks of training: what they make of runs, and runs on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import compare, timeline
from benchmarks.training.runs import Mark, sent_per_step
from tests.distributed.network import needs_hosts

SMALL = [
    "data.synthetic.tables=3",
    "data.synthetic.rows=[50]",
    "data.synthetic.train_samples=4000",
    "data.synthetic.validation_samples=256",
    "data.synthetic.test_samples=256",
    "embedding.dim=8",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8,1]",
    "runtime.device=cpu",
]
SHORT = ["--rounds", "1", "--warmup", "2", "--steps", "6", "--interval", "2"]
CALIBRATION = "benchmarks/results/calibration_cpu.json"
CONTESTANTS = ["comm=fused", "comm=baseline", "ranks=1"]


def one(
    batch: int | None, settings: str, rate: float, step_ms: float, peak: float | None = None, loss: float = 0.5, **more: Any
) -> dict[str, Any]:
    """The files that a run leaves, on this machine unless ``more`` says otherwise."""
    run = {"batch": batch, "gbits_per_second": None, "settings": settings, "samples_per_second": rate, "step_ms": step_ms}
    return {**run, "median_parts": {}, "peak_memory_gib": peak, "losses": [[10, 0.7], [20, loss]], "test_auc": 0.75, **more}


def test_the_first_settings_are_compared_with_the_others_of_their_batch() -> None:
    runs = [
        *(one(1024, "comm=fused", rate, ms, peak) for rate, ms, peak in ((8e6, 1.0, 2.0), (4e6, 3.0, 2.5), (6e6, 2.0, 1.0))),
        one(1024, "comm=baseline", 3e6, 4.0, 3.0, loss=0.45, median_parts={"floor_ms": 0.75}),
        one(2048, "comm=fused", 1e6, 5.0),
        one(2048, "comm=baseline", 2e6, 6.0),
    ]
    rows = compare.summarize(runs)
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
    assert rows[1]["loss_off_at_step"] == 20
    lines = [line.split() for line in compare.table(rows).splitlines()]
    assert lines[1] == ["1024", "6.0000", "2.00", "-", "2.50", "1.00", "0.50000", "0.0e+00", "0.75000", "comm=fused"]
    assert lines[2] == ["1024", "3.0000", "4.00", "0.75", "3.00", "2.00", "0.45000", "1.0e-01", "0.75000", "comm=baseline"]
    assert lines[4] == ["2048", "2.0000", "6.00", "-", "-", "0.50", "0.50000", "0.0e+00", "0.75000", "comm=baseline"]


def test_between_hosts_all_bytes_count_and_the_link_of_the_host_that_sends_most() -> None:
    fused = [one(None, "comm=fused", 1e6, 1.0, gbits_per_second=0.1, sent_bytes_per_step=[50_000, 30_000]) for _ in range(3)]
    baseline = [one(None, "comm=baseline", 1e6, 1.0, gbits_per_second=0.1, sent_bytes_per_step=[100_000, 60_000])]
    rows = compare.summarize([*fused, *baseline])
    assert [(row["sent_bytes"], row["link_ms"]) for row in rows] == [(80_000, pytest.approx(4)), (160_000, pytest.approx(8))]
    assert "KB a step" in compare.table(rows)


def test_bytes_of_a_step_are_those_after_warm_up_and_before_the_end() -> None:
    start_up, final_evaluation = Mark(10, [7_000, 7_000]), Mark(60, [90_000, 90_000])
    late = [Mark(step, [9_000 + 100 * step, 9_000 + 200 * step + 20 * (step % 20)]) for step in (20, 30, 40, 50)]
    assert sent_per_step([start_up, *late, final_evaluation], warmup=20) == [100, 204]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (["--steps", "3"], "multiples of --interval=2"),
        (["--hosts", "1", "1"], "give both, or none"),
        (["--hosts", "1", "1", "--gbits-per-second", "1", "--steps", "4"], "three times --interval=2"),
        (["--machine", "cpu.json", "--batches", "64"], "two or more --batches"),
        (["ranks=1", "--hosts", "1", "1", "--gbits-per-second", "1"], "no contestant may have ranks="),
    ],
)
def test_options_that_do_not_go_together_are_refused(wrong: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--config", "configs/synthetic.yaml", "--output", "r.json", "comm=fused", *SHORT, *wrong])
    assert error in capsys.readouterr().err


def test_simulated_steps_take_the_time_of_the_host_from_the_smallest_batch_and_nothing_else_from_steps() -> None:
    def simulated(smallest_ms: float, of_others: float) -> list[float | None]:
        rows = compare.summarize(
            one(batch, text, 1e3, smallest_ms if batch == 64 else of_others)
            for text in CONTESTANTS[:2]
            for batch in (64, 512, 4096)
        )
        given = ["--config", "configs/synthetic.yaml", "--set", " ".join(SMALL), "--machine", CALIBRATION, "--output", "r.json"]
        compare.add_simulated(rows, compare.options_parser().parse_intermixed_args([*given, *CONTESTANTS[:2]]))
        return [row.get("simulated_ms") for row in rows]

    found = simulated(1.0, 7.0)
    assert found == simulated(1.0, 8.0)
    of_fused, of_baseline = found[::2], found[1::2]
    for comm, of_slow_host in (of_fused, simulated(51.0, 7.0)[::2]), (of_baseline, simulated(51.0, 7.0)[1::2]):
        assert comm[0] is of_slow_host[0] is None
        assert 1.0 < comm[1] < comm[2]
        assert [slow - fast for slow, fast in zip(of_slow_host[1:], comm[1:], strict=True)] == pytest.approx([50.0, 50.0])


def _compare(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    output = folder / "results.json"
    given = ["--config", "configs/synthetic.yaml", *SHORT, "--set", " ".join(SMALL), "--output", str(output), *arguments]
    return compare.main(given), json.loads(output.read_text())


@pytest.mark.slow
def test_settings_take_turns(tmp_path: Path) -> None:
    status, report = _compare(tmp_path, "--batches", "64", "--commit", "abc", *CONTESTANTS)
    assert status == 0
    assert [(run["batch"], run["settings"]) for run in report["runs"]] == [(64, own) for own in CONTESTANTS]
    for run in report["runs"]:
        assert [step for step, _ in run["intervals"]] == [4, 6, 8]
        assert run["samples_per_second"] > 0
        assert run["median_parts"]["step_ms"] > 0
        assert "table_0" in " ".join(run["plan"])
    assert report["summary"][0]["loss_off"] == 0
    assert all(row["loss_off"] < 1e-5 for row in report["summary"])
    assert report["commit"] == "abc"


@pytest.mark.exhaustive
def test_the_trainer_takes_turns_with_a_bare_loop_of_the_same_settings(tmp_path: Path) -> None:
    loops = [f"embedding.output_dtype=fp16 loop={data}" for data in ("generated", "resident")]
    status, report = _compare(tmp_path, "training.global_batch_size=64 embedding.output_dtype=fp16", *loops)
    assert status == 0
    assert all(row["samples_per_second"] > 0 for row in report["summary"])
    assert [row["loss"] is None for row in report["summary"]] == [False, True, True]


@pytest.mark.exhaustive
@needs_hosts
def test_both_settings_train_the_same_over_a_link(tmp_path: Path) -> None:
    """With SGD, which does not amplify rounding."""
    sgd = "embedding.optimizer.kind=sgd training.dense_optimizer.kind=sgd training.global_batch_size=64"
    link = ["--hosts", "2", "2", "--gbits-per-second", "1", "--most-loss-off", "1e-5"]
    status, report = _compare(tmp_path, *link, f"comm=fused {sgd}", f"comm=baseline {sgd}")
    assert status == 0
    assert [run["settings"].split()[0] for run in report["runs"]] == ["comm=fused", "comm=baseline"]
    assert all(sent > 1000 for run in report["runs"] for sent in run["sent_bytes_per_step"])


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
    trace, output = tmp_path / "trace.json.gz", tmp_path / "timeline.json"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": steps_of_a_trace(3)}).encode()))
    timeline.main([str(trace), "--output", str(output)])
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
    assert timeline.part_of(name) == part


def test_a_trace_of_one_step_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": steps_of_a_trace(1)}))
    with pytest.raises(SystemExit, match=r"1 steps, and no kernel .* telemetry.profile_steps"):
        timeline.main([str(trace)])
