"""Online scoring of a run, request after request, with its latencies: the work of ``eval.py --online``.

A request is the history of one sample of a split, and as candidates those of this sample and of samples after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Comm, Config, ModelKind, Precision, Split
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.batch import Batch, Samples
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.dlrm import build_transformer
from dlrm_fused.models.row_parallel import fused_product
from dlrm_fused.serving.online import MAX_CANDIDATES, Candidates, OnlineScorer
from dlrm_fused.serving.tables import ShardedTables
from dlrm_fused.sharding.groups import ModelParallelGroups, tensor_parallel_groups
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import LocalShards, State, of_dense, restore_model, restore_tensors
from dlrm_fused.training.runtime import ErrorStore, Rank, join_run
from dlrm_fused.training.saved_run import SavedRun, write_on_rank_0
from dlrm_fused.training.telemetry import write_json

NUMBERS_OF_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
# Requests whose first candidate is compared with the full model; they are one batch of it.
_CHECKED = 4
# Between probabilities. With bf16, autocast keeps some values of the full model in fp32.
_MAX_DIFFERENCE = {Precision.bf16: 0.05}
_MAX_DIFFERENCE_OTHERWISE = 1e-3
_UNTIMED = 5  # first requests of each kind


@dataclass(frozen=True)
class OnlineModel:
    """A model for online scoring, not trained, or loaded by :meth:`restore`.

    Attributes:
        state: its live tensors, by their keys in a checkpoint.
    """

    scorer: OnlineScorer
    state: State

    @staticmethod
    def build(config: Config, schema: DatasetSchema, device: torch.device, ids_per_bag: int) -> OnlineModel:
        """Build the model with random weights. Collective.

        Layers and tables are sharded over tensor-parallel ranks. With ``comm=baseline``, a product is followed by an
        all-reduce; otherwise they are one operator. With ``training.precision=bf16`` all weights are bf16, otherwise fp32.

        Args:
            ids_per_bag: the most ids of a bag.

        Raises:
            ConfigError: if the model is no Transformer, or does not go with the data set or the ranks.
            UsageError: with ``comm_strict``, if ranks cannot reach each other's memory.
        """
        if config.model.kind is not ModelKind.transformer:
            raise ConfigError(f"model.kind={config.model.kind.name}: online scoring is for model.kind=transformer")
        if config.model.experts.count:
            raise ConfigError(
                f"model.experts.count={config.model.experts.count}: online scoring is for models without experts: 0"
            )
        groups = tensor_parallel_groups(config.model)
        group, dim = groups.model_parallel, config.embedding.dim
        dtype = torch.bfloat16 if config.training.precision is Precision.bf16 else torch.float32
        columns = max(config.model.d_model, len(schema.sparse_features) * dim)
        product = fused_product(config, group, device, "online scoring", columns, max(schema.history_length, MAX_CANDIDATES))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)  # on all ranks alike
            model = build_transformer(config, schema, product)
        tables = ShardedTables({feature.name: feature.rows for feature in schema.tables}, dim, group, dtype, device)
        for _, rows in tables.pieces().values():
            rows.uniform_(-1, 1)
        # Not the model itself: the tables in it are on the meta device.
        parts = {"transformer": model.transformer, "dense_arch": model.dense_arch, "over_arch": model.over_arch}
        for part in parts.values():
            part.to(device, dtype)
        scorer = OnlineScorer(
            model.transformer,
            model.dense_arch,
            model.over_arch,
            tables,
            token_features=model.sparse_arch.token_features,
            sparse_features=model.sparse_arch.features,
            ids_per_bag=ids_per_bag,
        )
        return OnlineModel(scorer, _state(parts, tables, groups))

    def restore(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint. Collective.

        Raises:
            CheckpointError: if it is damaged or does not fit.
        """
        restore_tensors(checkpoint, self.state)


def _state(parts: dict[str, torch.nn.Module], tables: ShardedTables, groups: ModelParallelGroups) -> State:
    state: State = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            state[f"dense.model.{part}.{name}"] = of_dense(parameter.detach(), parameter, groups)
    for table, (first, rows) in tables.pieces().items():
        state[f"table.{table}.weight"] = LocalShards((tables.features[table], tables.dim), [((first, 0), rows)])
    return state


