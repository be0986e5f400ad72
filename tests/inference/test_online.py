"""Online scoring gives the probabilities of the full model: every history with every candidate, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Split, SyntheticConfig
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.errors import ConfigError, UsageError
from dlrm_fused.inference.online.evaluation import RequestSamples, score_run_online
from dlrm_fused.inference.online.scorer import MAX_CANDIDATES, Candidates, History, OnlineScorer
from dlrm_fused.inference.online.sharded_tables import ShardedTables
from dlrm_fused.models.history import HistoryDLRM, HistoryEncoder
from dlrm_fused.models.hstu import Hstu
from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.models.transformer import HistoryTransformer
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import ErrorStore, Rank, choose_device, process_group
from tests.distributed.launch import RankFailed, on_hosts, run_ranks, train

HISTORY, DIM, DENSE, MAX_IDS = 70, 4, 3, 3
SPARSE = {"user": 11, "item": 7}
TOKENS = {"token_item": 7, "genre": 5, "response": 2}
ROWS = {**SPARSE, **TOKENS}


def tables(features: dict[str, int]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM)
        for name, rows in features.items()
    ]
    return EmbeddingBagCollection(configs, device=torch.device("cpu"))


def full_model(product: LayerProducts | None = None, kind: str = "transformer") -> HistoryDLRM:
    """The same on every rank, but for the pieces of cut layers. HSTU has biases, and reads times."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {"token_width": len(TOKENS) * DIM, "d_model": 16, "heads": 4, "layers": 2, "product": product}
    if kind == "transformer":
        transformer: HistoryEncoder[Any] = HistoryTransformer(**shape, d_ff=64, history_length=HISTORY)
    else:
        transformer = Hstu(**shape, history_length=HISTORY, reads_times=True)
    model = HistoryDLRM(tables(SPARSE), tables(TOKENS), transformer, DENSE, [8, DIM], [8, 1])
    if kind == "hstu":
        for block in transformer.blocks:
            for bias in (block.by_distance, block.by_time):
                every_head = torch.randn(4, bias.shape[1], generator=torch.Generator().manual_seed(3))
                first = 0 if product is None or product.group is None else dist.get_rank(product.group) * len(bias)
                bias.data.copy_(every_head[first : first + len(bias)])
    return model


def draw_bags(features: dict[str, int], count: int, generator: torch.Generator) -> list[list[list[int]]]:
    """Ids by feature and bag."""

    def draw(below: int, numbers: int) -> list[int]:
        return torch.randint(0, below, (numbers,), generator=generator).tolist()

    return [[draw(rows, length) for length in draw(MAX_IDS + 1, count)] for rows in features.values()]


def as_kjt(features: dict[str, int], bags: list[list[list[int]]]) -> KeyedJaggedTensor:
    lengths = [len(bag) for of_feature in bags for bag in of_feature]
    values = [i for of_feature in bags for bag in of_feature for i in bag]
    return KeyedJaggedTensor(
        keys=list(features), values=torch.tensor(values, dtype=torch.int32), lengths=torch.tensor(lengths, dtype=torch.int32)
    )


