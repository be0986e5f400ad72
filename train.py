"""Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml [key=value ...]``."""

from dlrm_fused.config import load_config
from dlrm_fused.training.runtime import ArgumentParser, FailureBoard, Rank, run_together
from dlrm_fused.training.trainer import train


def main(rank: Rank, board: FailureBoard) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    arguments = parser.parse_args()
    train(load_config(arguments.config, arguments.overrides), rank, board)


if __name__ == "__main__":
    run_together(main)
