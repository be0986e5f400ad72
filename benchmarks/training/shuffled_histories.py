"""train.py on samples whose histories are in random order: how much a model reads from the order of a history.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.training.shuffled_histories --config configs/hstu_movielens.yaml

Arguments are those of train.py, for a prepared set with histories. In all splits the past interactions of a sample change
places, drawn by its row; the candidate stays the last, and times stay in order.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from dlrm_fused.cli import train_command
from dlrm_fused.config import Split
from dlrm_fused.datasets.batch import Samples, select_bags
from dlrm_fused.datasets.prepared import PreparedDataset


def read_shuffled(dataset: PreparedDataset, split: Split, rows: Tensor) -> Samples:
    """Return what ``PreparedDataset.read`` does, with the interactions of each history in random order."""
    samples = _read(dataset, split, rows)
    assert samples.tokens is not None
    assert samples.history_lengths is not None
    tokens = dataset.schema.history_length + 1
    orders = []
    for number, (row, length) in enumerate(zip(rows.tolist(), samples.history_lengths.tolist(), strict=True)):
        shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(row))
        orders.append(number * tokens + torch.cat((shuffled, torch.arange(length, tokens))))
    samples.tokens = select_bags(samples.tokens, torch.cat(orders))
    return samples


_read = PreparedDataset.read

if __name__ == "__main__":
    PreparedDataset.read = read_shuffled  # type: ignore[assignment, method-assign]
    train_command(sys.argv[1:])
