"""Online scoring of a run, request after request, with its latencies: the work of ``eval.py --online``.

A request is the history of one sample of a split, and as candidates those of this sample and of samples after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlrm_fused.config import Comm, Config, ModelKind, Precision, Split
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.inference.online.model import OnlineModel
from dlrm_fused.inference.online.request_samples import RequestSamples
from dlrm_fused.inference.online.scorer import MAX_CANDIDATES, OnlineScorer
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import restore_model
from dlrm_fused.training.runtime import ErrorStore, Rank, join_run
from dlrm_fused.training.saved_run import SavedRun, try_to_write, write_on_rank_0, write_result

NUMBERS_OF_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# Requests whose first candidate is compared with the full model; they are one batch of it.
_CHECKED = 4
# Between probabilities. With bf16, autocast keeps some values of the full model in fp32.
_MAX_DIFFERENCE = {Precision.bf16: 0.05}
_MAX_DIFFERENCE_OTHERWISE = 1e-3
_UNTIMED = 5  # first requests of each kind


def score_run_online(
    run: Path,
    checkpoint: str,
    split: Split,
    overrides: Sequence[str],
    requests: int,
    rank: Rank,
    error_store: ErrorStore,
    output: Path | None = None,
) -> None:
    """Score requests of a split with a checkpoint of a run, print latencies, and write ``online.json``. Collective.

    Every tensor-parallel group answers all requests; the times are those of rank 0.

    Args:
        checkpoint: ``best``, ``last`` or a step.
        overrides: ``key=value`` settings that replace those of the run.
        requests: of each number of candidates.
        output: the JSON file. Default: ``online.json`` in the run's folder, left out if that may only be read.

    Raises:
        CheckpointError: if the run or the checkpoint does not exist, or does not fit.
        ConfigError: if the model is no Transformer, or the split has too few samples.
        RuntimeError: if scores differ from those of the full model.
    """
    saved = SavedRun.open(run, checkpoint, overrides)
    config = saved.config
    if config.model.kind is not ModelKind.transformer:
        raise ConfigError(f"--online: the run has model.kind={config.model.kind.name}; it is for model.kind=transformer")
    with join_run(config, rank, error_store) as device:
        if output is not None:
            write_on_rank_0(partial(try_to_write, output), output, rank)
        dataset = open_dataset(config, device)
        saved.check_data(dataset)
        samples = _read(dataset, split, requests)
        model = OnlineModel.build(config, dataset.schema, device, samples.longest_bag())
        model.restore(saved.checkpoint)
        expected = _full_model(config, dataset.schema, device, saved.checkpoint, samples)
        difference = _difference(model.scorer, samples, expected)
        if not difference <= _MAX_DIFFERENCE.get(config.training.precision, _MAX_DIFFERENCE_OTHERWISE):
            raise RuntimeError(f"scores differ from those of the full model by up to {difference:.2g}")
        latencies = _replay(model.scorer, samples, requests)
        report = {"requests": requests, "difference_from_full_model": difference, **latencies}

        if rank.index == 0:
            _print(report)
        write_result({**report, "split": split.name, "step": saved.step}, run / "online.json", output, rank)


def _read(dataset: Dataset, split: Split, requests: int) -> RequestSamples:
    available = dataset.samples(split)
    if available < MAX_CANDIDATES:
        raise ConfigError(f"--split {split.name}: it has {available} samples; --online needs {MAX_CANDIDATES} at least")
    rows = torch.arange(min(available, max(requests, MAX_CANDIDATES)), device=dataset.generator_device)
    return RequestSamples(dataset.read(split, rows), dataset.schema.history_length)


@torch.no_grad()
def _full_model(
    config: Config, schema: DatasetSchema, device: torch.device, checkpoint: Path, samples: RequestSamples
) -> Tensor:
    """Probabilities that the model as it was trained gives the first ``_CHECKED`` samples. Collective."""
    sharded = build(replace(config, comm=Comm.baseline), schema, device)
    restore_model(checkpoint, sharded)
    sharded.model.eval()
    _, output = sharded.model(samples.batch(_CHECKED).to(device))
    return torch.sigmoid(output.logits).cpu()


def _difference(scorer: OnlineScorer, samples: RequestSamples, expected: Tensor) -> float:
    """The largest between scores and what is expected; each is scored alone, and among others."""
    difference = 0.0
    for sample, probability in enumerate(expected):
        history = scorer.encode(samples.history(sample))
        for count in (1, MAX_CANDIDATES):
            score = scorer.score(history, samples.candidates(sample, count))[0]
            difference = max(difference, float((score - probability).abs().max()))
    return difference


def _replay(scorer: OnlineScorer, samples: RequestSamples, requests: int) -> dict[str, float]:
    """Latencies in milliseconds of encoding histories and of scoring, and candidates scored in a second."""
    scorer.warm_up()
    encoding: list[float] = []
    report: dict[str, float] = {}
    for count in NUMBERS_OF_CANDIDATES:
        scoring: list[float] = []
        for request in range(-_UNTIMED, requests):
            sample = request % len(samples)
            interactions, candidates = samples.history(sample), samples.candidates(sample, count)
            begin = time.perf_counter()
            history = scorer.encode(interactions)
            encoded = time.perf_counter()
            scorer.score(history, candidates)
            if request >= 0:
                encoding.append(encoded - begin)
                scoring.append(time.perf_counter() - encoded)
        report |= _percentiles(f"score_{count}", scoring)
        report[f"score_{count}_candidates_per_second"] = count * requests / sum(scoring)
    return {**_percentiles("encode", encoding), **report}


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{p}_ms": float(np.percentile(seconds, p)) * 1e3 for p in (50, 99)}


def _print(report: dict[str, float]) -> None:
    print(f"{'':<14} {'p50 ms':>10} {'p99 ms':>10} {'candidates/s':>14}")
    print(f"{'history':<14} {report['encode_p50_ms']:>10.3f} {report['encode_p99_ms']:>10.3f}")
    for count in NUMBERS_OF_CANDIDATES:
        name = f"score_{count}"
        print(
            f"{f'{count} candidates':<14} {report[f'{name}_p50_ms']:>10.3f} {report[f'{name}_p99_ms']:>10.3f} "
            f"{report[f'{name}_candidates_per_second']:>14,.0f}"
        )
    print(f"scores differ from those of the full model by {report['difference_from_full_model']:.2g} at most")
