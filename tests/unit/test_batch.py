"""Batches: joining features, and moving as one."""

from dataclasses import replace

import numpy as np
import torch
from torchrec.streamable import Pipelineable

from dlrm_fused.datasets.batch import Batch, sparse_from_features


def _batch() -> Batch:
    single = np.array([4, 5, 6], dtype=np.int32)
    jagged = np.array([7, 8, 9], dtype=np.int32)
    pairs = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)
    sparse = sparse_from_features(["single", "jagged", "pairs"], [single, jagged, pairs], [1, np.array([0, 2, 1]), 2], 3)
    # Of two tokens a sample: the samples have no, one and no interaction before the candidate.
    tokens = sparse_from_features(["token"], [np.array([1, 2, 3, 4], dtype=np.int32)], [np.array([1, 0, 1, 1, 1, 0])], 6)
    lengths = torch.tensor([0, 1, 0], dtype=torch.int32)
    return Batch(
        torch.ones(3, 2), sparse, torch.zeros(3), torch.ones(3), 12, tokens, lengths, torch.ones(3), 4, torch.ones(3, 2).long()
    )


def test_features_are_joined_in_order_with_their_lengths() -> None:
    sparse = _batch().sparse
    assert sparse.keys() == ["single", "jagged", "pairs"]
    assert sparse.values().tolist() == [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert sparse.lengths().tolist() == [1, 1, 1, 0, 2, 1, 2, 2, 2]
    assert (sparse.values().dtype, sparse.lengths().dtype) == (torch.int32, torch.int32)
    assert sparse["jagged"].to_dense()[1].tolist() == [7, 8]
    assert sparse.length_per_key() == [3, 3, 6]
    assert sparse.stride() == 3


def test_a_batch_moves_as_one_and_keeps_its_global_size() -> None:
    batch = _batch()
    assert isinstance(batch, Pipelineable)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert moved.tokens is not None
    assert moved.history_lengths is not None
    assert moved.sample_weights is not None
    assert moved.token_times is not None
    tensors = [moved.dense, moved.sparse.values(), moved.sparse.lengths(), moved.labels, moved.weights]
    tensors += [moved.tokens.values(), moved.tokens.lengths(), moved.history_lengths, moved.sample_weights, moved.token_times]
    assert all(tensor.is_meta for tensor in tensors)
    assert moved.tokens.stride() == 6
    assert (moved.global_size, moved.token_count) == (12, 4)


def test_a_batch_without_tokens_and_weights_moves_likewise() -> None:
    batch = replace(_batch(), tokens=None, history_lengths=None, sample_weights=None)
    moved = batch.to(torch.device("meta"))
    assert moved.dense.is_meta
    assert (moved.tokens, moved.history_lengths, moved.sample_weights) == (None, None, None)
