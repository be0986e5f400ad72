"""Random numbers as hashes of a position, so that any of them is reached directly and on any device alike.

All values are int64, as a NumPy array or a tensor, and stand for 64 random bits; arithmetic wraps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

# Preparations and saved transformations hash without torch.
if TYPE_CHECKING:
    from torch import Tensor

Bits = TypeVar("Bits", NDArray[np.int64], "Tensor")

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """Return the 64 low bits of ``value`` as the int64 that holds them."""
    return (value + 2**63) % 2**64 - 2**63


def shift_right(bits: Bits, count: int) -> Bits:
    """Logical (zero-filling) shift by 1 or more; that of int64 itself repeats the sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)


def split_mix(key: int | Tensor, counter: Bits) -> Bits:
    """Output number ``counter`` of the SplitMix64 generator with seed ``key``.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, with the finalizer of its reference
    implementation (Stafford's variant 13).
    """
    return _mix((counter + 1) * signed(_GOLDEN_GAMMA) + key)


def combine(left: Bits, right: Bits) -> Bits:
    """Hash of two hashes, broadcast over each other."""
    return _mix(left ^ right)


def combine_all(left: int, others: Iterable[int]) -> int:
    """Return the hash of ``left`` with one number of 64 bits after the other, as :func:`combine` does for arrays."""
    z, bits = left, 2**64 - 1
    for other in others:
        z = (z ^ other) & bits
        z = (z ^ z >> 30) * _MIX_1 & bits
        z = (z ^ z >> 27) * _MIX_2 & bits
        z ^= z >> 31
    return signed(z)


def _mix(z: Bits) -> Bits:
    z = (z ^ shift_right(z, 30)) * signed(_MIX_1)
    z = (z ^ shift_right(z, 27)) * signed(_MIX_2)
    return z ^ shift_right(z, 31)


def derive_key(*parts: int) -> int:
    """Return one 64-bit key from a seed and the numbers of what it is for."""
    key = 0
    for part in parts:
        key = int(split_mix(key, np.array([part]))[0])
    return key
