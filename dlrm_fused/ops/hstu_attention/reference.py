"""The attention of HSTU in plain torch, differentiable; it also trains on CPUs.

A query at place i of its sample, with s_ij = scale * <q_i, k_j> + bias_ij, gets

    o_i = 1 / divisor * sum over the places j that i sees of silu(s_ij) * v_j,        silu(s) = s / (1 + exp(-s)).

Nothing is normalized over j, as a softmax would: how much of something there was in a history stays visible. The sum grows
with the number of places, hence the divisor.

Source: Zhai et al., *Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations*, arXiv 2402.17152, equation 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrm_fused.ops.common.padding import Padding, groups_of_like_length

# Columns of a table of biases by time.
BUCKETS = 64


class JaggedQueries(NamedTuple):
    """The rows of b samples' queries, keys and values, one sample after the other, and which keys each query sees.

    The place of a key is its number among its sample's keys. A query has the place of one of them, and sees the places up to
    its own.

    Attributes:
        key_bounds: int32 or int64 [b + 1], where the rows of keys and values of each sample begin: from 0 to n.
        query_bounds: the same of queries, from 0 to m; a sample has at most as many queries as keys, maybe none of both.
        first_places: int32 or int64 [b], the place of each sample's first query; its queries follow each other.
        longest: no sample has more keys.
        targets_from: int32 or int64 [b], or None: places from this one on are candidates. Each sees the places before
            ``targets_from``, and itself, but not another candidate; for biases by distance all of them are at this place.
        most_queries: no sample has more queries; None: as many as ``longest``.
    """

    key_bounds: Tensor
    query_bounds: Tensor
    first_places: Tensor
    longest: int
    targets_from: Tensor | None = None
    most_queries: int | None = None

    @staticmethod
    def among_all(bounds: Tensor, longest: int) -> JaggedQueries:
        """Return the batch in which each row is a query, a key and a value, as in training."""
        return JaggedQueries(bounds, bounds, torch.zeros_like(bounds[1:]), longest)

    @property
    def samples(self) -> int:
        """The number of samples, b."""
        return self.first_places.shape[0]

    @property
    def most(self) -> int:
        """The rows of queries that a sample may have."""
        return self.longest if self.most_queries is None else min(self.longest, self.most_queries)


class RelativeBias(NamedTuple):
    """Biases of scores, by how far two places and two times lie apart. Either may be left out; gradients flow into both.

    Attributes:
        by_distance: [heads, P], P at least the longest sample, of any floating dtype: ``by_distance[head, i - j]`` is added to
            the score of place i for place j.
        by_time: [heads, BUCKETS], of any floating dtype: so is ``by_time[head, time_buckets(times[i] - times[j])]``.
        times: int64 [n], the seconds of each row of keys. Those of a sample lie less than 2^31 seconds (68 years) apart.
    """

    by_distance: Tensor | None = None
    by_time: Tensor | None = None
    times: Tensor | None = None


def time_buckets(seconds: Tensor) -> Tensor:
    """Return the bucket of each difference of times, two buckets an octave: 0 up to 1 second, 1 for 2^0.585 (1.5) and more,
    2 for 2, 3 for 3, 4 for 4, 5 for 6, and so on.

    The paper's code takes 128 buckets whose bounds are powers of 1.35, by a logarithm, which differs in its last bits between
    devices. These are read off the bits of the float32: its exponent and the first bit of its fraction. So kernels and torch
    agree exactly, for less than 2^31 seconds.

    Args:
        seconds: of any integer dtype and shape; less than 1 counts as 1.

    Returns:
        int32 of the same shape, below BUCKETS.
    """
    return ((seconds.clamp(min=1).float().view(torch.int32) >> 22) - 254).clamp(max=BUCKETS - 1)


def reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: JaggedQueries,
    *,
    scale: float,
    divisor: float,
    bias: RelativeBias | None = None,
) -> Tensor:
    """Compute the attention of padded samples, see :func:`~dlrm_fused.ops.hstu_attention.op.hstu_attention`.

    Operands of 16 bits are multiplied in float32, those of 64 bits as they are.
    """
    groups = groups_of_like_length(batch.key_bounds.diff())
    of_queries = Padding.of(batch.query_bounds.diff(), groups, batch.most, queries.shape[0])
    of_keys = Padding.of(batch.key_bounds.diff(), groups, batch.longest, keys.shape[0])
    bias = bias or RelativeBias()
    padded = of_queries.pad(queries), of_keys.pad(keys), of_keys.pad(values)
    padded_times = [None] * len(groups) if bias.times is None else of_keys.pad(bias.times)
    attended = []
    for samples, *rows, times in zip(groups, *padded, padded_times, strict=True):
        query, key, value = (x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32)) for x in rows)
        places = batch.first_places.index_select(0, samples)[:, None] + torch.arange(query.shape[2], device=key.device)
        targets = None if batch.targets_from is None else batch.targets_from.index_select(0, samples)
        scores = query @ key.mT * scale  # [samples, heads, queries, keys]
        for added in _biases(bias, places, times, key.shape[2], targets):
            scores = scores + added.to(scores.dtype)
        shares = F.silu(scores).masked_fill(~_visible(places, key.shape[2], targets)[:, None], 0)
        attended.append((shares @ value / divisor).transpose(1, 2))
    return of_queries.rows_of(attended).to(values.dtype)


def _visible(places: Tensor, keys: int, targets: Tensor | None) -> Tensor:
    """Return which keys the queries at places [samples, queries] see, bool [samples, queries, keys].

    Args:
        targets: [samples], the place of the first candidate; None: there are none.
    """
    i, j = places[:, :, None], torch.arange(keys, device=places.device)
    return j <= i if targets is None else (j <= i) & ((j < targets[:, None, None]) | (j == i))


def _biases(bias: RelativeBias, places: Tensor, times: Tensor | None, keys: int, targets: Tensor | None) -> list[Tensor]:
    """Return the biases of the queries at places [samples, queries] for all keys, each [samples, heads, queries, keys].

    Args:
        times: [samples, keys].
        targets: [samples], the place of the first candidate; None: there are none.
    """
    # A padded query is at the last place or beyond, where nobody reads what is added.
    found, i, j = [], places.clamp(max=max(keys - 1, 0)), torch.arange(keys, device=places.device)
    if bias.by_distance is not None:
        to, of = (i, j) if targets is None else (i.minimum(targets[:, None]), j.minimum(targets[:, None]))
        found.append(_looked_up(bias.by_distance, (to.unsqueeze(-1) - of.unsqueeze(-2)).clamp(min=0)))
    if bias.by_time is not None and times is not None:
        buckets = time_buckets(times.gather(1, i.long())[:, :, None] - times[:, None, :])
        found.append(_looked_up(bias.by_time, buckets))
    return found


def _looked_up(table: Tensor, columns: Tensor) -> Tensor:
    """Return the columns [samples, queries, keys] of a table [heads, C]: [samples, heads, queries, keys].

    On CPUs this is much faster than an embedding of short rows, above all backward.
    """
    heads = table.shape[0]
    flat = table.gather(1, columns.long().reshape(1, -1).expand(heads, -1))
    return flat.view(heads, *columns.shape).movedim(0, 1)
