"""Metadata of checkpoints of earlier releases: read whatever Python wrote it, without running its code.

Training of the release before wrote the files with Python 3.11.2 and 3.11.7, ``repickle.py`` with 3.12.1 and 3.13.0.
"""

from __future__ import annotations

import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dlrm_fused.errors import CheckpointError
from dlrm_fused.training.checkpoint.pickled import read_pickled
from dlrm_fused.training.checkpoint.tensors import Slot, read_tensors, write_tensors

FORMS = Path(__file__).parents[1] / "distributed/pickled_metadata"
VERSIONS = ["3.11.2", "3.11.7", "3.12.1", "3.13.0"]


def content(metadata: Metadata) -> dict[str, Any]:
    """All that reading a checkpoint takes from its metadata."""
    assert metadata.storage_data is not None
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [(c.offsets, c.sizes, metadata.storage_data[MetadataIndex(key, c.offsets)]) for c in entry.chunks]
        found[key] = (entry.properties.dtype, entry.size, chunks)
    return found


def test_the_forms_differ() -> None:
    data = {version: (FORMS / f"{version}.pickle").read_bytes() for version in VERSIONS}
    assert [version for version in VERSIONS if b"getattr" in data[version]] == ["3.11.2"]
    assert [version for version in VERSIONS if b"pathlib._local" in data[version]] == ["3.13.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_is_read_alike(version: str) -> None:
    found = content(read_pickled(FORMS / f"{version}.pickle"))
    assert found == content(read_pickled(FORMS / "3.11.7.pickle"))
    dtype, shape, [(_, _, slot)] = found["table.table_0.weight"]
    assert (dtype, shape) == (torch.float32, torch.Size([50, 4]))
    assert (slot.file, slot.length, slot.sums) == ("__0_0.bin", 50 * 4 * 4, None)


@pytest.mark.parametrize("version", VERSIONS)
def test_json_holds_what_the_pickle_held(tmp_path: Path, version: str) -> None:
    metadata = read_pickled(FORMS / f"{version}.pickle")
    assert metadata.storage_data is not None
    slots = {index: Slot(slot.file, slot.begin, slot.length, "00") for index, slot in metadata.storage_data.items()}
    write_tensors(tmp_path, metadata, slots)
    metadata.storage_data = slots
    assert content(read_tensors(tmp_path, "")) == content(metadata)


class Colour(Enum):
    red = 1


class AttributeOf:
    """Pickled as Python 3.11.2 pickles members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("payload", [AttributeOf(os, "system"), AttributeOf(Colour, "red"), AttributeOf(torch.Size, "count")])
def test_getattr_gives_members_of_the_one_enumeration_alone(tmp_path: Path, payload: AttributeOf) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(payload) if payload.owner is not os else b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR.")
    with pytest.raises(CheckpointError, match=r"\.metadata: its metadata asks for .*, which no checkpoint of ours contains"):
        read_pickled(path)


def test_a_damaged_pickle_is_told_whatever_it_raises(tmp_path: Path) -> None:
    whole = (FORMS / "3.11.7.pickle").read_bytes()
    for end in range(0, len(whole) - 1, 97):
        (tmp_path / ".metadata").write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"\.metadata: "):
            read_pickled(tmp_path / ".metadata")
