"""Exports of runs, the service of these, and what eval.py predicts with them."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars
from numpy.typing import NDArray

from dlrm_fused.config import Split
from dlrm_fused.inference.export.folder import export_run
from dlrm_fused.inference.export.quality import Quality
from dlrm_fused.inference.http.__main__ import main
from dlrm_fused.training.offline_evaluation import evaluate_run
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import run_ranks, start_alone
from tests.inference.service_process import Service

ROOT = Path(__file__).parents[2]
_START_SECONDS = 120.0


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


def be_service(arguments: Sequence[str]) -> None:
    """Be ``python -m dlrm_fused.inference.http``."""
    sys.exit(main(arguments))


@contextmanager
def running_service(model: Path, options: Sequence[str] = ()) -> Iterator[Service]:
    """Start the service on a port that it chooses; at the end it is told to end, and must do so as if by SIGTERM.

    It is started like a rank, sooner than the process of the same name that benchmarks start.
    """
    log = Path(tempfile.mkstemp()[1])
    started = start_alone(ROOT, log, log, be_service, ["--model", str(model), "--port", "0", *options])
    (process,) = started.processes
    try:
        deadline, service = time.monotonic() + _START_SECONDS, None
        while service is None or not _is_healthy(service):
            assert process.is_alive(), log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
            if told := re.search(r"Serving .*, port (\d+)", log.read_text()):
                service = Service(int(told[1]), cast(Any, process))
        yield service
        process.terminate()
        process.join(timeout=60)
        assert process.exitcode in (0, -signal.SIGTERM), log.read_text()
    finally:
        started.kill()
        log.unlink()


def _is_healthy(service: Service) -> bool:
    try:
        return service.request("GET", "/health")[0] == 200
    except OSError:
        return False
