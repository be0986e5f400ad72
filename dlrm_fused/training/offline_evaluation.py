"""Evaluation of a saved checkpoint, on any number of ranks and any plan: the work of eval.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from omegaconf import OmegaConf

from dlrm_fused.config import Split
from dlrm_fused.config.loading import parse_override
from dlrm_fused.datasets import open_dataset
from dlrm_fused.models import Output
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import restore_model
from dlrm_fused.training.evaluation import evaluate, named, report, undefined
from dlrm_fused.training.runtime import ErrorStore, Rank, join_run
from dlrm_fused.training.saved_run import Content, SavedRun, check_output, try_to_write, write_on_rank_0, write_result

_Part = tuple[NDArray[np.float32], NDArray[np.float32]]  # predictions and labels, [b] or [b, L] each


def evaluate_run(
    run: Path,
    checkpoint: str,
    split: Split,
    overrides: Sequence[str],
    predictions: Path | None,
    rank: Rank,
    error_store: ErrorStore,
    output: Path | None = None,
) -> None:
    """Evaluate a checkpoint of a run, print a table and write it as JSON. Collective.

    Places to write are tried before the evaluation.

    Args:
        checkpoint: ``best``, ``last`` or a step.
        overrides: ``key=value`` settings that replace those of the run.
        predictions: Parquet file for (prediction, label) of every sample, in the order of the split; of several labels, for
            (prediction/<label>, label/<label>) of each.
        output: the JSON file. Default: ``eval.json`` in the run's folder, left out if that may only be read.

    Raises:
        CheckpointError: if the run or the checkpoint does not exist, or does not fit.
    """
    check_output("--predictions", predictions)
    check_output("--output", output)
    opened = SavedRun.open(run, checkpoint, overrides)
    with join_run(opened.config, rank, error_store) as device:
        saved = opened.as_rank_0_has_it()
        for path in filter(None, (predictions, output)):
            write_on_rank_0(partial(try_to_write, path), path, rank)
        dataset = open_dataset(saved.config, device)
        saved.check_data(dataset)
        sharded = build(saved.config, dataset.schema, device)
        restore_model(saved.checkpoint, sharded)
        sharded.model.eval()
        parts: list[_Part] = []  # of each batch, without padding

        def keep(output: Output) -> None:
            real = output.weights > 0
            parts.append((output.logits[real].sigmoid().cpu().numpy(), output.labels[real].cpu().numpy()))

        # The setting of the run is for evaluations during training.
        given = (OmegaConf.select(parse_override(override), "evaluation.max_samples") for override in overrides)
        is_limited = any(samples is not None for samples in given)
        most = saved.config.evaluation.max_samples if is_limited else 0
        values = evaluate(sharded.model, dataset, split, saved.config, device, most, observe=keep if predictions else None)
        why = undefined(split.name, values)
        reasons = named({label: {"auc_undefined": why[label]} if label in why else {} for label in values})
        content: Content = {**report(values), **reasons, "split": split.name, "step": saved.step}
        if rank.index == 0:
            _print(content)
        write_result(content, run / "eval.json", output, rank)
        if predictions:
            shares = _gather(parts, rank)
            labels = dataset.schema.labels
            write_on_rank_0(lambda: _write_predictions(predictions, shares, labels), predictions, rank)


def _print(content: Content) -> None:
    width = max(20, *map(len, content))
    for name, value in content.items():
        print(f"{name:<{width}} {value:.6f}" if isinstance(value, float) else f"{name:<{width}} {value}")


def _gather(parts: list[_Part], rank: Rank) -> list[_Part]:
    """The parts of all ranks on rank 0, in the order of the split; none on the others. Collective."""
    gathered: list[Any] | None = [None] * rank.world_size if rank.index == 0 else None
    dist.gather_object(parts, gathered)
    # Batch k of the split consists of the shares of ranks 0, 1, ... in this order.
    return [share for batch in zip(*gathered or (), strict=True) for share in batch]


def _write_predictions(path: Path, shares: Sequence[_Part], labels: Sequence[str]) -> None:
    import polars

    def columns(predictions: Any, true: Any) -> dict[str, Any]:
        by_label = zip(labels, predictions.reshape(-1, len(labels)).T, true.reshape(-1, len(labels)).T, strict=True)
        return named({label: {"prediction": p, "label": y.astype("uint8")} for label, p, y in by_label})

    frame = polars.concat([polars.DataFrame(columns(*share)) for share in shares])
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(path)
