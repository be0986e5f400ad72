"""Jagged rows of samples, padded for functions of equally long ones: in groups of samples of like length, which saves work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Groups by the type of a device whose numbers the host knows; more are slower again.
_GROUPS = {"cpu": 4}


def groups_of_like_length(counts: Tensor) -> list[Tensor]:
    """Return the numbers of the samples of each group, each int64 [samples of the group], by their rows [b]. Where the host
    does not know the lengths all samples are one group."""
    if not _are_known(counts):
        return [torch.arange(counts.shape[0], device=counts.device)]
    return list(counts.argsort(stable=True).chunk(_GROUPS[counts.device.type]))


def _are_known(counts: Tensor) -> bool:
    is_traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
    return counts.device.type in _GROUPS and not is_traced and counts.shape[0] > 0


class Padding(NamedTuple):
    """The places of n rows of samples in padded ones.

    Attributes:
        samples: of each group, int64 [samples of the group].
        longest: rows of each sample of a group, with padding.
        slots: int64 [n], the padded row of each row; groups follow each other. None: the rows are padded already.
    """

    samples: list[Tensor]
    longest: list[int]
    slots: Tensor | None

    @staticmethod
    def of(counts: Tensor, samples: list[Tensor], longest: int, rows: int) -> Padding:
        """Return the padding of samples in groups.

        Args:
            counts: of rows by sample, [b]; one sample's follow the other's.
            longest: no sample has more; where the host does not know the lengths, all are padded to so many.
            rows: n, the sum of ``counts``.
        """
        if _are_known(counts):
            of_groups = [int(counts.index_select(0, group).max()) for group in samples]
        else:
            of_groups = [longest]
        starts = torch.zeros_like(counts, dtype=torch.int64)
        sizes = [group.shape[0] * most for group, most in zip(samples, of_groups, strict=True)]
        for group, most, end, size in zip(samples, of_groups, itertools.accumulate(sizes), sizes, strict=True):
            numbers = torch.arange(group.shape[0], device=counts.device)
            starts = starts.index_copy(0, group, numbers * most + (end - size))
        shifts = starts - (counts.cumsum(0) - counts)
        slots = torch.arange(rows, device=counts.device) + shifts.repeat_interleave(counts, output_size=rows)
        return Padding(samples, of_groups, slots)

    def pad(self, x: Tensor) -> list[Tensor]:
        """Return the rows [n, ...] of each group's samples, [samples, rows with padding, ...]; padding is zeros."""
        sizes = [group.shape[0] * most for group, most in zip(self.samples, self.longest, strict=True)]
        if self.slots is not None:
            x = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy_(0, self.slots, x)
        parts = x.split(sizes) if len(sizes) > 1 else [x]
        shapes = zip(parts, self.samples, self.longest, strict=True)
        return [part.unflatten(0, (group.shape[0], most)) for part, group, most in shapes]

    def rows_of(self, padded: Sequence[Tensor]) -> Tensor:
        """Return the rows [n, ...] of groups as :meth:`pad` gives them."""
        flat = torch.cat([part.flatten(0, 1) for part in padded]) if len(padded) > 1 else padded[0].flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)
