"""Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml [key=value ...]``."""

import argparse

from dlrm_fused.config import load_config
from dlrm_fused.training.runtime import FailureBoard, Rank, run_together
from dlrm_fused.training.trainer import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    arguments = parser.parse_args()

    def work(rank: Rank, board: FailureBoard) -> None:
        train(load_config(arguments.config, arguments.overrides), rank, board)

    run_together(work)


if __name__ == "__main__":
    main()
