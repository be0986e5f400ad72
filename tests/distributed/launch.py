"""Runs of the trainer in real processes, cheaply.

Importing torchrec takes seconds, so ranks are forked from a server that has imported it once. They find each other as under
torchrun: the caller holds the rendezvous store, and the environment says which rank a process is. Tests of the launcher
itself start torchrun.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.config import Config, Split, load_config
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.sharding import paths
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.training import trainer
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import CheckpointFolder, LocalShards, model_state, optimizer_state, restore
from dlrm_fused.training.offline_evaluation import evaluate_run
from dlrm_fused.training.runtime import ErrorStore, Rank, process_group
from tests.interpreter import quicken

_RANK_TIMEOUT_SECONDS = 240.0
_context: Any = multiprocessing.get_context("forkserver")
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_context.set_forkserver_preload(["tests.distributed.preloaded"])

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

# Small enough for 200 steps in a few seconds. Samples of an epoch are not a multiple of the batch.
SMALL = {
    "name": "run",
    "data": {
        "source": "synthetic",
        "shuffle_window_rows": 0,
        "workers": 1,
        "synthetic": {
            "dense_features": 4,
            "tables": 4,
            "rows": [50, 120, 300, 700],
            "pooling": [1, 3, 2, 4],
            "jagged": True,
            "train_samples": 10_000,
            "validation_samples": 1_500,
            "test_samples": 1_501,
        },
    },
    "model": {"bottom_mlp": [16, 8], "top_mlp": [16, 1], "cross_layers": 2, "cross_rank": 4},
    # Not auto, for which the planner compares hundreds of plans.
    "embedding": {"dim": 8, "sharding": "table_wise", "optimizer": {"learning_rate": 0.05}},
    "training": {"max_steps": 200, "global_batch_size": 64, "dense_optimizer": {"learning_rate": 0.02}},
    "evaluation": {"global_batch_size": 512},
    "telemetry": {"log_every_steps": 1},
    "runtime": {"device": "cpu"},
}


# For models whose losses are compared over many steps. SGD has no division by small sums, which would amplify rounding; its
# momentum is a state with the shape of the parameter. No number of ranks divides the batch, so some are given padding.
WITHOUT_AMPLIFIED_ROUNDING = [
    "embedding.optimizer.kind=sgd",
    "embedding.optimizer.learning_rate=20",
    "embedding.init_std=0.3",
    "data.synthetic.signal=4",
    "training.dense_optimizer.kind=sgd",
    "training.dense_optimizer.learning_rate=0.1",
    "training.dense_optimizer.momentum=0.9",
    "training.global_batch_size=255",
]


class RankFailed(Exception):  # noqa: N818 - reads as what happened
    """A rank raised; ``error`` is what it raised, the message its traceback."""

    def __init__(self, rank: int, error: BaseException, trace: str) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.error = error


class Ranks:
    """``function(*arguments)`` running in processes that can form a process group."""

    def __init__(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[BaseProcess] = []
        self._answers: list[Connection] = []
        for rank in range(ranks):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_be_rank, args=(rank, ranks, self._store.port, sender, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            self.processes.append(process)
            self._answers.append(receiver)

    def wait(self, timeout_seconds: float = _RANK_TIMEOUT_SECONDS) -> list[Any]:
        """Wait for the end of all; returns what the function returned, by rank.

        Args:
            timeout_seconds: without an answer of any rank.

        Raises:
            RankFailed: if a rank raised an exception; the others are ended.
        """
        results: list[Any] = [None] * len(self._answers)
        rank_of = {answer: rank for rank, answer in enumerate(self._answers)}
        try:
            while rank_of:
                ready = wait_for_any(list(rank_of), timeout=timeout_seconds)
                assert ready, f"ranks {list(rank_of.values())} have not answered for {timeout_seconds:.0f} s"
                for answer in cast(list[Connection], ready):
                    rank = rank_of.pop(answer)
                    results[rank], failure = _receive(answer, rank)
                    if failure is not None:
                        raise RankFailed(rank, *failure)
        except BaseException:
            self.kill()
            raise
        for process in self.processes:
            process.join()
        return results

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(*arguments)`` in so many processes; returns the results by rank. Raises like :meth:`Ranks.wait`."""
    return Ranks(ranks, function, *arguments).wait()