class Requests:
    """Histories of some lengths, and so many candidates for each of them."""

    def __init__(self, history_lengths: list[int], count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.histories = [draw_bags(TOKENS, n, generator) for n in history_lengths]
        self.history_times = [
            torch.randint(0, 10**6, (n,), generator=torch.Generator().manual_seed(n)) for n in history_lengths
        ]
        self._times = torch.randint(10**6, 10**7, (count,), generator=torch.Generator().manual_seed(4))
        self._dense = torch.randn(count, DENSE, generator=generator)
        self._sparse, self._tokens = (draw_bags(features, count, generator) for features in (SPARSE, TOKENS))

    def history(self, index: int) -> KeyedJaggedTensor:
        return as_kjt(TOKENS, self.histories[index])

    def candidates(self, begin: int, end: int) -> Candidates:
        sparse, tokens = ([bags[begin:end] for bags in features] for features in (self._sparse, self._tokens))
        return Candidates(self._dense[begin:end], as_kjt(SPARSE, sparse), as_kjt(TOKENS, tokens), self._times[begin:end])

    def of_full_model(self, kind: str = "transformer") -> Tensor:
        """[histories, candidates], by the forward pass of the full model on one rank."""
        model, results = full_model(kind=kind), []
        for history, history_times in zip(self.histories, self.history_times, strict=True):
            n = len(history[0])
            padding: list[list[int]] = [[]] * (HISTORY - n)
            tokens = [
                [bag for candidate in candidates for bag in (*interactions, candidate, *padding)]
                for interactions, candidates in zip(history, self._tokens, strict=True)
            ]
            lengths = torch.full((len(self._dense),), n)
            times = torch.zeros(len(self._dense), HISTORY + 1, dtype=torch.int64)
            times[:, :n], times[:, n] = history_times, self._times
            with torch.no_grad():
                logits = model(self._dense, as_kjt(SPARSE, self._sparse), as_kjt(TOKENS, tokens), lengths, token_times=times)
            results.append(logits.sigmoid().squeeze(1))
        return torch.stack(results)


def make_scorer(
    group: dist.ProcessGroup | None,
    fused: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    max_rows: int = MAX_CANDIDATES,
    kind: str = "transformer",
) -> OnlineScorer:
    workspace = None
    if fused:
        memory = symmetric_group(group, device)
        workspace = GemvWorkspace(memory, name="online", max_columns=16, dtype=dtype, max_rows=max_rows)
    model = full_model(LayerProducts(group, workspace), kind)
    sparse = model.sparse_arch
    cut = ShardedTables(ROWS, dict.fromkeys(ROWS, DIM), group, dtype, device)
    whole = {**sparse.embedding_bag_collection.embedding_bags, **sparse.token_embedding_bag_collection.embedding_bags}
    for name, (first, shard) in cut.local_shards().items():
        shard.copy_(whole[name].weight.detach()[first : first + len(shard)])
    return OnlineScorer(
        model.transformer.to(device, dtype),
        model.dense_arch.to(device, dtype),
        model.over_arch.to(device, dtype),
        cut,
        token_features=sparse.token_features,
        sparse_features=sparse.features,
        ids_per_bag=MAX_IDS,
    )


def with_scorer(fused: bool, dtype: torch.dtype, work: Callable[..., Any], *arguments: Any) -> Any:
    return with_scorers(fused, [dtype], work, *arguments)[dtype]


def with_scorers(
    fused: bool, dtypes: Iterable[torch.dtype], work: Callable[..., Any], *arguments: Any, kind: str = "transformer"
) -> dict[torch.dtype, Any]:
    """On a rank: what ``work`` gives with a scorer of each dtype, one after the other."""
    rank = Rank.from_environment()
    device = choose_device("auto", rank)
    with process_group(rank, device):
        results = {dtype: work(make_scorer(dist.group.WORLD, fused, device, dtype, kind=kind), *arguments) for dtype in dtypes}
        if fused:
            symmetric_group(None, device).close()
        return results


def with_hstu(fused: bool, work: Callable[..., Any], *arguments: Any) -> Any:
    """On a rank: what ``work`` gives with a scorer of HSTU."""
    return with_scorers(fused, [torch.float32], work, *arguments, kind="hstu")[torch.float32]


def scores(scorer: OnlineScorer, requests: Requests, numbers: list[int]) -> Tensor:
    """Of all candidates, so many in a call; every history is kept, and used for all calls."""
    histories = [scorer.encode(requests.history(i), times) for i, times in enumerate(requests.history_times)]
    ends = list(itertools.accumulate(numbers))
    calls = [requests.candidates(end - number, end) for number, end in zip(numbers, ends, strict=True)]
    return torch.stack([torch.cat([scorer.score(history, call) for call in calls]) for history in histories])


@pytest.mark.parametrize(("ranks", "fused"), [(1, False), (2, False), (2, True), (4, False)])
def test_kept_histories_give_the_probabilities_of_the_full_model(ranks: int, fused: bool) -> None:
    requests = Requests([0, 1, 65, HISTORY], count=72)
    expected = requests.of_full_model()
    assert expected.std() > 0.01
    for result in run_ranks(ranks, with_scorer, fused, torch.float32, scores, requests, [1, 64, 7]):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "fused"), [(1, False), (2, True), (4, False)])
def test_kept_histories_of_hstu_do_likewise(ranks: int, fused: bool) -> None:
    requests = Requests([0, 1, 65, HISTORY], count=72)
    expected = requests.of_full_model("hstu")
    assert expected.std() > 0.01
    for result in run_ranks(ranks, with_hstu, fused, scores, requests, [1, 64, 7]):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("work", [with_scorer, with_hstu])
def test_ranks_of_several_hosts_do_likewise(work: Callable[..., Any]) -> None:
    requests = Requests([1, HISTORY], count=72)
    expected = requests.of_full_model("hstu" if work is with_hstu else "transformer")
    dtypes = [] if work is with_hstu else [torch.float32]
    results = run_ranks(4, on_hosts, (0, 0, 1, 1), work, True, *dtypes, scores, requests, [1, 64, 7])
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(result, results[0])


