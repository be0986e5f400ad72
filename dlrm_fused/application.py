"""Training, evaluating and exporting runs: what the commands and train.py, eval.py and export.py do, as functions.

Each is called on all ranks of a run, that is in every process that torchrun has started, or in one process without torchrun;
an export runs in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_fused.config import Split, load_config
from dlrm_fused.errors import ConfigError
from dlrm_fused.versions import check_versions

if TYPE_CHECKING:
    from dlrm_fused.training.runtime import ErrorStore, Rank

# The trainer is imported inside of functions, after the check of versions: of packages that do not belong together, the
# import may fail already.


def train(config: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train the run that a YAML file describes, or continue it; the results lie in its folder. Collective.

    An error ends this process with status 1, and those of all other ranks, after one of them has said what is wrong.

    Args:
        config: the file; see configs/.
        overrides: ``key=value`` settings that replace those of the file.
    """
    from dlrm_fused.training.runtime import run_with_error_reporting

    run_with_error_reporting(lambda rank, error_store: train_on(rank, error_store, config, overrides))


def evaluate(
    run: str | Path,
    *,
    checkpoint: str = "last",
    split: str = "test",
    overrides: Sequence[str] = (),
    predictions: str | Path | None = None,
    output: str | Path | None = None,
) -> None:
    """Evaluate a checkpoint of a run, print its metrics and write them to ``eval.json`` in the run's folder. Collective.

    Any number of ranks will do, whatever the run was trained with. An error ends the processes as in :func:`train`.

    Args:
        run: folder of the run, such as ``runs/quickstart``.
        checkpoint: ``best``, ``last`` or a step.
        split: ``train``, ``validation`` or ``test``.
        overrides: ``key=value`` settings that replace those of the run.
        predictions: a Parquet file to write the predictions and labels of every sample to.
        output: another file for the metrics.
    """
    from dlrm_fused.training.runtime import run_with_error_reporting

    paths = [None if path is None else Path(path) for path in (predictions, output)]
    run_with_error_reporting(
        lambda rank, error_store: evaluate_on(rank, error_store, Path(run), checkpoint, Split[split], overrides, *paths)
    )


def train_on(rank: Rank, error_store: ErrorStore, config: str | Path, overrides: Sequence[str]) -> None:
    """:func:`train` on this rank, where errors are raised."""
    checked = load_config(config, overrides)
    check_versions()
    from dlrm_fused.training.trainer import train

    train(checked, rank, error_store)


def evaluate_on(
    rank: Rank,
    error_store: ErrorStore,
    run: Path,
    checkpoint: str,
    split: Split,
    overrides: Sequence[str],
    predictions: Path | None,
    output: Path | None = None,
) -> None:
    """:func:`evaluate` on this rank, where errors are raised."""
    check_versions()
    from dlrm_fused.training.offline_evaluation import evaluate_run

    evaluate_run(run, checkpoint, split, overrides, predictions, rank, error_store, output)


def export_on(
    rank: Rank, run: Path, output: Path, checkpoint: str, table_dtype: str, split: Split, overrides: Sequence[str]
) -> None:
    """Write an exported model, and print how its AUC compares with that in fp32, where errors are raised."""
    if rank.world_size > 1:
        raise ConfigError(f"{rank.world_size} processes: an export runs in one; start it without torchrun")
    check_versions()
    from dlrm_fused.inference.export.folder import export_run

    quality = export_run(run, checkpoint, output, table_dtype, split, overrides)
    print(f"{output}: tables in {table_dtype}")
    for label, each in quality.items():
        of_label = f" of {label}" if len(quality) > 1 else ""
        print(f"AUC{of_label} of {each.samples} {each.split} samples: {each.auc:.6f}; in fp32: {each.auc_fp32:.6f}")
        print(f"difference of AUC{of_label}: {each.auc_difference:+.6f}")
