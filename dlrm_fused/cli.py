"""Training, evaluating and exporting runs: as functions, and as the commands ``dlrm-fused train``, ``eval`` and ``export``.

``train`` and ``evaluate`` are called on all ranks of a run, that is in every process that torchrun has started, or in one
process without torchrun; an export runs in one process. train.py, eval.py and export.py call the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dlrm_fused.config import Split, load_config
from dlrm_fused.errors import ConfigError
from dlrm_fused.launcher import end_with_torchrun, torchrun
from dlrm_fused.paths import user_path
from dlrm_fused.versions import check_versions

if TYPE_CHECKING:
    from dlrm_fused.training.runtime import ErrorStore, Rank

# Modules that need torch are imported inside of functions: `prepare` does without them, and so do its many processes. The
# trainer is imported after the check of versions: of packages that do not belong together, the import may fail already.

TRAIN = """\
Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config
configs/quickstart.yaml [key=value ...]``.\
"""

EVALUATE = """\
Evaluate a run: ``python eval.py --run runs/quickstart [--checkpoint best|last|STEP] [--split test]``.

Prints a table and writes ``eval.json`` into the run's folder. Any number of processes will do, whatever the run was trained
with: ``torchrun --standalone --nproc-per-node=2 -- eval.py --run ...`` (without ``--``, torchrun takes ``--run`` for one of its
own options). ``key=value`` overrides such as ``embedding.sharding=row_wise`` change how the run is evaluated.

``--online`` scores requests of one user and 1 to 64 candidates instead, against kept histories (``model.kind=transformer`` and
``hstu``); it prints how far the scores are from those of the full model, and writes ``online.json``.
"""

EXPORT = """\
Export a run: ``python export.py --run runs/quickstart --output model [--tables fp32|fp16|int8]``.

Writes a folder that ``model/loader.py`` predicts with; that needs torch and NumPy alone. Prints the AUC on the test set beside
that of the model with tables in fp32. One process will do, whatever the run was trained with.
"""

COMMANDS = """\
usage: dlrm-fused {train,eval,export,prepare,torchrun} ...

  train     train a model on this rank; on several: dlrm-fused torchrun --nproc-per-node=2 train.py ...
  eval      evaluate a run, or time online scoring with it
  export    write a model that torch and NumPy alone predict with
  prepare   prepare a data set
  torchrun  torchrun, with its arguments; SIGTERM ends it without a traceback, and with status 143

`dlrm-fused COMMAND --help` lists the arguments of each.\
"""


def train(config: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train the run that a YAML file describes, or continue it; the results lie in its folder. Collective.

    An error ends this process with status 1, and those of all other ranks, after one of them has said what is wrong.

    Args:
        config: the file; see configs/.
        overrides: ``key=value`` settings that replace those of the file.
    """
    from dlrm_fused.training.runtime import run_with_error_reporting

    run_with_error_reporting(lambda rank, error_store: _train(rank, error_store, config, overrides))


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
        lambda rank, error_store: _evaluate(rank, error_store, Path(run), checkpoint, Split[split], overrides, *paths)
    )


