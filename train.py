"""Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml [key=value ...]``."""

from dlrm_fused.config import load_config
from dlrm_fused.training.runtime import ArgumentParser, ErrorStore, Rank, run_with_error_reporting
from dlrm_fused.versions import check_versions


def main(rank: Rank, board: ErrorStore) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    check_versions()
    # Not above: of packages that do not belong together, the import may fail already.
    from dlrm_fused.training.trainer import train

    train(config, rank, board)


if __name__ == "__main__":
    run_with_error_reporting(main)
