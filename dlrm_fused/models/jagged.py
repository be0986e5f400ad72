"""Jagged batches of tokens: rows of the samples' tokens one after the other, without padding, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from dlrm_fused.models.tensor_parallel import gather_samples, group_size
from dlrm_fused.ops.common.devices import capability
from dlrm_fused.ops.common.padding import Padding, groups_of_like_length

# Kernels of attention have a program, or a row of programs, for each sample and head, or for each sample, and CUDA launches at
# most so many.
_MOST_PROGRAMS = 65_535
# The most numbers of rows that ranks which share layers, or batches of a captured model, may have.
NUMBERS_OF_ROWS = 16
# FlashAttention, torch's kernel for samples of different lengths, wants a GPU of this compute capability, and heads no wider.
_LEAST_CAPABILITY, _MOST_COLUMNS_OF_A_HEAD = (8, 0), 256


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return softmax attention of any number of samples.

    torch 2.11 hands cuDNN, and its own kernels, batches that they cannot launch, and fails (pytorch/pytorch#142228, #180718).

    Args:
        queries: [b, heads, n, d_head].
        keys, values: [b, heads, T, d_head].
        seen: bool [b, T], the tokens that every query of a sample sees; None: query i sees the tokens up to i.
    """
    heads = queries.shape[1]
    # A program of torch.export has no number of samples by which it could be split.
    if torch.compiler.is_exporting() or len(queries) * heads <= _MOST_PROGRAMS:
        mask = None if seen is None else seen[:, None, None]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    parts = [of.split(_MOST_PROGRAMS // heads) for of in (queries, keys, values, seen) if of is not None]
    return torch.cat([attend(*part) for part in zip(*parts, strict=True)])


@dataclass(frozen=True)
class JaggedBatch:
    """The n rows of b samples: of each its history, its candidate, and maybe padding, so that n is what it must be.

    Attributes:
        candidates: [b] int64, the place of each sample's candidate among its tokens.
        counts: [b] int64, rows of each sample, above ``candidates``.
        tokens: T, of a sample with its padding.
        samples, places: [n] int64, the sample of each row, and its place among that sample's tokens.
        times: [n] int64, seconds since 1970 of each row; None where nobody reads them.
    """

    candidates: Tensor
    counts: Tensor
    tokens: int
    samples: Tensor
    places: Tensor
    times: Tensor | None = None

    @staticmethod
    def of(candidates: Tensor, tokens: int, rows: int, token_times: Tensor | None = None) -> JaggedBatch:
        """Return a batch of so many rows: of all real tokens, and as much of the first samples' padding as makes them.

        Args:
            token_times: [b, T] int64, when each token happened, in seconds since 1970.
        """
        counts = candidates + 1
        room = tokens - counts
        before = room.cumsum(0) - room
        padding = (rows - counts.sum() - before).clamp(min=0).minimum(room)
        batch = JaggedBatch._of_counts(candidates, counts + padding, tokens, rows)
        return batch if token_times is None else replace(batch, times=batch.rows_of(token_times.flatten()))

    @staticmethod
    def of_tensors(tokens: int, *tensors: Tensor) -> JaggedBatch:
        """Return the batch whose :attr:`tensors` these are."""
        candidates, counts, samples, places, *times = tensors
        return JaggedBatch(candidates, counts, tokens, samples, places, *times)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The attributes that are tensors, in their order."""
        return self.candidates, self.counts, self.samples, self.places, *(() if self.times is None else (self.times,))

    @staticmethod
    def _of_counts(candidates: Tensor, counts: Tensor, tokens: int, rows: int) -> JaggedBatch:
        # By shapes, not by len(): programs of torch.export are for any number of samples, each of T rows.
        device, size = counts.device, counts.shape[0]
        numbers = torch.arange(size, device=device)
        if rows == size * tokens:
            samples, places = numbers.repeat_interleave(tokens), torch.arange(tokens, device=device).repeat(size)
        else:
            samples = numbers.repeat_interleave(counts, output_size=rows)
            places = torch.arange(rows, device=device) - (counts.cumsum(0) - counts).index_select(0, samples)
        return JaggedBatch(candidates, counts, tokens, samples, places)

    def gathered(self, group: ProcessGroup | None) -> JaggedBatch:
        """Return the batch of all ranks' rows, rank after rank, of each as many. Collective."""
        if group_size(group) == 1:
            return self
        candidates, counts = gather_samples(torch.stack((self.candidates, self.counts), dim=1), group).unbind(1)
        batch = self._of_counts(candidates, counts, self.tokens, group_size(group) * self.samples.shape[0])
        return batch if self.times is None else replace(batch, times=gather_samples(self.times, group))

    def trimmed(self, x: Tensor, rows: int) -> tuple[Tensor, JaggedBatch]:
        """Return its rows [n, ...] and the batch with so many: all real tokens, and of padding what makes them."""
        if rows == x.shape[0]:
            return x, self
        trimmed = JaggedBatch.of(self.candidates, self.tokens, rows)
        # A row of padding that was not there repeats another; nobody reads it.
        places = trimmed.places.minimum(self.counts.index_select(0, trimmed.samples) - 1)
        firsts = (self.counts.cumsum(0) - self.counts).index_select(0, trimmed.samples)
        kept = firsts + places
        times = None if self.times is None else self.times.index_select(0, kept)
        return x.index_select(0, kept), replace(trimmed, times=times)

    @property
    def is_padded(self) -> bool:
        """Whether each sample has T rows."""
        return self.samples.shape[0] == self.counts.shape[0] * self.tokens

    @property
    def distances(self) -> Tensor:
        """The distance of each row to its sample's candidate, [n] int64; 0 for padding."""
        return (self.candidates.index_select(0, self.samples) - self.places).clamp(min=0)

    @property
    def candidate_rows(self) -> Tensor:
        """The row of each sample's candidate, [b] int64."""
        return self.counts.cumsum(0) - self.counts + self.candidates

    def real_rows(self, real: Tensor | None) -> Tensor:
        """Return which rows are of tokens that are no padding, and of samples that are ``real``, [b] bool: [n] bool."""
        is_token = self.places <= self.candidates.index_select(0, self.samples)
        return is_token if real is None else is_token & real.index_select(0, self.samples)

    def rows_of(self, padded: Tensor) -> Tensor:
        """Return the rows [n, ...] of [b * T, ...], where row i * T + t is token t of sample i."""
        return padded if self.is_padded else padded.index_select(0, self.samples * self.tokens + self.places)

    def attend(self, projected: Tensor) -> Tensor:
        """Return causal attention of each sample's tokens among themselves, [n, heads, d_head].

        Args:
            projected: [n, heads, 3, d_head], queries, keys and values.
        """
        if self._needs_no_padding(projected):
            return self._attend_among_rows(projected)
        parts = [block.permute(3, 0, 2, 1, 4) for block in self._padding.pad(projected)]
        return self._padding.rows_of([attend(*part).transpose(1, 2) for part in parts])

    def attend_from_candidates(self, queries: Tensor, keys_and_values: Tensor) -> Tensor:
        """Return attention of each candidate to its history and itself, [b, heads, d_head].

        Args:
            queries: [b, heads, d_head], of the candidates.
            keys_and_values: [n, heads, 2, d_head].
        """
        attended = []
        for samples, block in zip(self._padding.samples, self._padding.pad(keys_and_values), strict=True):
            keys, values = block.permute(3, 0, 2, 1, 4)
            seen = torch.arange(block.shape[1], device=block.device) <= self.candidates.index_select(0, samples)[:, None]
            attended.append(attend(queries.index_select(0, samples).unsqueeze(2), keys, values, seen).squeeze(2))
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended).index_select(0, torch.cat(self._padding.samples).argsort())

    def _needs_no_padding(self, projected: Tensor) -> bool:
        """Return whether attention of the rows as they are can run; then it is faster than that of padded samples."""
        return (
            not self.is_padded
            and capability(projected.device) >= _LEAST_CAPABILITY
            and projected.dtype in (torch.float16, torch.bfloat16)
            and projected.shape[-1] % 8 == 0
            and projected.shape[-1] <= _MOST_COLUMNS_OF_A_HEAD
            and len(self.counts) <= _MOST_PROGRAMS
        )

    def _attend_among_rows(self, projected: Tensor) -> Tensor:
        queries, keys, values = projected.unbind(2)
        bounds, longest = self.bounds, self.tokens
        attended = varlen_attn(queries, keys, values, bounds, bounds, longest, longest, window_size=(-1, 0))
        assert isinstance(attended, Tensor)
        return attended

    @cached_property
    def bounds(self) -> Tensor:
        """The bounds of the samples' rows, [b + 1] int32, made once for all layers."""
        return F.pad(self.counts.cumsum(0), (1, 0)).int()

    @cached_property
    def _padding(self) -> Padding:
        if self.is_padded:
            return Padding([torch.arange(self.counts.shape[0], device=self.counts.device)], [self.tokens], None)
        return Padding.of(self.counts, groups_of_like_length(self.counts), self.tokens, self.samples.shape[0])
