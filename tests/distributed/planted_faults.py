"""Faults planted in files: changed bits, cut ends, zeroed ranges, and files that change places or come from elsewhere."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

# Takes a file and others that could lie in its place; returns the files that are damaged, none if nothing has changed.
Fault = Callable[[random.Random, Path, Sequence[Path]], list[Path]]


def flip(choice: random.Random, path: Path, _: Sequence[Path]) -> list[Path]:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    path.write_bytes(data)
    return [path]


def truncate(choice: random.Random, path: Path, _: Sequence[Path]) -> list[Path]:
    os.truncate(path, choice.randrange(path.stat().st_size))
    return [path]


def zero(choice: random.Random, path: Path, _: Sequence[Path]) -> list[Path]:
    """Zero a range, half of the time to the end of the file, as a crash leaves it."""
    data = bytearray(path.read_bytes())
    begin = choice.randrange(len(data))
    end = len(data) if choice.random() < 0.5 else choice.randrange(begin, len(data)) + 1
    if not any(data[begin:end]):
        return []
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    return [path]


def take_anothers(choice: random.Random, path: Path, others: Sequence[Path]) -> list[Path]:
    """Put the file of another rank, step, split, set, run or model in this one's place."""
    different = [other for other in others if other.read_bytes() != path.read_bytes()]
    if not different:
        return []
    shutil.copyfile(choice.choice(different), path)
    return [path]


def swap(choice: random.Random, path: Path, others: Sequence[Path]) -> list[Path]:
    """Exchange two files of one folder tree."""
    different = [other for other in others if other.read_bytes() != path.read_bytes()]
    if not different:
        return []
    other = choice.choice(different)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return [path, other]


FAULTS: dict[str, Fault] = {"flip": flip, "truncate": truncate, "zero": zero, "swap": swap, "another's": take_anothers}
