"""Graphs of histories by padded length: when there is one, and that pads change nothing. Here functions stand for graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.cuda_graphs import Generation
from dlrm_fused.inference.online import encodings
from dlrm_fused.inference.online.encodings import Encodings, padded_length, positions_of
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks
from tests.inference.test_online import HISTORY, Requests, make_scorer

LONGEST = 100
CPU = torch.device("cpu")


class _Function(encodings._Encoding):
    """Encodes where a graph would be replayed, with what a replay would read."""

    def capture(self, recorder: Any, encode: encodings.Encode, cache: Tensor) -> None:
        self._encode, self._cache = encode, cache

    def replay(self, rows: Tensor) -> None:
        self._graph = mock.Mock()
        super().replay(rows)
        assert self._graph.replay.call_count == 1
        self._encode(*self._views(self._block), self._cache)


@contextmanager
def in_place_of_graphs() -> Iterator[None]:
    with mock.patch.object(encodings, "_Encoding", _Function), mock.patch.object(encodings, "GraphRecorder"):
        yield


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    with in_place_of_graphs():
        yield


def test_a_padded_length_is_an_eighth_longer_at_most() -> None:
    for count in range(1, 5000):
        padded = padded_length(count, 4096)
        assert padded == 4096 if count > 4096 else count <= padded <= max(count + 15, count * 9 / 8)
    assert len({padded_length(count, 4096) for count in range(1, 4097)}) < encodings._MOST_CAPTURES


class Model:
    """Encodes a row as itself times a weight, plus its position; counts what it encodes."""

    def __init__(self) -> None:
        self.weight, self.lengths = torch.ones(1), list[int]()
        self.encodings = Encodings((1, 1), (1, 2, 1, LONGEST, 1), torch.float32, CPU)

    def encode(self, rows: Tensor, positions: Tensor, cache: Tensor) -> None:
        self.lengths.append(len(rows))
        cache[:] = (rows[:, 0] * self.weight + positions[:, None])[None, None, None]

    def cache_of(self, *values: int) -> Tensor | None:
        """Return the history's cache, or None if there was no graph."""
        cache = torch.full((1, 2, 1, len(values), 1), -1.0)
        rows = torch.tensor(values)[:, None, None]
        found = self.encodings.fill(rows, cache, self.encode, lambda: Generation([self.weight]))
        return cache.flatten()[: len(values)] if found else None


def test_the_second_history_of_a_padded_length_makes_a_graph() -> None:
    model = Model()
    assert model.cache_of(1, 2, 3) is None
    assert model.lengths == []
    for values, expected in (((7, 8), [9, 9]), ((1, 2, 3), [4, 4, 4]), ((5,), [6])):
        assert model.cache_of(*values) is not None
        found = model.cache_of(*values)
        assert found is not None
        assert found.tolist() == expected
    assert set(model.lengths) == {16}
    assert model.cache_of(*range(17)) is None


def test_weights_that_were_replaced_are_noticed() -> None:
    model = Model()
    model.cache_of(1)
    assert model.cache_of(1) is not None
    model.weight = 10 * model.weight
    assert model.cache_of(1) is None, "the graph has read the old weight"
    found = model.cache_of(1)
    assert found is not None
    assert found.tolist() == [11]


def test_there_is_room_for_so_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_MOST_CAPTURES", 1)
    model = Model()
    assert [model.cache_of(1) is None for _ in range(2)] == [True, False]
    assert [model.cache_of(*range(20)) is None for _ in range(3)] == [True, True, True]


def padded_and_not(requests: Requests) -> list[tuple[Tensor, Tensor]]:
    """Return the caches of histories, as they are encoded here, and padded as for graphs."""
    pairs = []
    with process_group(Rank.from_environment(), CPU), in_place_of_graphs():
        scorer = make_scorer(dist.group.WORLD, False, CPU, torch.float32)
        for i in range(len(requests.histories)):
            expected = scorer.encode(requests.history(i)).cache
            layers, both, heads, count, width = expected.shape
            cache_shape = layers, both, heads, HISTORY, width
            shape = len(scorer._token_features), scorer._ids_per_bag
            padded = Encodings(shape, cache_shape, torch.float32, CPU)
            rows = torch.from_numpy(scorer._tables.local_rows(requests.history(i), *_arguments(scorer)))
            found = torch.zeros_like(expected)
            with torch.no_grad():
                padded.capture(padded_length(count, HISTORY), scorer._fill, scorer._weights)
                assert padded.fill(rows, found, scorer._fill, scorer._weights)
            pairs.append((found, expected))
    return pairs


def _arguments(scorer: Any) -> tuple[list[str], int]:
    return scorer._token_features, scorer._ids_per_bag


@pytest.mark.parametrize("ranks", [1, 2])
def test_pads_change_nothing(ranks: int) -> None:
    for pairs in run_ranks(ranks, padded_and_not, Requests([1, 17, 65, HISTORY], count=1)):
        for found, expected in pairs:
            assert expected.abs().sum() > 0
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_newest_interaction_has_the_first_position() -> None:
    assert positions_of(3).tolist() == [3, 2, 1]