def main() -> int:
    """Run the command ``dlrm-fused`` and return its exit code."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name == "prepare":
        from dlrm_fused.datasets.preparation.cli import main as prepare

        return prepare(arguments, "dlrm-fused prepare")
    if name == "torchrun":
        return torchrun(arguments)
    commands = {"train": train_command, "eval": evaluate_command, "export": export_command}
    if name in commands:
        commands[name](arguments, f"dlrm-fused {name}")
        return 0
    asks_for_help = name in ("-h", "--help")
    print(COMMANDS, file=sys.stdout if asks_for_help else sys.stderr)
    return 0 if asks_for_help else 2


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong arguments, so that ``run_with_error_reporting`` tells the user on one rank only."""

    def __init__(self, program: str | None, description: str) -> None:
        super().__init__(program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")

    def add_run(self) -> None:
        self.add_argument("--run", required=True, type=user_path, help="folder of the run, such as runs/quickstart")
        self.add_argument("--checkpoint", default="last", help="best, last or a step (default: last)")

    def add_overrides(self, of: str) -> None:
        self.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings that replace those of the {of}")

    def run(self, arguments: Sequence[str] | None, work: Callable[[Rank, ErrorStore, argparse.Namespace], None]) -> None:
        """Do the work of a command on this rank; an error ends all ranks with one message.

        Args:
            arguments: of the command; None: those of this process.
            work: called with the parsed arguments.
        """
        if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
            self.print_help()  # before torch is imported, which takes seconds
            self.exit()
        end_with_torchrun()
        from dlrm_fused.training.runtime import run_with_error_reporting

        run_with_error_reporting(lambda rank, error_store: work(rank, error_store, self.parse_intermixed_args(arguments)))


def train_command(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Train as ``arguments`` say, by default those of this process; an error ends all ranks with one message."""
    parser = _Parser(program, TRAIN)
    parser.add_argument("--config", required=True, type=user_path, help="YAML file, see configs/")
    parser.add_overrides("file")
    parser.run(arguments, lambda rank, error_store, parsed: _train(rank, error_store, parsed.config, parsed.overrides))


def evaluate_command(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Evaluate as ``arguments`` say, by default those of this process; an error ends all ranks with one message."""
    parser = _Parser(program, EVALUATE)
    parser.add_run()
    parser.add_argument("--split", default="test", choices=[split.name for split in Split])
    parser.add_argument("--predictions", type=user_path, help="also write the predictions to this Parquet file")
    parser.add_argument("--output", type=user_path, help="the JSON file of the table (default: eval.json in the run's folder)")
    parser.add_argument("--online", action="store_true", help="compare online scores with the full model's")
    parser.add_argument("--requests", type=int, default=4, help="with --online: samples that are compared (default: 4)")
    parser.add_overrides("run")

    def work(rank: Rank, error_store: ErrorStore, parsed: argparse.Namespace) -> None:
        run, checkpoint, split, overrides = parsed.run, parsed.checkpoint, Split[parsed.split], parsed.overrides
        if not parsed.online:
            _evaluate(rank, error_store, run, checkpoint, split, overrides, parsed.predictions, parsed.output)
            return
        if parsed.predictions or parsed.requests < 1:
            parser.error("--online takes no --predictions, and --requests of 1 or more")
        check_versions()
        from dlrm_fused.inference.online.evaluation import score_run_online

        score_run_online(run, checkpoint, split, overrides, parsed.requests, rank, error_store, parsed.output)

    parser.run(arguments, work)


def export_command(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Export as ``arguments`` say, by default those of this process; an error ends the process with one message."""
    parser = _Parser(program, EXPORT)
    parser.add_run()
    parser.add_argument("--output", required=True, type=user_path, help="the folder to write, which must not exist")
    parser.add_argument(
        "--tables", default="fp32", choices=["fp32", "fp16", "int8"], help="their number format (default: fp32)"
    )
    parser.add_argument("--split", default="test", choices=[split.name for split in Split], help="for the AUC (default: test)")
    parser.add_overrides("run")
    parser.run(arguments, lambda rank, _, parsed: _export(rank, parsed))


def _train(rank: Rank, error_store: ErrorStore, config: str | Path, overrides: Sequence[str]) -> None:
    checked = load_config(config, overrides)
    check_versions()
    from dlrm_fused.training import trainer

    trainer.train(checked, rank, error_store)


def _evaluate(
    rank: Rank,
    error_store: ErrorStore,
    run: Path,
    checkpoint: str,
    split: Split,
    overrides: Sequence[str],
    predictions: Path | None,
    output: Path | None,
) -> None:
    check_versions()
    from dlrm_fused.training.offline_evaluation import evaluate_run

    evaluate_run(run, checkpoint, split, overrides, predictions, rank, error_store, output)


def _export(rank: Rank, parsed: argparse.Namespace) -> None:
    """Write an exported model, and print how its AUC compares with that in fp32."""
    if rank.world_size > 1:
        raise ConfigError(f"{rank.world_size} processes: an export runs in one; start it without torchrun")
    check_versions()
    from dlrm_fused.inference.export.folder import export_run

    split = Split[parsed.split]
    quality = export_run(parsed.run, parsed.checkpoint, parsed.output, parsed.tables, split, parsed.overrides)
    print(f"{parsed.output}: tables in {parsed.tables}")
    for label, each in quality.items():
        of_label = f" of {label}" if len(quality) > 1 else ""
        print(f"AUC{of_label} of {each.samples} {each.split} samples: {each.auc:.6f}; in fp32: {each.auc_fp32:.6f}")
        print(f"difference of AUC{of_label}: {each.auc_difference:+.6f}")
