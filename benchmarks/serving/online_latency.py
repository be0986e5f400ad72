"""Latency of online scoring: products and their sums over the ranks fused, against the same with NCCL's all-reduce.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.serving.online_latency --config configs/transformer_large.yaml \\
        --output online.json [--candidates 1 16 64] [--requests 500] [key=value ...]

Two models with the same random weights, ``comm=baseline`` and ``comm=fused``, score the same candidates against the same kept
history, in turns; on GPUs, each request of either is one CUDA graph. A latency is the time from the call to the probabilities
on the host. Percentiles are those of the slowest rank. Scores of the two are compared.

For a run of your own, ``--config`` is the ``config.yaml`` of its folder: latencies depend on its shapes, not on its weights.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.harness import World, describe_run, open_world
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.config import Comm, Config, Split, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.inference.online.evaluation import RequestSamples
from dlrm_fused.inference.online.model import OnlineModel
from dlrm_fused.inference.online.scorer import MAX_CANDIDATES, OnlineScorer
from dlrm_fused.training.runtime import apply_numerics

KINDS = (Comm.baseline, Comm.fused)
# First requests of each kind that do not count.
UNTIMED = 20
# Encodings of a history: one without a CUDA graph and one that makes it, and those that count.
UNTIMED_ENCODINGS, ENCODINGS = 2, 20
# Between probabilities; sums of bf16 are rounded in other places.
MAX_DIFFERENCE = 0.05


def build(config: Config, samples: RequestSamples, world: World, schema: Any) -> dict[str, OnlineScorer]:
    """The scorers by kind, with equal weights. Collective."""
    scorers = {}
    for comm in KINDS:
        apply_numerics(config)  # the same seed for both
        scorers[comm.name] = OnlineModel.build(replace(config, comm=comm), schema, world.device, samples.longest_bag()).scorer
        scorers[comm.name].warm_up()
    return scorers


def percentiles(world: World, seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of the slowest rank, in milliseconds. Collective."""
    by_rank = world.gather([float(np.percentile(seconds, p)) * 1e3 for p in (50, 99)])
    p50, p99 = max(by_rank)
    return {"p50_ms": p50, "p99_ms": p99, "p99_over_p50": p99 / p50}


def time_encoding(world: World, scorer: OnlineScorer, samples: RequestSamples) -> dict[str, float]:
    """Latency of encoding a history. Collective."""
    history, seconds = samples.history(0), []
    for _ in range(UNTIMED_ENCODINGS + ENCODINGS):
        began = time.perf_counter()
        scorer.encode(*history)
        seconds.append(time.perf_counter() - began)
    return percentiles(world, seconds[UNTIMED_ENCODINGS:])


def time_scoring(
    world: World, scorers: Mapping[str, OnlineScorer], samples: RequestSamples, count: int, requests: int
) -> dict[str, Any]:
    """Latencies of scoring so many candidates, by kind, and the largest difference of the scores. Collective."""
    histories = {kind: scorer.encode(*samples.history(0)) for kind, scorer in scorers.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in scorers}
    difference = 0.0
    for request in range(UNTIMED + requests):
        candidates = samples.candidates(request, count)
        scores = {}
        for kind, scorer in scorers.items():
            began = time.perf_counter()
            scores[kind] = scorer.score(histories[kind], candidates)
            seconds[kind].append(time.perf_counter() - began)
        first, second = scores.values()
        difference = max(difference, float((first - second).abs().max()))
    result: dict[str, Any] = {kind: percentiles(world, own[UNTIMED:]) for kind, own in seconds.items()}
    for own in result.values():
        own["candidates_per_second"] = count / own["p50_ms"] * 1e3
    ratio = result[Comm.fused.name]["p50_ms"] / result[Comm.baseline.name]["p50_ms"]
    return {"candidates": count, "history": len(histories[Comm.fused.name]), "ratio": ratio, "difference": difference, **result}


def line(result: Mapping[str, Any]) -> str:
    times = "".join(
        f"{result[comm.name]['p50_ms']:>12.3f}{result[comm.name]['p99_ms']:>10.3f}{result[comm.name]['p99_over_p50']:>8.2f}"
        for comm in KINDS
    )
    return f"{result['candidates']:>10}{times}{result['ratio']:>9.3f}{result['difference']:>12.1e}"


HEADER = f"{'candidates':>10}" + "".join(f"{comm.name + ' p50':>12}{'p99 ms':>10}{'p99/p50':>8}" for comm in KINDS)
HEADER += f"{'ratio':>9}{'difference':>12}"


def run(world: World, options: argparse.Namespace) -> bool:
    """Everything; whether the scores of the two kinds agree."""
    config = load_config(options.config, options.overrides)
    dataset = open_dataset(config, world.device)
    rows = torch.arange(min(dataset.samples(Split.test), 2 * MAX_CANDIDATES), device=dataset.generator_device)
    samples = RequestSamples(dataset.read(Split.test, rows), dataset.schema.history_length)
    scorers = build(config, samples, world, dataset.schema)
    report: dict[str, Any] = {
        **describe_run(world, options.commit),
        "requests": options.requests,
        "encoding": {kind: time_encoding(world, scorer, samples) for kind, scorer in scorers.items()},
        "scoring": [],
    }
    world.log(f"encoding, p50 in ms: { {kind: round(own['p50_ms'], 2) for kind, own in report['encoding'].items()} }\n{HEADER}")
    gc.collect()
    gc.freeze()  # as a server does: no pause for what lives for ever
    for count in options.candidates:
        result = time_scoring(world, scorers, samples, count, options.requests)
        world.log(line(result))
        report["scoring"].append(result)
        report["passed"] = all(own["difference"] <= MAX_DIFFERENCE for own in report["scoring"])
        if world.rank == 0:
            write_results(options.output, report)
    return bool(report["passed"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    add_report_arguments(parser)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 16, 64], help="of a request")
    parser.add_argument("--requests", type=int, default=500, help="of each number of candidates and kind")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of those of the config")
    options = parser.parse_args(arguments)
    with open_world() as world:
        return 0 if run(world, options) else 1


if __name__ == "__main__":
    sys.exit(main())
