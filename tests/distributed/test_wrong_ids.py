"""Ids that no table has, with the fused path: FBGEMM replaces them by 0, in place; results are those of TorchRec's sharder."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.ops.embedding_all_to_all import DistinctRows
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import on_hosts, run_ranks
from tests.distributed.test_fused_sharder import ADAGRAD, CPU, ROWS, Table, World, build, tables_of

TWO_HOSTS = (0, 1)
WORLD = World(((Table("table_wise", 4, rank=1), Table("table_wise", 4, rank=0)),), batch_sizes=(3, 3))
# Gradients of a batch's bags; each rank counts a half of them.
GRADIENTS = (10.0, 20.0, 30.0)
# No row of either table.
BEYOND = ROWS + 1
FAR = 1 << 40


Ids = list[list[int]]  # of a rank's batch, by feature


def train_on(ids: list[Ids]) -> tuple[list[Tensor], list[Tensor], bool]:
    """A step on this rank's batch, by our sharder and TorchRec's: the output, the local table and its momentum.

    The last result: whether rows that several bags have were sent to the other host once.
    """
    results, rank = [], int(os.environ["RANK"])
    ours, torchrecs = FusedEmbeddingBagCollectionSharder(dict(ADAGRAD)), EmbeddingBagCollectionSharder(dict(ADAGRAD))
    with process_group(Rank.from_environment(), CPU), mock.patch.object(DistinctRows, "of", wraps=DistinctRows.of) as found:
        for sharder in (ours, torchrecs):
            model = build(WORLD, sharder)
            values, lengths = torch.tensor(ids[rank]).flatten(), torch.ones(6, dtype=torch.int64)
            features = KeyedJaggedTensor(["feature_0", "feature_1"], values, lengths=lengths)
            output = get_unwrapped_module(model).collections[0](features).values()
            (output * torch.tensor(GRADIENTS)[:, None]).sum().backward()
            results.append([output.detach().clone(), *tables_of(model)])
    return results[0], results[1], found.called


@pytest.mark.parametrize("wrong", [BEYOND, FAR, 3 * FAR + 7, -2, -FAR])
def test_between_hosts_each_sample_gets_its_own_embedding_and_each_row_its_own_update(wrong: int) -> None:
    ids = [[[5, 7, wrong], [5, wrong, 5]], [[wrong, 7, 0], [1, 2, wrong]]]
    for ours, torchrecs, is_sent_once in run_ranks(2, on_hosts, TWO_HOSTS, train_on, ids):
        assert is_sent_once
        assert all(map(torch.equal, ours, torchrecs))


def test_between_hosts_momentum_counts_the_gradients_of_its_own_rows() -> None:
    ids = [[[5, 7, BEYOND], [1, 1, 1]], [[9, 9, 9]] * 2]
    _, ((_, _, momentum), _, _) = run_ranks(2, on_hosts, TWO_HOSTS, train_on, ids)
    assert momentum[[5, 7, 0]].tolist() == [(gradient / 2) ** 2 for gradient in GRADIENTS]
