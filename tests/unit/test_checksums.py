"""Checksums of blocks: every damage changes one, and no more is read than is asked for."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dlrm_fused.checksums import BLOCK_BYTES, CRC32, XXH3, CheckedBytes, Checksums, FileSums, block_sums, from_hex, to_hex
from dlrm_fused.errors import DataError

SIZES = [0, 1, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 40 * BLOCK_BYTES + 5]


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_libraries(size: int) -> None:
    data = random_bytes(size)
    blocks = [data[at : at + BLOCK_BYTES].tobytes() for at in range(0, size, BLOCK_BYTES)]
    assert block_sums(data).tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert block_sums(data, CRC32).tolist() == [zlib.crc32(block) for block in blocks]


def test_exported_models_are_checked_without_the_library_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(random_bytes(BLOCK_BYTES + 3).tobytes())
    Checksums.of_folder(tmp_path, {}, CRC32).save(tmp_path)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    checksums = Checksums.load(tmp_path, DataError, "")
    assert checksums is not None
    checksums.check(tmp_path, "a", DataError, "")


def test_sums_do_not_depend_on_where_the_bytes_lie() -> None:
    data = random_bytes(3 * BLOCK_BYTES + 1)
    assert block_sums(data[1:]).tolist() == block_sums(data[1:].copy()).tolist()


@pytest.mark.parametrize("algorithm", [XXH3, CRC32])
def test_every_bit_and_every_exchange_of_words_changes_a_sum(algorithm: str) -> None:
    data = random_bytes(BLOCK_BYTES)
    intact = block_sums(data, algorithm)
    choice = np.random.default_rng(1)
    for at in choice.integers(0, BLOCK_BYTES, 200):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert block_sums(data, algorithm) != intact
            data[at] ^= 1 << bit
    words = data.view(np.uint64)
    for first, second in [(0, 1), (0, 256), (3, 300), (100, 32767), (7, 8), (256, 512)]:
        words[[first, second]] = words[[second, first]]
        assert block_sums(data, algorithm) != intact
        words[[first, second]] = words[[second, first]]
    for bit in range(64):  # of two words, as of a memory whose line is stuck
        words[[3, 70]] ^= np.uint64(1 << bit)
        assert block_sums(data, algorithm) != intact
        words[[3, 70]] ^= np.uint64(1 << bit)
    assert block_sums(data, algorithm) == intact


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


def test_a_changed_bit_of_the_sums_themselves_is_damage_of_their_file(tmp_path: Path) -> None:
    """And not of a file whose name or sum was changed."""
    (tmp_path / "a").write_bytes(b"x")
    Checksums.of_folder(tmp_path, {"step": 3}).save(tmp_path)
    path = tmp_path / "checksums.json"
    written, intact = path.read_bytes(), Checksums.load(tmp_path, DataError, "make it again")
    messages = []
    for bit in range(8 * len(written)):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            loaded = Checksums.load(tmp_path, DataError, "make it again")
        except DataError as error:
            messages.append(str(error))
        else:
            assert loaded == intact, changed  # a blank became another one
    assert len(messages) > 0.9 * 8 * len(written.split())
    assert all(message.startswith(str(path)) for message in messages)


def test_a_folder_of_an_earlier_release_has_none(tmp_path: Path) -> None:
    assert Checksums.load(tmp_path, DataError, "") is None