def score_run_online(
    run: Path,
    checkpoint: str,
    split: Split,
    overrides: Sequence[str],
    requests: int,
    rank: Rank,
    error_store: ErrorStore,
) -> None:
    """Score requests of a split with a checkpoint of a run, print latencies, and write ``online.json``. Collective.

    Every tensor-parallel group answers all requests; the times are those of rank 0.

    Args:
        checkpoint: ``best``, ``last`` or a step.
        overrides: ``key=value`` settings that replace those of the run.
        requests: of each number of candidates.

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
        dataset = open_dataset(config, device)
        samples = _read(dataset, split, requests)
        model = OnlineModel.build(config, dataset.schema, device, samples.longest_bag())
        model.restore(saved.checkpoint)
        expected = _full_model(config, dataset.schema, device, saved.checkpoint, samples)
        difference = _difference(model.scorer, samples, expected)
        if not difference <= _MAX_DIFFERENCE.get(config.training.precision, _MAX_DIFFERENCE_OTHERWISE):
            raise RuntimeError(f"scores differ from those of the full model by up to {difference:.2g}")
        latencies = _replay(model.scorer, samples, requests)
        report = {"requests": requests, "difference_from_full_model": difference, **latencies}

        def write() -> None:
            write_json(run / "online.json", {**report, "split": split.name, "step": saved.step})
            _print(report)

        write_on_rank_0(write, run, rank)


class RequestSamples:
    """Samples of a data set with histories, on the CPU, taken apart into histories and candidates."""

    def __init__(self, samples: Samples, history_length: int) -> None:
        assert samples.tokens is not None
        assert samples.history_lengths is not None
        cpu = torch.device("cpu")
        self._dense, self._sparse, self._tokens = samples.dense.to(cpu), samples.sparse.to(cpu), samples.tokens.to(cpu)
        self._history_lengths = samples.history_lengths.to(cpu).long()
        self._tokens_of_sample = history_length + 1

    def __len__(self) -> int:
        return len(self._dense)

    def longest_bag(self) -> int:
        """The most ids of a bag, 1 at least."""
        return max(1, int(self._tokens.lengths().max()), int(self._sparse.lengths().max()))

    def history(self, sample: int) -> KeyedJaggedTensor:
        """The interactions of a sample's history, oldest first."""
        first = sample * self._tokens_of_sample
        return _select(self._tokens, torch.arange(first, first + int(self._history_lengths[sample])))

    def candidates(self, sample: int, count: int) -> Candidates:
        """Those of a sample and of the samples after it."""
        chosen = torch.arange(sample, sample + count) % len(self)
        tokens = chosen * self._tokens_of_sample + self._history_lengths[chosen]
        return Candidates(self._dense[chosen], _select(self._sparse, chosen), _select(self._tokens, tokens))

    def batch(self, count: int) -> Batch:
        """The first samples as they are, for the full model; without labels."""
        return Batch(
            dense=self._dense[:count],
            sparse=_select(self._sparse, torch.arange(count)),
            labels=torch.zeros(count),
            weights=torch.ones(count),
            global_size=count,
            tokens=_select(self._tokens, torch.arange(count * self._tokens_of_sample)),
            history_lengths=self._history_lengths[:count],
        )


def _select(bags: KeyedJaggedTensor, chosen: Tensor) -> KeyedJaggedTensor:
    """Some bags of each key."""
    keys = bags.keys()
    lengths = bags.lengths().view(len(keys), -1)[:, chosen].flatten().long()
    starts = bags.offsets()[:-1].view(len(keys), -1)[:, chosen].flatten().long()
    # Places count from each bag's start.
    shifts = starts - pad(lengths.cumsum(0), (1, 0))[:-1]
    places = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
    return KeyedJaggedTensor(keys=keys, values=bags.values()[places], lengths=lengths.int(), stride=len(chosen))


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
    """[_CHECKED] probabilities that the model as it was trained gives the first samples. Collective."""
    sharded = build(replace(config, comm=Comm.baseline), schema, device)
    restore_model(checkpoint, sharded)
    sharded.model.eval()
    _, output = sharded.model(samples.batch(_CHECKED).to(device))
    return torch.sigmoid(output.logits).cpu()


def _difference(scorer: OnlineScorer, samples: RequestSamples, expected: Tensor) -> float:
    """The largest between scores and what is expected; each is scored alone, and among others."""
    difference = 0.0
    for sample, probability in enumerate(expected.tolist()):
        history = scorer.encode(samples.history(sample))
        for count in (1, MAX_CANDIDATES):
            score = float(scorer.score(history, samples.candidates(sample, count))[0])
            difference = max(difference, abs(score - probability))
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