def on_hosts(hosts: Sequence[int], function: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of each rank: call ``function(*arguments)`` as if the ranks were on hosts of these numbers."""
    own = hosts[int(os.environ["RANK"])]
    os.environ.update(DLRM_FUSED_HOST=f"host{own}", LOCAL_WORLD_SIZE=str(list(hosts).count(own)))
    return function(*arguments)


def _receive(answer: Connection, rank: int) -> tuple[Any, tuple[BaseException, str] | None]:
    try:
        return cast(tuple[Any, tuple[BaseException, str] | None], pickle.loads(answer.recv_bytes()))
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None


def _be_rank(
    rank: int, ranks: int, port: int, answer: Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(_torchrun(rank, ranks, port))
    try:
        result = function(*arguments), None
    except BaseException as error:
        result = None, (error, traceback.format_exc())
    # Not answer.send: it would share the memory of tensors, which ends with this process.
    answer.send_bytes(pickle.dumps(result))
    # No exit handlers: they belong to the server that this process was forked from.
    os._exit(0)


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank; the store, at this port, is the caller's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def small_config(folder: Path, *overrides: str) -> Config:
    """The config ``SMALL`` with ``key=value`` overrides; the run is ``folder/run``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(json.dumps(SMALL))  # JSON is YAML
    return load_config(path, [f"output_dir={folder}", *overrides])


def train(folder: Path, ranks: int, *overrides: str) -> Path:
    """Train ``SMALL`` with overrides on so many ranks; returns the folder of the run."""
    config = small_config(folder, *overrides)
    start_training(config, ranks).wait()
    return config.run_dir


def measure_briefly() -> None:
    """Let ``comm=auto`` in this process measure one batch of each path, after one that warms up."""
    paths.WARMUP_BATCHES = paths.MEASURED_BATCHES = paths.ROUNDS = 1


def start_training(config: Config, ranks: int) -> Ranks:
    return Ranks(ranks, _train, config)


def _train(config: Config) -> None:
    measure_briefly()
    rank = Rank.from_environment()
    trainer.train(config, rank, ErrorStore(rank))


def evaluate(run: Path, ranks: int, *overrides: str, checkpoint: str = "last", split: str = "test") -> dict[str, Any]:
    """Evaluate a run on so many ranks; returns eval.json."""
    run_ranks(ranks, _evaluate, run, checkpoint, Split[split], overrides)
    return dict(json.loads((run / "eval.json").read_text()))


def _evaluate(run: Path, checkpoint: str, split: Split, overrides: Sequence[str]) -> None:
    rank = Rank.from_environment()
    evaluate_run(run, checkpoint, split, overrides, None, rank, ErrorStore(rank))


Pieces = dict[str, list[tuple[tuple[int, int], Tensor]]]


def load_tables(config: Config, ranks: int, step: int | None) -> list[Pieces]:
    """Each rank's pieces, ((first row, first column), tensor), of all tables and of their optimizer's states, by key.

    Args:
        step: of the checkpoint that they come from; None gives the initial weights.
    """
    return run_ranks(ranks, _load_tables, config, step)


def _load_tables(config: Config, step: int | None) -> Pieces:
    device, folder = torch.device("cpu"), CheckpointFolder(config.run_dir / "checkpoints")
    with sharded_model(config, device) as (_, sharded):
        if step is not None:
            restore(folder.of(step), sharded, folder.progress(step), device)
        state = {**model_state(sharded), **optimizer_state(sharded)}
        return {key: value.shards for key, value in state.items() if isinstance(value, LocalShards)}


@contextmanager
def cpu_group() -> Iterator[SymmetricGroup]:
    """The symmetric group of all ranks, on the CPU, within a process group. Collective."""
    with process_group(Rank.from_environment(), torch.device("cpu")):
        group = symmetric_group()
        yield group
        group.close()


@contextmanager
def sharded_model(config: Config, device: torch.device) -> Iterator[tuple[Dataset, ShardedModel]]:
    """A data set and a model ready to train, within a process group. Collective."""
    rank = Rank.from_environment()
    with process_group(rank, device):
        dataset = open_dataset(config, device)
        yield dataset, build(config, dataset.schema, device)


def assembled(by_rank: list[Pieces], key: str) -> Tensor:
    """The whole [rows, columns] tensor, of a plan that does not cut rows."""
    pieces = sorted(((at, tensor) for pieces in by_rank for at, tensor in pieces.get(key, [])), key=lambda piece: piece[0])
    assert all(at[0] == 0 for at, _ in pieces)
    return torch.cat([tensor for _, tensor in pieces], dim=1)


def whole(by_rank: list[Pieces], key: str) -> Tensor:
    """The whole [rows, columns] tensor, of any plan."""
    pieces = [piece for pieces in by_rank for piece in pieces.get(key, [])]
    rows, columns = (max(at[dim] + piece.shape[dim] for at, piece in pieces) for dim in (0, 1))
    table = torch.full((rows, columns), torch.nan)
    for (row, column), piece in pieces:
        table[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
    return table


def metrics(run: Path, kind: str) -> list[Mapping[str, Any]]:
    """The lines of metrics.jsonl of a kind, ``train`` or ``evaluation``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step, as metrics.jsonl has it."""
    return {line["step"]: line["loss"] for line in metrics(run, "train")}


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def assert_same_run(run: Path, reference: Path, steps: int) -> None:
    """Compare so many losses, and the AUC of the test split, up to rounding."""
    assert list(losses(run)) == list(range(1, steps + 1))
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5, abs=0)
    assert summary(run)["test_auc"] == pytest.approx(summary(reference)["test_auc"], abs=1e-5)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a program ended: the exit status of each, all that they printed, and the seconds from their start."""

    statuses: list[int]
    output: str
    seconds: float


def run_script(ranks: int, script: Path, arguments: Sequence[str], folder: Path, timeout: float) -> Ended:
    """Run a script of the repository, such as train.py, as ``__main__`` in so many processes, in ``folder``.

    A rank that is still there after ``timeout`` seconds is killed: its status is then negative.
    """
    return run_program(ranks, folder, timeout, be_script, script, arguments)


def be_script(script: Path, arguments: Sequence[str]) -> None:
    """Be a script, as Python's command line would run it."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def run_program(ranks: int, folder: Path, timeout: float, main: Callable[..., None], *arguments: Any) -> Ended:
    """Run ``main(*arguments)`` as the whole program of so many processes. Otherwise like :func:`run_script`.

    A process that is about to be killed after ``timeout`` seconds first writes where its threads are.
    """
    began = time.monotonic()
    started = Ranks(ranks, _be_rank_of_program, folder, began + 0.95 * timeout, main, arguments)
    for process in started.processes:
        process.join(max(0.0, began + timeout - time.monotonic()))
    seconds = time.monotonic() - began
    started.kill()
    outputs = [path.read_text() for path in sorted(folder.glob("output_of_rank_*"))]
    return Ended([cast(int, process.exitcode) for process in started.processes], "".join(outputs), seconds)


def _be_rank_of_program(folder: Path, deadline: float, main: Callable[..., None], arguments: Sequence[Any]) -> None:
    output = folder / f"output_of_rank_{os.environ['RANK']}"
    output.unlink(missing_ok=True)  # of an earlier program in this folder
    faulthandler.dump_traceback_later(max(1.0, deadline - time.monotonic()), file=2)
    _be_program(folder, output, output, main, arguments)


def run_alone(folder: Path, main: Callable[..., None], *arguments: Any, timeout: float = 240.0) -> CompletedProcess[str]:
    """Run ``main(*arguments)`` in ``folder`` as the whole program of a process without torchrun.

    What it leaves is that of ``subprocess.run``, sooner: nothing is imported anew. A program that is still there after
    ``timeout`` seconds is killed.
    """
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = Path(outputs, "stdout"), Path(outputs, "stderr")
        started = start_alone(folder, stdout, stderr, main, *arguments)
        started.processes[0].join(timeout)
        started.kill()
        return CompletedProcess(arguments, cast(int, started.processes[0].exitcode), stdout.read_text(), stderr.read_text())


def start_alone(folder: Path, stdout: Path, stderr: Path, main: Callable[..., None], *arguments: Any) -> Ranks:
    """Start what :func:`run_alone` runs; its output goes to files."""
    return Ranks(1, _be_alone, folder, stdout, stderr, main, arguments)


def _be_alone(folder: Path, stdout: Path, stderr: Path, main: Callable[..., None], arguments: Sequence[Any]) -> None:
    for name in _torchrun(0, 1, 0):
        del os.environ[name]
    _be_program(folder, stdout, stderr, main, arguments)


def _be_program(folder: Path, stdout: Path, stderr: Path, main: Callable[..., None], arguments: Sequence[Any]) -> None:
    os.chdir(folder)
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    # As in a fresh process.
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    status = 0
    try:
        main(*arguments)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
