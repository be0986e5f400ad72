"""Evaluate a run: ``python eval.py --run runs/quickstart [--checkpoint best|last|STEP] [--split test]``.

Prints a table and writes ``eval.json`` into the run's folder. Any number of processes will do, whatever the run was trained
with: ``torchrun --standalone --nproc-per-node=2 -- eval.py --run ...`` (without ``--``, torchrun takes ``--run`` for one of its
own options). ``key=value`` overrides such as ``embedding.sharding=row_wise`` change how the run is evaluated.

``--online`` scores requests of one user and 1 to 64 candidates instead, against kept histories (``model.kind=transformer``); it
prints latencies and writes ``online.json``.
"""

import argparse
from pathlib import Path

from dlrm_fused.config import Split
from dlrm_fused.training.runtime import ArgumentParser, ErrorStore, Rank, run_with_error_reporting
from dlrm_fused.versions import check_versions


def main(rank: Rank, board: ErrorStore) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder of the run, such as runs/quickstart")
    parser.add_argument("--checkpoint", default="last", help="best, last or a step (default: last)")
    parser.add_argument("--split", default="test", choices=[split.name for split in Split])
    parser.add_argument("--predictions", type=Path, help="also write the predictions to this Parquet file")
    parser.add_argument("--online", action="store_true", help="score requests online, and time them")
    parser.add_argument("--requests", type=int, default=200, help="with --online: of each number of candidates (default: 200)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run")
    arguments = parser.parse_args()
    check_versions()
    run, checkpoint, split = arguments.run, arguments.checkpoint, Split[arguments.split]
    # Not above: of packages that do not belong together, the imports may fail already.
    if arguments.online:
        from dlrm_fused.training.online_evaluation import score_run_online

        if arguments.predictions or arguments.requests < 1:
            parser.error("--online takes no --predictions, and --requests of 1 or more")
        score_run_online(run, checkpoint, split, arguments.overrides, arguments.requests, rank, board)
    else:
        from dlrm_fused.training.offline_evaluation import evaluate_run

        evaluate_run(run, checkpoint, split, arguments.overrides, arguments.predictions, rank, board)


if __name__ == "__main__":
    run_with_error_reporting(main)