def without_times(scorer: OnlineScorer) -> list[str]:
    requests = Requests([2], count=3)
    history, good = scorer.encode(requests.history(0), requests.history_times[0]), requests.candidates(0, 3)
    assert good.times is not None
    uses: list[Callable[[], Any]] = [
        lambda: scorer.encode(requests.history(0)),
        lambda: scorer.encode(requests.history(0), requests.history_times[0].float()),
        lambda: scorer.score(history, replace(good, times=None)),
        lambda: scorer.score(history, replace(good, times=good.times[:2])),
        lambda: scorer.score(History(history.cache), good),
    ]
    said = []
    for use in uses:
        with pytest.raises(UsageError) as raised:
            use()
        said.append(str(raised.value))
    assert len(scorer.score(history, good)) == 3  # goes on after them
    assert len(scorer.score(scorer.encode(as_kjt(TOKENS, [[]] * len(TOKENS))), good)) == 3  # no interactions have no times
    return said


def test_a_model_that_reads_times_must_be_given_them() -> None:
    needed = "the model reads them: seconds since 1970, int64"
    assert run_ranks(1, with_hstu, False, without_times) == [
        [
            f"times of 2 interactions: none; {needed} [2]",
            f"times of 2 interactions: torch.float32 [2]; {needed} [2]",
            f"times of 3 candidates: none; {needed} [3]",
            f"times of 3 candidates: torch.int64 [2]; {needed} [3]",
            "the history has no times: another scorer's",
        ]
    ]


def with_times_that_change(scorer: OnlineScorer, requests: Requests) -> tuple[Tensor, Tensor]:
    times = requests.history_times[0].clone()
    history, candidates = scorer.encode(requests.history(0), times), requests.candidates(0, 2)
    before = scorer.score(history, candidates)
    times += 1_000_000
    return before, scorer.score(history, candidates)


def test_a_kept_history_has_times_of_its_own() -> None:
    ((before, after),) = run_ranks(1, with_hstu, False, with_times_that_change, Requests([5], count=2))
    assert torch.equal(before, after)


def after_warm_up(scorer: OnlineScorer, requests: Requests) -> Tensor:
    scorer.warm_up([HISTORY])
    return scores(scorer, requests, [3])


def test_a_warm_up_leaves_no_trace_in_scores() -> None:
    requests = Requests([0, 5], count=3)
    for found in run_ranks(2, with_hstu, True, after_warm_up, requests):
        torch.testing.assert_close(found, requests.of_full_model("hstu"), rtol=1e-5, atol=1e-6)


def first_in_inference_mode(scorer: OnlineScorer, requests: Requests) -> list[Tensor]:
    """Make the first request under inference mode, and with it the state that it leaves for others."""
    with torch.inference_mode():
        scores(scorer, requests, [3])
    return [scores(scorer, requests, [3]), requests.of_full_model()]


