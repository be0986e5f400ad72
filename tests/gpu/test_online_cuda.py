"""Online scoring on GPUs: its CUDA graphs give the probabilities of the full model on the CPU, replay after replay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlrm_fused.inference.online.scorer import OnlineScorer
from tests.distributed.launch import run_ranks
from tests.inference.test_cached_attention import test_equals_the_reference  # noqa: F401 - on a GPU here
from tests.inference.test_online import HISTORY, Requests, scores, with_hstu, with_scorer, with_scorers

pytestmark = pytest.mark.gpu(1)
# Its model has four heads.
RANKS = next((n for n in (4, 2) if n <= torch.cuda.device_count()), 1)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def after_warm_up(scorer: OnlineScorer, requests: Requests, numbers: list[int]) -> Tensor:
    scorer.warm_up()
    return scores(scorer, requests, numbers)


@pytest.mark.parametrize(
    ("ranks", "fused"),
    [(1, False), (RANKS, False), pytest.param(RANKS, True, marks=pytest.mark.gpu(2))],
    ids=["one", "baseline", "fused"],
)
def test_graphs_give_the_probabilities_of_the_full_model(ranks: int, fused: bool) -> None:
    requests = Requests([0, 1, 65, HISTORY], count=72)
    expected = requests.of_full_model()
    results = run_ranks(ranks, with_scorers, fused, list(TOLERANCES), after_warm_up, requests, [1, 64, 7])
    for dtype, tolerance in TOLERANCES.items():
        for result in results:
            torch.testing.assert_close(result[dtype], expected, rtol=0, atol=tolerance)
            if fused:
                assert torch.equal(result[dtype], results[0][dtype])


@pytest.mark.parametrize(
    ("ranks", "fused"), [(1, False), pytest.param(RANKS, True, marks=pytest.mark.gpu(2))], ids=["one", "fused"]
)
def test_hstu_gives_the_probabilities_of_the_full_model(ranks: int, fused: bool) -> None:
    """It has no graphs."""
    requests = Requests([0, 1, 65, HISTORY], count=72)
    expected = requests.of_full_model("hstu")
    for result in run_ranks(ranks, with_hstu, fused, after_warm_up, requests, [1, 64, 7]):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCES[torch.float32])


def encoded_again(scorer: OnlineScorer, requests: Requests, numbers: list[int]) -> Tensor:
    """Encode each history without a graph, then by the graph that the second one makes; scores with the latter."""
    first = [scorer.encode(requests.history(i)).cache for i in range(len(requests.histories))]
    scorer.warm_up([HISTORY])
    for i, expected in enumerate(first):
        for _ in range(3):
            found = scorer.encode(requests.history(i)).cache
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[found.dtype])
    assert scorer._encodings is not None
    assert len(scorer._encodings._captures) > 1
    return scores(scorer, requests, numbers)


@pytest.mark.parametrize(("ranks", "fused"), [(RANKS, False), pytest.param(RANKS, True, marks=pytest.mark.gpu(2))])
def test_histories_are_encoded_by_graphs(ranks: int, fused: bool) -> None:
    requests = Requests([0, 1, 65, HISTORY, 7], count=4)
    expected = requests.of_full_model()
    for result in run_ranks(ranks, with_scorers, fused, list(TOLERANCES), encoded_again, requests, [4]):
        for dtype, tolerance in TOLERANCES.items():
            torch.testing.assert_close(result[dtype], expected, rtol=0, atol=tolerance)


def with_weights_that_move(scorer: OnlineScorer, requests: Requests) -> list[Tensor]:
    """Scores before and after all weights lie elsewhere, with other values; and the latter in graphs that are made anew."""
    found = [scores(scorer, requests, [5])]
    for module in (scorer._transformer, scorer._dense_arch, scorer._over_arch):
        for parameter in module.parameters():
            parameter.data = 1.25 * parameter.data
    found += [scores(scorer, requests, [5]) for _ in range(2)]
    scorer._buckets.clear()
    return [*found, scores(scorer, requests, [5])]


def test_weights_that_move_are_followed() -> None:
    requests = Requests([HISTORY], count=5)
    for before, *after, expected in run_ranks(RANKS, with_scorer, RANKS > 1, torch.float32, with_weights_that_move, requests):
        assert not torch.allclose(before, expected, atol=1e-3)
        for found in after:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def repeated(scorer: OnlineScorer, requests: Requests) -> int:
    """How many of many replays differ from the first."""
    history = scorer.encode(requests.history(0))
    candidates = requests.candidates(0, 5)
    first = scorer.score(history, candidates)
    return sum(not torch.equal(scorer.score(history, candidates), first) for _ in range(500))


def test_replays_give_the_same_bits() -> None:
    fused = RANKS > 1
    assert run_ranks(RANKS, with_scorer, fused, torch.bfloat16, repeated, Requests([HISTORY], count=5)) == [0] * RANKS
