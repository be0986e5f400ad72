"""A data source of one's own: two ids, and whether their sum is even."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.data_settings import rows_of_tables
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature

ROWS = (100, 50)
SAMPLES = {Split.train: 4096, Split.validation: 512, Split.test: 512}


class ParityDataset:
    generator_device = None  # samples are made in host memory, by the threads of the loader

    def __init__(self, rows: list[int]) -> None:
        names = ("left", "right")
        features = tuple(SparseFeature(name, count) for name, count in zip(names, rows, strict=True))
        self.schema = DatasetSchema(dense_features=("one",), sparse_features=features)

    def samples(self, split: Split) -> int:
        return SAMPLES[split]

    def read(self, split: Split, rows: Tensor) -> Samples:
        """The samples at positions ``rows``, [b] int64."""
        features = self.schema.sparse_features
        ids = [rows * (i + 1) % feature.rows for i, feature in enumerate(features)]
        sparse = KeyedJaggedTensor(
            keys=[feature.name for feature in features],
            values=torch.cat(ids).int(),  # all ids of the first feature, then all of the second
            lengths=torch.ones(len(features) * len(rows), dtype=torch.int32),  # one id for each sample
        )
        return Samples(dense=torch.ones(len(rows), 1), sparse=sparse, labels=(sum(ids) % 2 == 0).float())


def open_parity(config: Config, device: torch.device) -> ParityDataset:
    return ParityDataset(rows_of_tables(config, ROWS))
