"""Online scores of a run compared with the full model's: the work of ``eval.py --online``.

A request is the history of one sample of a split, and as candidates those of this sample and of samples after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Comm, Config, Precision, Split
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.batch import Batch, Samples, select_bags
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.inference.online.model import BUILDERS, KINDS, OnlineModel
from dlrm_fused.inference.online.scorer import MAX_CANDIDATES, Candidates, OnlineScorer
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import restore_model
from dlrm_fused.training.runtime import ErrorStore, Rank, join_run
from dlrm_fused.training.saved_run import SavedRun, check_output, try_to_write, write_on_rank_0, write_result

# Largest difference of probabilities. With bf16, autocast keeps some values of the full model in fp32.
_MAX_DIFFERENCE = {Precision.bf16: 0.05}
_MAX_DIFFERENCE_OTHERWISE = 1e-3


class RequestSamples:
    """Takes samples of a data set with histories apart into histories and candidates, on the CPU."""

    def __init__(self, samples: Samples, history_length: int) -> None:
        assert samples.tokens is not None
        assert samples.history_lengths is not None
        cpu = torch.device("cpu")
        self._dense, self._sparse, self._tokens = samples.dense.to(cpu), samples.sparse.to(cpu), samples.tokens.to(cpu)
        self._labels_shape = samples.labels.shape[1:]
        self._history_lengths = samples.history_lengths.to(cpu).long()
        self._token_times = None if samples.token_times is None else samples.token_times.to(cpu)
        self._tokens_of_sample = history_length + 1

    def __len__(self) -> int:
        return len(self._dense)

    def longest_bag(self) -> int:
        """Return the most ids of a bag, 1 at least."""
        return max(1, int(self._tokens.lengths().max()), int(self._sparse.lengths().max()))

    def history(self, sample: int) -> tuple[KeyedJaggedTensor, Tensor | None]:
        """Return the interactions of a sample's history, oldest first, and when they were, if that is known."""
        first, count = sample * self._tokens_of_sample, int(self._history_lengths[sample])
        times = None if self._token_times is None else self._token_times[sample, :count]
        return select_bags(self._tokens, torch.arange(first, first + count)), times

    def candidates(self, sample: int, count: int) -> Candidates:
        """Return ``count`` candidates: those of a sample and of the samples after it."""
        chosen = torch.arange(sample, sample + count) % len(self)
        lengths = self._history_lengths[chosen]
        tokens = select_bags(self._tokens, chosen * self._tokens_of_sample + lengths)
        times = None if self._token_times is None else self._token_times[chosen, lengths]
        return Candidates(self._dense[chosen], select_bags(self._sparse, chosen), tokens, times)

    def batch(self, count: int) -> Batch:
        """Return the first samples as they are, for the full model; without labels."""
        return Batch(
            dense=self._dense[:count],
            sparse=select_bags(self._sparse, torch.arange(count)),
            labels=torch.zeros(count, *self._labels_shape),
            weights=torch.ones(count),
            global_size=count,
            tokens=select_bags(self._tokens, torch.arange(count * self._tokens_of_sample)),
            history_lengths=self._history_lengths[:count],
            sample_weights=torch.ones(count),
            token_count=int(self._history_lengths[:count].sum()) + count,
            token_times=None if self._token_times is None else self._token_times[:count],
        )


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
    """Score requests of a split with a checkpoint of a run, print how far scores are from the full model's, and write
    ``online.json``. Collective.

    Every tensor-parallel group answers all requests.

    Args:
        checkpoint: ``best``, ``last`` or a step.
        overrides: ``key=value`` settings that replace those of the run.
        requests: how many; the first candidate of each is compared with the full model, which takes these as one batch.
        output: the JSON file. Default: ``online.json`` in the run's folder, left out if that may only be read.

    Raises:
        CheckpointError: if the run or the checkpoint does not exist, or does not fit.
        ConfigError: if the model reads no histories, or the split has too few samples.
        RuntimeError: if scores differ from those of the full model.
    """
    check_output("--output", output)
    opened = SavedRun.open(run, checkpoint, overrides)
    config = opened.config
    if config.model.kind not in BUILDERS:
        raise ConfigError(f"--online: the run has model.kind={config.model.kind.name}; it is for {KINDS}")
    with join_run(config, rank, error_store) as device:
        saved = opened.as_rank_0_has_it()
        if output is not None:
            write_on_rank_0(partial(try_to_write, output), output, rank)
        dataset = open_dataset(config, device)
        saved.check_data(dataset)
        samples = _read(dataset, split, requests)
        model = OnlineModel.build(config, dataset.schema, device, samples.longest_bag())
        model.restore(saved.checkpoint)
        expected = _full_model(config, dataset.schema, device, saved.checkpoint, samples.batch(min(requests, len(samples))))
        difference = _difference(model.scorer, samples, expected)
        if not difference <= _MAX_DIFFERENCE.get(config.training.precision, _MAX_DIFFERENCE_OTHERWISE):
            raise RuntimeError(f"scores differ from those of the full model by up to {difference:.2g}")
        if rank.index == 0:
            print(f"scores differ from those of the full model by {difference:.2g} at most")
        found = {"requests": len(expected), "difference_from_full_model": difference}
        write_result({**found, "split": split.name, "step": saved.step}, run / "online.json", output, rank)


def _read(dataset: Dataset, split: Split, requests: int) -> RequestSamples:
    available = dataset.samples(split)
    if available < MAX_CANDIDATES:
        raise ConfigError(f"--split {split.name}: it has {available} samples; --online needs {MAX_CANDIDATES} at least")
    rows = torch.arange(min(available, max(requests, MAX_CANDIDATES)), device=dataset.generator_device)
    return RequestSamples(dataset.read(split, rows), dataset.schema.history_length)


@torch.no_grad()
def _full_model(config: Config, schema: DatasetSchema, device: torch.device, checkpoint: Path, batch: Batch) -> Tensor:
    """Return the probabilities that the model as it was trained gives the samples. Collective."""
    sharded = build(replace(config, comm=Comm.baseline), schema, device)
    restore_model(checkpoint, sharded)
    sharded.model.eval()
    _, output = sharded.model(batch.to(device))
    return torch.sigmoid(output.logits).cpu()


def _difference(scorer: OnlineScorer, samples: RequestSamples, expected: Tensor) -> float:
    """Return the largest difference of scores from ``expected``; each sample is scored alone, and among others."""
    difference = 0.0
    for sample, probability in enumerate(expected):
        history = scorer.encode(*samples.history(sample))
        for count in (1, MAX_CANDIDATES):
            score = scorer.score(history, samples.candidates(sample, count))[0]
            difference = max(difference, float((score - probability).abs().max()))
    return difference
