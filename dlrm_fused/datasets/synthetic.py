"""Samples generated on the fly, with a planted signal whose best attainable AUC is known.

Every value is a hash of (seed, split, sample, column), so a sample is the same on any rank of any number of ranks, on CPU
and GPU, and any position is reached directly. Up to the probability of the label all arithmetic is on integers, which
round nowhere.

Letters in shapes: b samples, F tables of sample features, P slots (the most ids that a sample has in all of them together),
D dense features, L labels, T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config, Split, SyntheticConfig
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.data_settings import rows_of_tables
from dlrm_fused.datasets.hashing import combine, derive_key, shift_right, split_mix
from dlrm_fused.datasets.schema import LABEL, DatasetSchema, SparseFeature, labels_shape
from dlrm_fused.lasting import lasting
from dlrm_fused.versions import has_c_compiler

# Ids follow an inverse distribution function that is interpolated between 4,096 quantiles, kept in units of 1 / 256 row.
_QUANTILE_BITS = 12
_FRACTION_BITS = 8
_POSITION_BITS = 24
# Effects of a table; ids whose ranks in popularity agree modulo 4,096 share one.
_EFFECT_BITS = 12
_MEAN_BITS = 16
# Items of histories belong to so many groups; a user's responses follow a taste for each.
_GROUPS = 8
_RESPONSES = 2
_GAPS = 32
# Less than 2 ** 21 seconds, 24 days, lie between two tokens.
_SECONDS_BITS = 21
# Tables of which a segment's rule reads the pattern at once; distance of a segment's means from 0 in standard deviations.
_RULE_TABLES = 6
_SEGMENT_MEAN = 3.0
_CALIBRATION_SAMPLES = 16_384
# Drawing so few ids takes less time than launching the kernels that draw them.
_FEW_VALUES = 2**19
# At most so many ids are drawn at once where only their scores are kept, so that opening a set needs little memory.
_MOST_VALUES = 2**21
_MOST_BATCHES_AT_ONCE = 15
# Mean and deviation of each label's scores by what decides them: a program that trains and evaluates opens the same set twice.
_score_statistics: dict[str, list[tuple[float, float]]] = {}


@dataclass(frozen=True)
class AttainableAuc:
    """The AUC of the true probabilities on ``samples`` samples; ``error`` is its standard error."""

    auc: float
    error: float
    samples: int


class SyntheticDataset:
    """Generated samples; a label is 1 with probability sigmoid(logit).

    The logit is the sum, over tables, of the mean effect of the sample's ids, and of linear effects of the dense features,
    shifted and scaled to mean 0 and standard deviation ``settings.signal``. Effects of ids are roughly normal. Popular ids
    occur most, so they explain most. With histories, about as much again comes from the mean of the user's responses to items
    of the candidate's group, which follow a taste for the group that no other feature tells. The times of tokens, and
    ``token_gap``, tell nothing, and do not depend on each other.

    With more than one of ``settings.segments``, dense features tell a sample's segment and nothing else: each is normal around
    a mean of the segment. Tables count by the rule of the segment: which tables of a group of ``_RULE_TABLES`` have a positive
    mean effect decides what the group adds, and every segment has random numbers of its own for these patterns.

    With more than one of ``settings.labels``, each has effects and rules of its own, and is drawn by itself; what a history
    adds is the same for all. The first one is that of a set with one label.

    Args:
        settings: numbers of tables, rows, ids and samples, and the strength of the signal.
        rows: of every table, in order of ``schema.tables``; default: :func:`table_rows`.
    """

    def __init__(self, settings: SyntheticConfig, seed: int, device: torch.device, rows: Sequence[int] | None = None) -> None:
        rows = rows or table_rows(settings)
        self.generator_device = device
        self._samples = {
            Split.train: settings.train_samples,
            Split.validation: settings.validation_samples,
            Split.test: settings.test_samples,
        }
        self._keys = {split: torch.tensor(derive_key(seed, number), device=device) for number, split in enumerate(Split)}
        self._columns = _Columns(settings, rows, seed, device)
        self._layouts: dict[int, _Layout] = {}
        features = tuple(
            SparseFeature(f"table_{i}", rows, (1 + pooling) / 2 if settings.jagged else float(pooling), settings.jagged)
            for i, (rows, pooling) in enumerate(zip(self._columns.rows, self._columns.pooling, strict=True))
        )
        dense = tuple(f"dense_{i}" for i in range(settings.dense_features))
        labels = (LABEL,) if settings.labels == 1 else tuple(f"{LABEL}_{i}" for i in range(settings.labels))
        tokens, length = _token_features(settings, rows), settings.history_length
        self.schema = DatasetSchema(dense, features, tokens, length, labels, has_token_times=length > 0)
        self._names = [feature.name for feature in features]
        self._center, self._scale = torch.tensor(_calibrate(settings, rows, seed), dtype=torch.float64, device=device)
        self._has_equal_samples = not settings.jagged and not settings.history_length

    def samples(self, split: Split) -> int:
        return self._samples[split]

    def read(self, split: Split, rows: Tensor) -> Samples:
        drawn = self._columns.draw(self._keys[split], rows)
        samples = Samples(drawn.dense, self._sparse(drawn), self._labels(drawn))
        if drawn.history is not None:
            samples.tokens = self._tokens(drawn.history)
            samples.history_lengths = drawn.history.lengths.int()
            samples.token_count = samples.tokens.length_per_key()[0]  # every token has an item
            samples.token_times = drawn.history.times()
        return samples

    def batches_at_once(self, batch_size: int) -> int:
        if not self._has_equal_samples:
            return 1
        count = min(_MOST_BATCHES_AT_ONCE, _FEW_VALUES // (batch_size * sum(self._columns.pooling)))
        # Odd, so that who measures every eighth step meets those with this work as often as others.
        return max(1, count - 1 + count % 2)

    def read_batches(self, split: Split, rows: Tensor) -> list[Samples]:
        if len(rows) == 1 or not self._has_equal_samples:
            return [self.read(split, own) for own in rows]
        drawn = self._columns.draw(self._keys[split], rows.flatten())
        labels = self._labels(drawn).unflatten(0, rows.shape)
        layout = self._layout(rows.shape[1])
        dense, ids = (column.view(len(rows), -1) for column in (drawn.dense, drawn.ids))
        values = ids.index_select(1, layout.feature_major)
        shape = rows.shape[1], drawn.dense.shape[1]
        return [
            Samples(own_dense.view(shape), self._of_equal_lengths(own_values, layout), own_labels)
            for own_dense, own_values, own_labels in zip(dense, values, labels, strict=True)
        ]

    def best_attainable_auc(self, split: Split = Split.test, max_samples: int = 2**20, label: int = 0) -> AttainableAuc:
        """Return the AUC of a model that knows the true probabilities, on the first ``max_samples`` samples of a split."""
        samples = min(self._samples[split], max_samples)
        probabilities, labels = [], []
        at_once = _samples_at_once(self.schema.history_length)
        for start in range(0, samples, at_once):
            rows = torch.arange(start, min(start + at_once, samples), device=self.generator_device)
            drawn = self._columns.draw(self._keys[split], rows)
            probabilities.append(self._probability(drawn)[:, label])
            labels.append(drawn.label_uniform[:, label] < probabilities[-1])
        auc, error = auc_with_error(torch.cat(probabilities), torch.cat(labels))
        return AttainableAuc(auc, error, samples)

    def _labels(self, drawn: _Drawn) -> Tensor:
        """Return [b] of one label, else [b, L]."""
        labels = (drawn.label_uniform < self._probability(drawn)).float()
        return labels.view(-1, *labels_shape(self.schema.labels))

    def _probability(self, drawn: _Drawn) -> Tensor:
        """Return [b, L]."""
        return torch.sigmoid((drawn.score.double() - self._center) * self._scale)

    def _sparse(self, drawn: _Drawn) -> KeyedJaggedTensor:
        batch_size = drawn.ids.size(0)
        layout = self._layout(batch_size)
        values = drawn.ids.view(-1).index_select(0, layout.feature_major)
        if drawn.lengths is None or drawn.present is None:
            return self._of_equal_lengths(values, layout)
        present = drawn.present.view(-1).index_select(0, layout.feature_major)
        lengths = drawn.lengths.t().flatten().int()
        return KeyedJaggedTensor(keys=self._names, values=values[present], lengths=lengths, stride=batch_size)

    def _of_equal_lengths(self, values: Tensor, layout: _Layout) -> KeyedJaggedTensor:
        batch_size = len(layout.lengths) // len(self._names)
        return KeyedJaggedTensor(
            keys=self._names,
            values=values,
            lengths=layout.lengths,
            offsets=layout.offsets,
            stride=batch_size,
            length_per_key=[pooling * batch_size for pooling in self._columns.pooling],
        )

    def _tokens(self, drawn: _DrawnHistory) -> KeyedJaggedTensor:
        """Return the history's tokens and the candidate's; the response to the candidate is not told."""
        batch_size, tokens = drawn.ids.shape
        names = [feature.name for feature in self.schema.token_features]
        position = torch.arange(tokens, device=drawn.ids.device)
        before, occupied = position < drawn.lengths.unsqueeze(1), position <= drawn.lengths.unsqueeze(1)
        lengths = torch.stack([occupied, before, occupied]).int().flatten()
        if drawn.all_full:
            values = [drawn.ids.flatten(), drawn.responses[:, :-1].flatten(), drawn.gaps.flatten()]
        else:
            values = [drawn.ids[occupied], drawn.responses[before], drawn.gaps[occupied]]
        return KeyedJaggedTensor(
            keys=names,
            values=torch.cat(values),
            lengths=lengths,
            stride=batch_size * tokens,
            length_per_key=[column.numel() for column in values],
        )

    def _layout(self, batch_size: int) -> _Layout:
        if batch_size not in self._layouts:
            if len(self._layouts) == 4:  # training, evaluation, and their last batches
                self._layouts.clear()
            self._layouts[batch_size] = lasting(_Layout)(self._columns.pooling, batch_size, self.generator_device)
        return self._layouts[batch_size]


@dataclass
class _Drawn:
    """Everything that is random about b samples.

    Attributes:
        dense: [b, D] float32, roughly standard normal.
        ids: [b, P] int32.
        lengths: [b, F] int64 ids of each sample and table; None if all slots are used.
        present: [b, P] bool, the slots in use; None if all are.
        score: [b, L] int64, the logits before shifting and scaling.
        label_uniform: [b, L] float64 in [0, 1), decides the labels.
        history: None without histories.
    """

    dense: Tensor
    ids: Tensor
    lengths: Tensor | None
    present: Tensor | None
    score: Tensor
    label_uniform: Tensor
    history: _DrawnHistory | None


@dataclass
class _DrawnHistory:
    """Everything that is random about the tokens of b samples; what lies behind the candidate is padding.

    Attributes:
        lengths: [b] int64 interactions before the candidate.
        ids, responses, gaps: [b, T] int32.
        seconds: [b, T] int64, from the token before, 1 or more; from the beginning of 1970 for the first.
        score: [b] int64, what the history adds to the logit before shifting and scaling.
    """

    lengths: Tensor
    all_full: bool
    ids: Tensor
    responses: Tensor
    gaps: Tensor
    seconds: Tensor
    score: Tensor

    def times(self) -> Tensor:
        """Return the times of the tokens, as in :class:`Samples`: [b, T] int64."""
        times = self.seconds.cumsum(1)
        return times if self.all_full else times.minimum(times.gather(1, self.lengths.unsqueeze(1)))


class _Columns:
    """Constants of every column, on one device, and the samples that follow from them.

    The columns are: a label, the dense features, the lengths of the tables, the slots, the other labels; each has a hash of its
    own.
    """

    def __init__(self, settings: SyntheticConfig, rows: Sequence[int], seed: int, device: torch.device) -> None:
        self.rows = list(rows[: settings.tables])
        self.pooling = _per_table(settings.pooling, settings.tables)
        self._jagged = settings.jagged
        tables, slots, dense, labels = settings.tables, sum(self.pooling), settings.dense_features, settings.labels
        hashes = split_mix(derive_key(seed, 10), torch.arange(dense + tables + slots + labels)).to(device)
        first_label, self._dense_hash, self._length_hash, self._slot_hash, other_labels = hashes.split(
            [1, dense, tables, slots, labels - 1]
        )
        self._label_hash = torch.cat([first_label, other_labels])

        table_of_slot = torch.repeat_interleave(torch.arange(tables), torch.tensor(self.pooling))
        first_slot = torch.tensor([0, *accumulate(self.pooling)][:-1])
        self._table_of_slot = table_of_slot.to(device)
        self._slot_in_table = (torch.arange(slots) - first_slot[table_of_slot]).to(device)
        self._pooling_of_table = torch.tensor(self.pooling, device=device)
        self._mean_weight = 2**_MEAN_BITS // self._pooling_of_table[self._table_of_slot]

        self._ids = _Ids(self.rows, table_of_slot, settings.zipf_exponent, derive_key(seed, 11), device)
        effects = _roughly_normal(split_mix(derive_key(seed, 12), torch.arange(labels * tables << _EFFECT_BITS)))
        self._effects = effects.to(device).chunk(labels)
        self._first_effect = (table_of_slot << _EFFECT_BITS).to(device)
        dense_effects = _roughly_normal(split_mix(derive_key(seed, 13), torch.arange(labels * dense)))
        self._dense_effects = dense_effects.to(device).chunk(labels)
        self._segments = _Segments(settings, table_of_slot, seed, device) if settings.segments > 1 else None
        self._history = _History(settings, rows[tables:], seed, device) if settings.history_length else None

        # 60 elementwise kernels fused into a few: six times faster, at the cost of seconds at the first batch.
        self.draw = torch.compile(self._draw) if device.type == "cuda" and has_c_compiler() else self._draw

    def _draw(self, key: Tensor, rows: Tensor) -> _Drawn:
        """Samples ``rows`` ([b] int64) of the split that has this key ([] int64)."""
        sample_hash = split_mix(key, rows).unsqueeze(1)
        dense = _roughly_normal(combine(sample_hash, self._dense_hash))
        rank = self._ids.popularity_rank(combine(sample_hash, self._slot_hash))
        number_of_effect = (rank & (2**_EFFECT_BITS - 1)) + self._first_effect
        lengths, present = None, None
        mean_weight = self._mean_weight
        if self._jagged:
            lengths = 1 + ((shift_right(combine(sample_hash, self._length_hash), 32) * self._pooling_of_table) >> 32)
            length_of_slot = lengths[:, self._table_of_slot]
            present = self._slot_in_table < length_of_slot
            mean_weight = present * (2**_MEAN_BITS // length_of_slot)
        effects = [of_label[number_of_effect] * mean_weight for of_label in self._effects]
        if self._segments:
            segment = self._segments.draw(sample_hash)
            dense = dense + self._segments.dense_mean[segment]
            scores = [self._segments.score(segment, effect, label) for label, effect in enumerate(effects)]
        else:
            scores = [
                effect.sum(1) + (dense * of_dense).sum(1) for effect, of_dense in zip(effects, self._dense_effects, strict=True)
            ]
        score = torch.stack(scores, dim=1)
        history = self._history.draw(sample_hash) if self._history else None
        return _Drawn(
            dense=dense.float() * (1 / _NORMAL_STD),
            ids=self._ids.of_rank(rank),
            lengths=lengths,
            present=present,
            score=score if history is None else score + history.score.unsqueeze(1),
            label_uniform=shift_right(combine(sample_hash, self._label_hash), 11).double() * 2.0**-53,
            history=history,
        )


class _Ids:
    """The distribution of ids: few are popular, most are rare.

    Args:
        table_of_slot: [P].
    """

    def __init__(self, rows: Sequence[int], table_of_slot: Tensor, exponent: float, key: int, device: torch.device) -> None:
        quantiles = torch.stack([_quantiles(count, exponent) for count in rows])
        self._quantile = quantiles[:, :-1].flatten().to(device)
        self._quantile_width = quantiles.diff(dim=1).flatten().to(device)
        self._first_quantile = (table_of_slot << _QUANTILE_BITS).to(device)

        multipliers = torch.tensor([_coprime_near_golden_section(count) for count in rows])
        offsets = shift_right(split_mix(key, torch.arange(len(rows))), 32) % torch.tensor(rows)
        self._rows_of_slot = torch.tensor(rows)[table_of_slot].to(device)
        self._multiplier = multipliers[table_of_slot].to(device)
        self._offset = offsets[table_of_slot].to(device)

    def popularity_rank(self, bits: Tensor) -> Tensor:
        """Rank in popularity of the id in each slot, 0 for the most popular: [b, P] int64 from as many hashes."""
        segment = shift_right(bits, 64 - _QUANTILE_BITS) + self._first_quantile
        position = shift_right(bits << _QUANTILE_BITS, 64 - _POSITION_BITS)
        within = (self._quantile_width[segment] * position) >> _POSITION_BITS
        return (self._quantile[segment] + within) >> _FRACTION_BITS

    def of_rank(self, rank: Tensor) -> Tensor:
        """Ids, int32, of ranks [b, P]."""
        return ((rank * self._multiplier + self._offset) % self._rows_of_slot).int()


class _Segments:
    """Constants of the segments, on one device: which segment a sample belongs to, and the segments' rules.

    All segments are as frequent. Bit i of a segment's number says whether the mean of dense features i, i + n, i + 2n, ... is
    high or low, where n is the number of bits.

    Args:
        table_of_slot: [P].

    Attributes:
        dense_mean: [segments, D] int64.
    """

    def __init__(self, settings: SyntheticConfig, table_of_slot: Tensor, seed: int, device: torch.device) -> None:
        tables, dense = settings.tables, settings.dense_features
        self._count, self._tables, self._groups = settings.segments, tables, -(-tables // _RULE_TABLES)
        self._hash = split_mix(derive_key(seed, 30), torch.arange(1)).to(device)
        number_bit = torch.arange(dense) % (self._count - 1).bit_length()
        high = (torch.arange(self._count).unsqueeze(1) >> number_bit) & 1
        self.dense_mean = ((2 * high - 1) * int(_SEGMENT_MEAN * _NORMAL_STD)).to(device)

        self._table_of_slot = table_of_slot.to(device)
        table = torch.arange(tables, device=device)
        self._group_of_table, self._pattern_bit = table // _RULE_TABLES, table % _RULE_TABLES
        self._first_rule = torch.arange(self._groups, device=device) << _RULE_TABLES
        patterns = (settings.labels * self._count * self._groups) << _RULE_TABLES
        rules = _roughly_normal(split_mix(derive_key(seed, 31), torch.arange(patterns)))
        # Segments' rules add as much as all tables and dense features do without segments.
        rules = (rules * int(2**_MEAN_BITS * math.sqrt((tables + dense) / self._groups))).to(device)
        self._rules = rules.chunk(settings.labels)

    def draw(self, sample_hash: Tensor) -> Tensor:
        """Segments, [b] int64, of the samples with these hashes, [b, 1] int64."""
        return (shift_right(combine(sample_hash, self._hash), 32) * self._count >> 32).squeeze(1)

    def score(self, segment: Tensor, effect: Tensor, label: int) -> Tensor:
        """Return the tables' part of the logit of a label before shifting and scaling, [b] int64.

        Args:
            segment: [b].
            effect: [b, P] int64, the effect of the id in each slot as a part of the table's mean.
        """
        samples = segment.numel()
        of_table = effect.new_zeros(samples, self._tables).index_add(1, self._table_of_slot, effect)
        bits = (of_table > 0).long() << self._pattern_bit
        pattern = effect.new_zeros(samples, self._groups).index_add(1, self._group_of_table, bits)
        first = segment.unsqueeze(1) * (self._groups << _RULE_TABLES) + self._first_rule
        return self._rules[label][first + pattern].sum(1)


class _History:
    """Constants of the tokens, on one device, and the histories that follow from them.

    Items are as popular as the ids of the tables; those whose ranks agree modulo ``_GROUPS`` form a group. A user likes or
    dislikes each group, and seven of eight responses say so.

    Args:
        rows: of the tables of items, responses and gaps.
    """

    def __init__(self, settings: SyntheticConfig, rows: Sequence[int], seed: int, device: torch.device) -> None:
        self._length, self._jagged = settings.history_length, settings.jagged
        tokens = self._length + 1
        items, self._response_rows, self._gap_rows = rows
        table_of_slot = torch.zeros(tokens, dtype=torch.int64)
        self._ids = _Ids([items], table_of_slot, settings.zipf_exponent, derive_key(seed, 21), device)
        hashes = split_mix(derive_key(seed, 20), torch.arange(1 + _GROUPS + 2 * tokens)).to(device)
        self._length_hash, self._taste_hash, self._item_hash, self._other_hash = hashes.split([1, _GROUPS, tokens, tokens])
        self._position = torch.arange(tokens, device=device)
        # Histories add as much as all tables and dense features together, each of which adds about _NORMAL_STD << _MEAN_BITS.
        self._weight = int(_NORMAL_STD * 2**_MEAN_BITS * math.sqrt(settings.tables + settings.dense_features))

    def draw(self, sample_hash: Tensor) -> _DrawnHistory:
        """Histories of the samples with these hashes, [b, 1] int64."""
        if self._jagged:
            lengths = (shift_right(combine(sample_hash, self._length_hash), 32) * (self._length + 1)) >> 32
        else:
            lengths = torch.full_like(sample_hash, self._length)
        rank = self._ids.popularity_rank(combine(sample_hash, self._item_hash))
        bits = combine(sample_hash, self._other_hash)
        group = rank % _GROUPS
        likes = (combine(sample_hash, self._taste_hash) & 1).gather(1, group) ^ ((bits & 7) == 0)
        counts = (group == group.gather(1, lengths)) & (self._position < lengths)
        mean_weight = self._weight // counts.sum(1).clamp(min=1)
        # Log-uniform by powers of two: bits that nothing above has used choose one, 2 ** octave, and a factor of 1 to 2.
        octave = ((shift_right(bits, 8) & (2**24 - 1)) * _SECONDS_BITS) >> 24
        return _DrawnHistory(
            lengths=lengths.squeeze(1),
            all_full=not self._jagged,
            ids=self._ids.of_rank(rank),
            responses=(likes % self._response_rows).int(),
            gaps=(shift_right(bits, 3) % _GAPS % self._gap_rows).int(),
            seconds=((shift_right(bits, 32) | 2**32) << octave) >> 32,
            score=((2 * likes - 1) * counts).sum(1) * mean_weight,
        )


class _Layout:
    """The order that turns samples by slots into the values of a KeyedJaggedTensor: all ids of one table, then of the next."""

    def __init__(self, pooling: Sequence[int], batch_size: int, device: torch.device) -> None:
        slots = torch.arange(batch_size * sum(pooling), dtype=torch.int32, device=device).view(batch_size, -1)
        self.feature_major = torch.cat([table.flatten() for table in slots.split(list(pooling), dim=1)])
        self.lengths = torch.tensor(pooling, dtype=torch.int32, device=device).repeat_interleave(batch_size)
        self.offsets = torch.nn.functional.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))


def auc_with_error(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """Area under the ROC curve and its standard error.

    DeLong, DeLong, Clarke-Pearson: Comparing the areas under two or more correlated receiver operating characteristic curves: a
    nonparametric approach, Biometrics 44, 1988.

    Args:
        scores: [n], larger for more likely; ties count half.
        labels: [n] bool, or 0 and 1; both must occur, else the result is NaN.
    """
    labels = labels.bool()
    positives, negatives = scores[labels].sort().values, scores[~labels].sort().values
    share_of_positive = _share_below(positives, negatives)
    share_of_negative = 1 - _share_below(negatives, positives)
    variance = share_of_positive.var() / positives.numel() + share_of_negative.var() / negatives.numel()
    return float(share_of_positive.mean()), float(variance.sqrt())


def _share_below(values: Tensor, ordered: Tensor) -> Tensor:
    """Return, for each value, the share of ``ordered`` that is less, counting ties half: float64."""
    less = torch.searchsorted(ordered, values)
    not_more = torch.searchsorted(ordered, values, right=True)
    return (less + not_more).double() / (2 * ordered.numel())


def table_rows(settings: SyntheticConfig) -> list[int]:
    """Return rows of the tables that the settings ask for, in order of ``schema.tables``."""
    rows = _per_table(settings.rows, settings.tables)
    return [*rows, settings.history_items, _RESPONSES, _GAPS] if settings.history_length else rows


def _token_features(settings: SyntheticConfig, rows: Sequence[int]) -> tuple[SparseFeature, ...]:
    if not settings.history_length:
        return ()
    length, (items, responses, gaps) = settings.history_length, rows[settings.tables :]
    before = (0.5 if settings.jagged else 1.0) * length / (length + 1)
    occupied = before + 1 / (length + 1)
    return (
        SparseFeature("token_item", items, occupied),
        SparseFeature("token_response", responses, before, history_only=True),
        SparseFeature("token_gap", gaps, occupied),
    )


def _calibrate(settings: SyntheticConfig, rows: Sequence[int], seed: int) -> tuple[list[float], list[float]]:
    """Shift and factor of each label that give its logit mean 0 and the wanted deviation; from samples of their own, computed
    on the CPU so that they are the same everywhere."""
    decided_by = repr((replace(settings, signal=0.0), rows, seed))
    if decided_by not in _score_statistics:
        columns = _Columns(settings, rows, seed, torch.device("cpu"))
        samples = torch.arange(_samples_at_once(settings.history_length))
        key, block = torch.tensor(derive_key(seed, 14)), max(1, _MOST_VALUES // sum(columns.pooling))
        scores = torch.cat([columns.draw(key, own).score for own in samples.split(block)]).double()
        _score_statistics[decided_by] = [(float(of_label.mean()), float(of_label.std())) for of_label in scores.T.contiguous()]
    statistics = _score_statistics[decided_by]
    return [mean for mean, _ in statistics], [settings.signal / max(deviation, 1.0) for _, deviation in statistics]


def _samples_at_once(history_length: int) -> int:
    """Return the number of samples to draw at a time, so few that long histories take neither seconds nor gigabytes."""
    return min(_CALIBRATION_SAMPLES, max(1024, 2**21 // (history_length + 1)))


def _per_table(values: list[int], tables: int) -> list[int]:
    return values * tables if len(values) == 1 else values


def _quantiles(rows: int, exponent: float) -> Tensor:
    """Quantiles of ranks in popularity: of x - 1, where x has a density ~ x ** -exponent over [1, rows + 1).

    Returns:
        [4097] int64 in units of 1 / 256 row, from 0 to rows * 256.
    """
    uniform = torch.arange(2**_QUANTILE_BITS + 1, dtype=torch.float64) * 2.0**-_QUANTILE_BITS
    power, log_end = 1 - exponent, math.log(rows + 1)
    log_x = uniform * log_end if power == 0 else (uniform * math.expm1(power * log_end)).log1p() / power
    quantiles = (log_x.expm1() * 2**_FRACTION_BITS).long()
    quantiles[-1] = rows << _FRACTION_BITS
    return quantiles


def _coprime_near_golden_section(rows: int) -> int:
    """Return a factor that spreads consecutive numbers over [0, rows) and reaches each once: it has no divisor of ``rows``."""
    factor = max(1, round(rows * 0.6180339887))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


_NORMAL_STD = math.sqrt(4 * (2**32 - 1) / 12)


def _roughly_normal(bits: Tensor) -> Tensor:
    """Sum of four uniform 16-bit numbers less its mean, from 64 random bits; its standard deviation is ``_NORMAL_STD``."""
    mask = 2**16 - 1
    return (bits & mask) + ((bits >> 16) & mask) + ((bits >> 32) & mask) + ((bits >> 48) & mask) - 2 * mask


def open_synthetic(config: Config, device: torch.device) -> SyntheticDataset:
    """Return the set of ``data.source=synthetic``; an :data:`~dlrm_fused.datasets.OpenDataset`."""
    settings = config.data.synthetic
    return SyntheticDataset(settings, config.seed, device, rows_of_tables(config, table_rows(settings)))
