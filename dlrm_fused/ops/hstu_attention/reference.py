"""The attention of HSTU in plain torch, differentiable; it also trains on CPUs.

A query at place i of its sample, with s_ij = scale * <q_i, k_j> + bias_ij, gets

    o_i = 1 / divisor * sum over the places j that i sees of silu(s_ij) * v_j,        silu(s) = s / (1 + exp(-s)).

Nothing is normalized over j, as a softmax would: how much of something there was in a history stays visible. The sum grows
with the number of places, hence the divisor.

Source: Zhai et al., *Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations*, arXiv 2402.17152, equation 2.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Columns of a table of biases by time.
BUCKETS = 64
# Samples of like length are padded together, in so many groups by the type of a device. Lengths on a GPU are not known to the
# host, so there all samples are one group.
_GROUPS = {"cpu": 4}


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
    groups = _groups(batch)
    query_slots = _slots(batch.query_bounds, groups, [group.queries for group in groups], queries.shape[0])
    key_slots = _slots(batch.key_bounds, groups, [group.keys for group in groups], keys.shape[0])
    bias = bias or RelativeBias()
    padded_queries = _padded(queries, query_slots, [(group.samples.shape[0], group.queries) for group in groups])
    shapes = [(group.samples.shape[0], group.keys) for group in groups]
    padded_keys, padded_values = _padded(keys, key_slots, shapes), _padded(values, key_slots, shapes)
    padded_times = [None] * len(groups) if bias.times is None else _padded(bias.times, key_slots, shapes)
    attended, targets = [], batch.targets_from
    for group, *rows, times in zip(groups, padded_queries, padded_keys, padded_values, padded_times, strict=True):
        query, key, value = (x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32)) for x in rows)
        places = batch.first_places.index_select(0, group.samples)[:, None] + torch.arange(group.queries, device=key.device)
        scores = query @ key.mT * scale  # [samples, heads, queries, keys]
        for added in _biases(
            bias, places, times, group.keys, None if targets is None else targets.index_select(0, group.samples)
        ):
            scores = scores + added.to(scores.dtype)
        shares = F.silu(scores).masked_fill(~_visible(batch, group, places)[:, None], 0)
        attended.append((shares @ value / divisor).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, query_slots).to(values.dtype)


def _visible(batch: JaggedQueries, group: _Group, places: Tensor) -> Tensor:
    """Return which keys the queries at places [samples, queries] see, bool [samples, queries, keys]."""
    i, j = places[:, :, None], torch.arange(group.keys, device=places.device)
    if batch.targets_from is None:
        return j <= i
    return (j <= i) & ((j < batch.targets_from.index_select(0, group.samples)[:, None, None]) | (j == i))


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


class _Group(NamedTuple):
    """Samples [of the group] that are padded together, each to so many rows of queries and of keys."""

    samples: Tensor
    queries: int
    keys: int


def _groups(batch: JaggedQueries) -> list[_Group]:
    device = batch.key_bounds.device
    count = _GROUPS.get(device.type, 1)
    if count == 1 or torch.compiler.is_compiling() or torch.compiler.is_exporting() or batch.samples <= count:
        return [_Group(torch.arange(batch.samples, device=device), batch.most, batch.longest)]
    of_keys, of_queries = batch.key_bounds.diff(), batch.query_bounds.diff()
    parts = of_keys.argsort(stable=True).chunk(count)
    return [_Group(samples, int(of_queries[samples].max()), int(of_keys[samples].max())) for samples in parts]


def _slots(bounds: Tensor, groups: list[_Group], lengths: list[int], rows: int) -> Tensor:
    """Return the padded row of each row, int64 [rows]; groups follow each other, each with its samples of equal length."""
    counts = bounds.diff().long()
    starts = torch.zeros_like(counts)
    ends = itertools.accumulate(group.samples.shape[0] * length for group, length in zip(groups, lengths, strict=True))
    for group, length, end in zip(groups, lengths, ends, strict=True):
        numbers = torch.arange(group.samples.shape[0], device=bounds.device)
        starts = starts.index_copy(0, group.samples, numbers * length + (end - group.samples.shape[0] * length))
    shifts = starts - bounds[:-1]
    return torch.arange(rows, device=bounds.device) + shifts.repeat_interleave(counts, output_size=rows)


def _padded(x: Tensor, slots: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Return the rows [n, ...] of each group's samples, [samples, rows of the longest, ...], with zeros for padding."""
    sizes = [samples * rows for samples, rows in shapes]
    padded = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, slots, x)
    return [part.unflatten(0, shape) for part, shape in zip(padded.split(sizes), shapes, strict=True)]
