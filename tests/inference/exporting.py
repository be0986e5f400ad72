"""Exports of runs, and what eval.py predicts with these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars
from numpy.typing import NDArray

from dlrm_fused.config import Split
from dlrm_fused.inference.export.folder import export_run
from dlrm_fused.inference.export.quality import Quality
from dlrm_fused.training.offline_evaluation import evaluate_run
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import run_ranks


def export(run: Path, output: Path, table_dtype: str = "fp32", *overrides: str) -> Quality:
    """Export a run; returns the quality of its first label."""
    return next(iter(export_run(run, "last", output, table_dtype, Split.test, overrides).values()))


def predictions_of_eval(run: Path, *overrides: str) -> NDArray[np.float32]:
    """What eval.py predicts on the test split, [n]; [n, L] of L > 1 labels."""
    path = run / "predictions.parquet"
    run_ranks(1, _evaluate, run, path, overrides)
    columns = polars.read_parquet(path)
    predictions = [columns[name].to_numpy() for name in columns.columns if name.startswith("prediction")]
    return predictions[0] if len(predictions) == 1 else np.stack(predictions, axis=1)


def _evaluate(run: Path, path: Path, overrides: tuple[str, ...]) -> None:
    rank = Rank.from_environment()
    evaluate_run(run, "last", Split.test, overrides, path, rank, ErrorStore(rank))
