"""Hashes as random numbers: the published generator, alike in NumPy and torch."""

import numpy as np
import pytest
import torch

from dlrm_fused.datasets.hashing import combine, derive_key, shift_right, split_mix

# First outputs of SplitMix64 with seed 0, as its reference implementation prints them.
REFERENCE = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_split_mix_is_splitmix64() -> None:
    assert split_mix(0, np.arange(4)).view(np.uint64).tolist() == REFERENCE


@pytest.mark.parametrize("key", [0, -1, 2**62])
def test_numpy_and_torch_agree(key: int) -> None:
    counters = np.arange(-5, 1000)
    in_numpy = split_mix(key, counters)
    in_torch = split_mix(key, torch.from_numpy(counters))
    assert np.array_equal(in_numpy, in_torch.numpy())
    assert np.array_equal(combine(in_numpy, in_numpy[::-1]), combine(in_torch, in_torch.flip(0)).numpy())


def test_shifting_right_fills_with_zeros() -> None:
    assert shift_right(torch.tensor([-1, 4]), 1).tolist() == [2**63 - 1, 2]


def test_each_output_bit_depends_on_each_side_of_a_combination() -> None:
    """Flipping one input bit flips each output bit with a probability near 1/2."""
    left, right = split_mix(1, torch.arange(4000)), split_mix(2, torch.arange(4000))
    before = combine(left, right)
    for bit in (0, 17, 31, 32, 50, 63):
        changed = before ^ combine(left ^ torch.tensor(1).bitwise_left_shift(bit), right)
        flips = torch.stack([(changed >> k) & 1 for k in range(64)]).double().mean(1)
        assert flips.min() > 0.4, bit
        assert flips.max() < 0.6, bit


def test_keys_differ_by_each_part_and_their_order() -> None:
    keys = {derive_key(*parts) for parts in [(1,), (2,), (1, 2), (2, 1), (1, 2, 3), (1, 0), (0, 1)]}
    assert len(keys) == 7
