"""The command ``dlrm-fused``; train.py, eval.py and export.py are its commands ``train``, ``eval`` and ``export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dlrm_fused.config import Split
from dlrm_fused.errors import ConfigError
from dlrm_fused.launcher import end_with_torchrun, torchrun

if TYPE_CHECKING:
    from dlrm_fused.training.runtime import ErrorStore, Rank

# Modules that need torch are imported inside of functions: `prepare` does without them, and so do its many processes.

TRAIN = "Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml [key=value ...]``."

EVALUATE = """\
Evaluate a run: ``python eval.py --run runs/quickstart [--checkpoint best|last|STEP] [--split test]``.

Prints a table and writes ``eval.json`` into the run's folder. Any number of processes will do, whatever the run was trained
with: ``torchrun --standalone --nproc-per-node=2 -- eval.py --run ...`` (without ``--``, torchrun takes ``--run`` for one of its
own options). ``key=value`` overrides such as ``embedding.sharding=row_wise`` change how the run is evaluated.

``--online`` scores requests of one user and 1 to 64 candidates instead, against kept histories (``model.kind=transformer``); it
prints how far the scores are from those of the full model, and writes ``online.json``.
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


def main() -> int:
    """The command ``dlrm-fused``; returns the exit code."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name == "prepare":
        from dlrm_fused.datasets.preparation.cli import main as prepare

        return prepare(arguments, "dlrm-fused prepare")
    if name == "torchrun":
        return torchrun(arguments)
    commands = {"train": train, "eval": evaluate, "export": export}
    if name in commands:
        commands[name](arguments, f"dlrm-fused {name}")
        return 0
    asks_for_help = name in ("-h", "--help")
    print(COMMANDS, file=sys.stdout if asks_for_help else sys.stderr)
    return 0 if asks_for_help else 2


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong arguments, so that ``run_with_error_reporting`` tells the user on one rank only."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")

    def help_if_wanted(self, arguments: Sequence[str] | None) -> None:
        """End with the help if ``arguments`` ask for it, before torch is imported, which takes seconds."""
        if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
            self.print_help()
            self.exit()


def train(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Train as ``arguments`` say, by default those of this process; an error ends all ranks with one message."""
    parser = _Parser(program, description=TRAIN)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.help_if_wanted(arguments)
    end_with_torchrun()
    from dlrm_fused.training.runtime import run_with_error_reporting

    run_with_error_reporting(lambda rank, error_store: _train(rank, error_store, parser, arguments))


def _train(rank: Rank, error_store: ErrorStore, parser: _Parser, arguments: Sequence[str] | None) -> None:
    from dlrm_fused.application import train_on

    parsed = parser.parse_args(arguments)
    train_on(rank, error_store, parsed.config, parsed.overrides)


def evaluate(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Evaluate as ``arguments`` say, by default those of this process; an error ends all ranks with one message."""
    parser = _Parser(program, description=EVALUATE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--checkpoint", default="last", help="best, last or a step (default: last)")
    parser.add_argument("--split", default="test", choices=[split.name for split in Split])
    parser.add_argument("--predictions", type=Path, help="also write the predictions to this Parquet file")
    parser.add_argument("--output", type=Path, help="the JSON file of the table (default: eval.json in the run's folder)")
    parser.add_argument("--online", action="store_true", help="compare online scores with the full model's")
    parser.add_argument("--requests", type=int, default=4, help="with --online: samples that are compared (default: 4)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run")
    parser.help_if_wanted(arguments)
    end_with_torchrun()
    from dlrm_fused.training.runtime import run_with_error_reporting

    run_with_error_reporting(lambda rank, error_store: _evaluate(rank, error_store, parser, arguments))


def _evaluate(rank: Rank, error_store: ErrorStore, parser: _Parser, arguments: Sequence[str] | None) -> None:
    from dlrm_fused.application import evaluate_on

    parsed = parser.parse_args(arguments)
    run, checkpoint, split, overrides = parsed.run, parsed.checkpoint, Split[parsed.split], parsed.overrides
    if not parsed.online:
        evaluate_on(rank, error_store, run, checkpoint, split, overrides, parsed.predictions, parsed.output)
        return
    if parsed.predictions or parsed.requests < 1:
        parser.error("--online takes no --predictions, and --requests of 1 or more")
    from dlrm_fused.versions import check_versions

    check_versions()
    from dlrm_fused.inference.online.evaluation import score_run_online

    score_run_online(run, checkpoint, split, overrides, parsed.requests, rank, error_store, parsed.output)


def export(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Export as ``arguments`` say, by default those of this process; an error ends the process with one message."""
    parser = _Parser(program, description=EXPORT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--output", required=True, type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--checkpoint", default="last", help="best, last or a step (default: last)")
    parser.add_argument(
        "--tables", default="fp32", choices=["fp32", "fp16", "int8"], help="their number format (default: fp32)"
    )
    parser.add_argument("--split", default="test", choices=[split.name for split in Split], help="for the AUC (default: test)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run")
    parser.help_if_wanted(arguments)
    end_with_torchrun()
    from dlrm_fused.training.runtime import run_with_error_reporting

    run_with_error_reporting(lambda rank, _: _export(rank, parser, arguments))


def _export(rank: Rank, parser: _Parser, arguments: Sequence[str] | None) -> None:
    from dlrm_fused.application import export_on

    parsed = parser.parse_args(arguments)
    export_on(rank, parsed.run, parsed.output, parsed.checkpoint, parsed.tables, Split[parsed.split], parsed.overrides)