def test_requests_outside_of_inference_mode_may_follow_others() -> None:
    (found, expected), *_ = run_ranks(1, with_scorer, False, torch.float32, first_in_inference_mode, Requests([2], count=3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def wrong_uses(scorer: OnlineScorer) -> dict[str, str]:
    """What is said to each of them."""
    requests = Requests([2], count=MAX_CANDIDATES + 1)
    history, good = scorer.encode(requests.history(0)), requests.candidates(0, 2)
    user, item = ([[0], [0]], [[0], [0]])
    uses: dict[str, Callable[[], Any]] = {
        "none": lambda: scorer.score(history, requests.candidates(0, 0)),
        "too many": lambda: scorer.score(history, requests.candidates(0, MAX_CANDIDATES + 1)),
        "stride": lambda: scorer.score(history, replace(good, tokens=requests.candidates(0, 3).tokens)),
        "dense": lambda: scorer.score(history, replace(good, dense=torch.zeros(2, DENSE + 1))),
        "missing": lambda: scorer.score(history, replace(good, sparse=as_kjt({"user": 11}, [user]))),
        "id": lambda: scorer.score(history, replace(good, sparse=as_kjt(SPARSE, [user, [[0], [SPARSE["item"]]]]))),
        "negative id": lambda: scorer.score(history, replace(good, sparse=as_kjt(SPARSE, [[[-1], [0]], item]))),
        "bag": lambda: scorer.score(history, replace(good, sparse=as_kjt(SPARSE, [user, [[0], [0] * (MAX_IDS + 1)]]))),
        "long": lambda: scorer.encode(as_kjt(TOKENS, [[[0]] * (HISTORY + 1)] * len(TOKENS))),
        "other scorer": lambda: scorer.score(History(history.cache[:1]), good),
        "other times": lambda: scorer.score(History(history.cache, torch.zeros(2, dtype=torch.int64)), good),
    }
    said = {}
    for name, use in uses.items():
        with pytest.raises(UsageError) as raised:
            use()
        said[name] = str(raised.value)
    assert len(scorer.score(history, good)) == 2  # goes on after them
    return said


def test_wrong_uses_are_refused_on_every_rank() -> None:
    expected = {
        "none": "0 candidates; allowed: 1 to 64 in a call",
        "too many": "65 candidates; allowed: 1 to 64 in a call",
        "stride": "tokens has stride 3, dense has 2 rows: they must be the same candidates",
        "dense": "dense has 4 features, the model takes 3",
        "missing": "the request has features user; the model takes user, item",
        "id": "feature item: ids from 0 to 7; its table has rows 0 to 6",
        "negative id": "feature user: ids from -1 to 0; its table has rows 0 to 10",
        "bag": "a bag of 4 ids; the scorer was made for ids_per_bag=3 at most",
        "long": "a history of 71 interactions; the model takes history_length=70",
        "other scorer": "the history's cache is torch.float32 [1, 2, 2, 2, 4]: another scorer's",
        "other times": "the history has times: another scorer's",
    }
    assert run_ranks(2, with_scorer, False, torch.float32, wrong_uses) == [expected, expected]


def small_workspace() -> str:
    with process_group(Rank.from_environment(), torch.device("cpu")), pytest.raises(UsageError) as raised:
        make_scorer(dist.group.WORLD, True, torch.device("cpu"), max_rows=MAX_CANDIDATES - 1)
    return str(raised.value)


def test_a_workspace_without_room_for_64_candidates_is_refused() -> None:
    message = "workspace online: max_rows=63; online scoring needs 64"
    assert run_ranks(2, small_workspace) == [message, message]


# eval.py --online


TRANSFORMER = [
    "model.kind=transformer",
    "model.d_model=16",
    "model.heads=4",
    "data.synthetic.history_length=6",
    "data.synthetic.history_items=200",
    "embedding.init_std=0.3",
    "training.max_steps=20",
]


def score_online(run: Path, overrides: list[str]) -> None:
    rank = Rank.from_environment()
    score_run_online(run, "last", Split.test, overrides, 2, rank, ErrorStore(rank))


def test_the_batch_for_the_full_model_has_the_times_of_its_tokens() -> None:
    settings = SyntheticConfig(tables=1, rows=[50], jagged=True, history_length=4, history_items=20)
    samples = SyntheticDataset(settings, 1, torch.device("cpu")).read(Split.test, torch.arange(8))
    assert samples.token_times is not None
    times = RequestSamples(samples, 4).batch(3).token_times
    assert times is not None
    assert times.tolist() == samples.token_times[:3].tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), 2, *TRANSFORMER)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims = [f"embedding.tables.{table}.dim={dim}" for table, dim in {"table_1": 4, "table_2": 12, "token_item": 16}.items()]
    return train(tmp_path_factory.mktemp("unequal"), 2, *TRANSFORMER, *dims)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(1, []), (2, ["comm=fused"]), (2, ["model.tensor_parallel=1"]), (1, ["training.precision=bf16"])],
)
def test_requests_of_a_trained_run(trained: Path, ranks: int, overrides: list[str]) -> None:
    run_ranks(ranks, score_online, trained, overrides)
    found = json.loads((trained / "online.json").read_text())
    assert found["step"] == 20
    assert found["difference_from_full_model"] < (0.05 if "training.precision=bf16" in overrides else 1e-5)
    assert (found["requests"], found["split"]) == (2, "test")


@pytest.mark.parametrize("overrides", [[], ["comm=fused"]], ids=["baseline", "fused"])
def test_requests_of_a_run_of_hstu(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> None:
    """Generated histories have times."""
    run = train(tmp_path_factory.mktemp("hstu"), 2, *TRANSFORMER, "model.kind=hstu")
    run_ranks(2, score_online, run, overrides)
    assert json.loads((run / "online.json").read_text())["difference_from_full_model"] < 1e-5


@pytest.mark.parametrize("overrides", [[], ["comm=fused"]], ids=["baseline", "fused"])
def test_requests_of_a_run_whose_tables_differ_in_columns(unequal: Path, overrides: list[str]) -> None:
    run_ranks(2, score_online, unequal, overrides)
    assert json.loads((unequal / "online.json").read_text())["difference_from_full_model"] < 1e-5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind=dlrm"], "--online: the run has model.kind=dlrm; it is for model.kind=transformer and model.kind=hstu"),
        (["data.synthetic.test_samples=63"], "--split test: it has 63 samples; --online needs 64 at least"),
    ],
)
def test_runs_that_cannot_be_scored_online(trained: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RankFailed, match=re.escape(message)) as failed:
        run_ranks(1, score_online, trained, overrides)
    assert isinstance(failed.value.error, ConfigError)


def test_a_folder_as_the_file_of_scores_is_refused_before_any_work(tmp_path: Path) -> None:
    rank_and_store: tuple[Any, Any] = (None, None)
    with pytest.raises(ConfigError, match=r"^--output .*: allowed: a file, this is a folder$"):
        score_run_online(tmp_path / "no run", "last", Split.test, [], 1, *rank_and_store, tmp_path)
