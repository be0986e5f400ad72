"""The benchmarks of training: what they make of runs, and runs on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import compare_settings, dense_part
from dlrm_fused.config import Precision

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


def one(batch: int | None, settings: str, rate: float, step_ms: float, peak: float | None = None) -> dict[str, Any]:
    return {
        "batch": batch,
        "settings": settings,
        "samples_per_second": rate,
        "median_parts": {"step_ms": step_ms},
        "peak_memory_gib": peak,
    }


def test_the_first_settings_are_compared_with_the_others_of_their_batch() -> None:
    runs = [
        *(one(1024, "comm=fused", rate, ms, peak) for rate, ms, peak in ((8e6, 1.0, 2.0), (4e6, 3.0, 2.5), (6e6, 2.0, 1.0))),
        one(1024, "comm=baseline", 3e6, 4.0, 3.0),
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
    lines = compare_settings.table(rows).splitlines()
    assert lines[1].split() == ["1024", "6.000", "2.00", "2.50", "1.00", "comm=fused"]
    assert lines[4].split() == ["2048", "2.000", "6.00", "-", "0.50", "comm=baseline"]


@pytest.mark.slow
def test_settings_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    steps = ["--warmup", "2", "--steps", "4", "--interval", "2", "--rounds", "1", "--commit", "abc"]
    settings = [" ".join([comm, *SMALL]) for comm in ("comm=fused", "comm=baseline")]
    compare_settings.main(
        ["--config", "configs/synthetic.yaml", "--batches", "64", "128", *steps, "--output", str(output), *settings]
    )
    report = json.loads(output.read_text())
    expected = [(batch, own) for batch in (64, 128) for own in settings]
    assert [(run["batch"], run["settings"]) for run in report["runs"]] == expected
    for run in report["runs"]:
        assert [step for step, _ in run["intervals"]] == [4, 6]
        assert run["samples_per_second"] > 0
        assert run["median_parts"]["step_ms"] > 0
    fused, baseline = report["runs"][:2]
    assert fused["loss"] == pytest.approx(baseline["loss"], rel=1e-5)
    assert report["commit"] == "abc"


def test_16_bit_embeddings_are_measured_where_the_dense_part_computes_so() -> None:
    assert [v.embeddings for v in dense_part.variants(Precision.fp32, autotune=False)] == [torch.float32] * 2
    found = dense_part.variants(Precision.bf16, autotune=True)
    assert [v.options is None for v in found] == [True, False, True, False, False]
    assert [v.embeddings for v in found[2:]] == [torch.bfloat16] * 3


def test_the_dense_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []

    def note(part: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """In place of the compiler, which takes half a minute."""
        compiled.append(options)
        return part

    monkeypatch.setattr(torch, "compile", note)
    kind = ["model.kind=dcnv2", "model.cross_layers=2", "model.cross_rank=4", "training.precision=bf16"]
    output = tmp_path / "dense.json"
    sizes = ["--samples", "16", "--steps", "2", "--commit", "abc", "--output", str(output)]
    dense_part.main(["--config", "configs/synthetic.yaml", *sizes, *SMALL, *kind])
    report = json.loads(output.read_text())
    assert [v["variant"] for v in report["variants"]] == [
        "eager, float32 embeddings",
        "compiled, float32 embeddings",
        "eager, bfloat16 embeddings",
        "compiled, bfloat16 embeddings",
    ]
    assert len(compiled) == 2
    assert all(options["fullgraph"] for options in compiled)
    losses = [v["loss"] for v in report["variants"]]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-2)
    # Multiplications with additions of a sample: bottom MLP, two cross layers, top MLP; the backward pass has twice as many,
    # but no gradient of the samples.
    bottom, cross, top = 13 * 8, 2 * 2 * 32 * 4, 32 * 8 + 8
    assert report["flops"] == 2 * 16 * (3 * (bottom + cross + top) - 13 * 8)
    assert report["floor_ms"] == pytest.approx(report["flops"] / report["teraflops_of_a_large_product"] / 1e9)
