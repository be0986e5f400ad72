"""Makes requests for online scoring of the samples of a data set with histories."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.datasets.batch import Batch, Samples
from dlrm_fused.inference.online.scorer import Candidates


class RequestSamples:
    """Takes samples of a data set with histories apart into histories and candidates, on the CPU."""

    def __init__(self, samples: Samples, history_length: int) -> None:
        assert samples.tokens is not None
        assert samples.history_lengths is not None
        cpu = torch.device("cpu")
        self._dense, self._sparse, self._tokens = samples.dense.to(cpu), samples.sparse.to(cpu), samples.tokens.to(cpu)
        self._labels_shape = samples.labels.shape[1:]
        self._history_lengths = samples.history_lengths.to(cpu).long()
        self._tokens_of_sample = history_length + 1

    def __len__(self) -> int:
        return len(self._dense)

    def longest_bag(self) -> int:
        """Return the most ids of a bag, 1 at least."""
        return max(1, int(self._tokens.lengths().max()), int(self._sparse.lengths().max()))

    def history(self, sample: int) -> KeyedJaggedTensor:
        """Return the interactions of a sample's history, oldest first."""
        first = sample * self._tokens_of_sample
        return _select(self._tokens, torch.arange(first, first + int(self._history_lengths[sample])))

    def candidates(self, sample: int, count: int) -> Candidates:
        """Return ``count`` candidates: those of a sample and of the samples after it."""
        chosen = torch.arange(sample, sample + count) % len(self)
        tokens = chosen * self._tokens_of_sample + self._history_lengths[chosen]
        return Candidates(self._dense[chosen], _select(self._sparse, chosen), _select(self._tokens, tokens))

    def batch(self, count: int) -> Batch:
        """Return the first samples as they are, for the full model; without labels."""
        return Batch(
            dense=self._dense[:count],
            sparse=_select(self._sparse, torch.arange(count)),
            labels=torch.zeros(count, *self._labels_shape),
            weights=torch.ones(count),
            global_size=count,
            tokens=_select(self._tokens, torch.arange(count * self._tokens_of_sample)),
            history_lengths=self._history_lengths[:count],
            sample_weights=torch.ones(count),
        )


def _select(bags: KeyedJaggedTensor, chosen: Tensor) -> KeyedJaggedTensor:
    """Return some bags of each key."""
    keys = bags.keys()
    lengths = bags.lengths().view(len(keys), -1)[:, chosen].flatten().long()
    starts = bags.offsets()[:-1].view(len(keys), -1)[:, chosen].flatten().long()
    # Places count from each bag's start.
    shifts = starts - pad(lengths.cumsum(0), (1, 0))[:-1]
    places = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
    return KeyedJaggedTensor(keys=keys, values=bags.values()[places], lengths=lengths.int(), stride=len(chosen))
