"""Train a model: ``torchrun --standalone --nproc-per-node=2 train.py --config configs/quickstart.yaml [key=value ...]``."""

from dlrm_fused.cli import train_command

if __name__ == "__main__":
    train_command()
