"""Checksums of blocks: every damage changes one, and no more is read than is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.checksums import BLOCK_BYTES, CheckedBytes, Checksums, FileSums, block_sums, from_hex, to_hex
from dlrm_fused.errors import DataError
from dlrm_fused.export import loader

SIZES = [0, 1, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 40 * BLOCK_BYTES + 5]


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def by_definition(block: np.ndarray) -> int:
    """The sum of w[i, j] * (a[i] + b[j]) modulo 2^64, in whole numbers of any size."""
    words = np.pad(block, (0, BLOCK_BYTES - block.size)).view("<u8").reshape(128, 256).tolist()

    def split_mix(number: int) -> int:
        z = number * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    a = [split_mix(number) | 1 for number in range(1, 129)]
    b = [split_mix(number) & ~1 for number in range(129, 385)]
    return sum(word * (a[i] + b[j]) for i, row in enumerate(words) for j, word in enumerate(row)) % 2**64


@pytest.mark.parametrize("size", [5, BLOCK_BYTES, BLOCK_BYTES + 9])
def test_sums_are_those_of_the_definition(size: int) -> None:
    data = random_bytes(size)
    expected = [by_definition(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
    assert block_sums(data).tolist() == expected


@pytest.mark.parametrize("size", SIZES)
def test_the_exported_loader_computes_the_same(size: int) -> None:
    data = random_bytes(size)
    assert loader.block_sums(data).tolist() == block_sums(data).tolist()
    assert len(block_sums(data)) == -(-size // BLOCK_BYTES)


def test_sums_do_not_depend_on_where_the_bytes_lie() -> None:
    data = random_bytes(3 * BLOCK_BYTES + 1)
    assert block_sums(data[1:]).tolist() == block_sums(data[1:].copy()).tolist()


def test_every_bit_and_every_exchange_of_words_changes_a_sum() -> None:
    data = random_bytes(BLOCK_BYTES)
    intact = block_sums(data)
    choice = np.random.default_rng(1)
    for at in choice.integers(0, BLOCK_BYTES, 200):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert block_sums(data) != intact
            data[at] ^= 1 << bit
    words = data.view(np.uint64)
    # Neighbours, and words of one row and of one column.
    for first, second in [(0, 1), (0, 256), (3, 300), (100, 32767), (7, 8), (256, 512)]:
        words[[first, second]] = words[[second, first]]
        assert block_sums(data) != intact
        words[[first, second]] = words[[second, first]]
    assert block_sums(data) == intact


def test_a_file_of_zeros_is_told_from_one_that_is_longer(tmp_path: Path) -> None:
    for name, size in (("a", 8), ("b", 16)):
        (tmp_path / name).write_bytes(bytes(size))
    assert FileSums.of(tmp_path / "a") != FileSums.of(tmp_path / "b")


def test_only_blocks_that_are_read_are_checked_and_each_once() -> None:
    data = random_bytes(4 * BLOCK_BYTES)
    checked = CheckedBytes(data, block_sums(data))
    data[2 * BLOCK_BYTES] ^= 1
    assert checked.check(0, 2 * BLOCK_BYTES)
    assert checked.check_blocks(np.array([3, 0, 0, 3]))
    assert not checked.check(2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES + 1)
    assert not checked.all_checked
    data[2 * BLOCK_BYTES] ^= 1
    assert checked.check(0, data.size)
    assert checked.all_checked


def test_sums_survive_as_text_and_have_one_text_only() -> None:
    sums = block_sums(random_bytes(3 * BLOCK_BYTES))
    assert from_hex(to_hex(sums)).tolist() == sums.tolist()
    for wrong in (to_hex(sums).upper(), to_hex(sums)[:-1], "xy"):
        with pytest.raises(ValueError, match=r"."):
            from_hex(wrong)


def test_files_of_a_folder_are_compared(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a").write_bytes(random_bytes(10).tobytes())
    (tmp_path / "empty").touch()
    Checksums.of_folder(tmp_path, {"step": 3}).save(tmp_path)
    checksums = Checksums.load(tmp_path, DataError, "make it again")
    assert checksums is not None
    assert checksums.owner == {"step": 3}
    assert checksums.files.keys() == {"below/a", "empty"}
    for name in checksums.files:
        checksums.check(tmp_path, name, DataError, "make it again")
    (tmp_path / "below/a").write_bytes(random_bytes(10, seed=1).tobytes())
    (tmp_path / "empty").write_bytes(b"x")
    for name in checksums.files:
        with pytest.raises(DataError, match=rf"{name}: damaged: .*checksums.json.*; make it again"):
            checksums.check(tmp_path, name, DataError, "make it again")
    (tmp_path / "empty").unlink()
    for name, message in (("empty", "missing"), ("unknown", "is not among the files of")):
        with pytest.raises(DataError, match=rf"{name}: {message}"):
            checksums.check(tmp_path, name, DataError, "make it again")


def test_a_folder_of_an_earlier_release_has_none(tmp_path: Path) -> None:
    assert Checksums.load(tmp_path, DataError, "") is None
