"""Wrong uses of operators and sharder: an error on every rank, nothing written, and all goes on.

Each operator's uses stand beside its tests, in wrong_uses.py. Errors must be, to the letter, those that wrong_uses.md in
this folder shows. With ``UPDATE_DOCS=1`` these tests write their rows of its tables anew: those of kernels with
``TRITON_INTERPRET=1``, the others without it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed import sharder_wrong_uses as sharder
from tests.distributed.launch import run_ranks
from tests.ops.all_gather_gemm import wrong_uses as sharded_rows
from tests.ops.embedding_all_to_all import wrong_uses as embeddings
from tests.ops.gemm_all_to_all import wrong_uses as gemm
from tests.ops.gemv_all_reduce import wrong_uses as gemv
from tests.ops.moe import wrong_uses as experts
from tests.ops.wrong_use import RANKS, TIMEOUT_SECONDS, TOLERANCE, Outcome, Scene, WrongUse, try_out

DOCUMENT = Path(__file__).with_name("wrong_uses.md")
# By title in the document: on what they are tried.
WITHOUT_KERNELS: dict[str, tuple[Callable[[], Scene], list[WrongUse]]] = {
    "Symmetric memory and workspaces": (embeddings.Pooled, embeddings.EXCHANGES),
    "`pooled_all_to_all`": (embeddings.Pooled, embeddings.POOLED),
    "The sharder": (sharder.Sharded, sharder.SHARDER),
    "`gemv_all_reduce`": (gemv.Product, gemv.USES),
    "`gemm_all_to_all`": (gemm.Blocks, gemm.USES),
    "`all_gather_gemm` and `gemm_reduce_scatter`": (sharded_rows.Layers, sharded_rows.USES),
    "`expert_layer`": (experts.Layer, experts.USES),
}
WITH_KERNELS: dict[str, tuple[Callable[[], Scene], list[WrongUse]]] = {
    "Tables": (embeddings.Fused, embeddings.TABLES),
    "`embedding_all_to_all`": (embeddings.Fused, embeddings.FUSED),
    "The sharder on GPUs": (sharder.Sharded, sharder.SHARDER_WITH_KERNELS),
}
WRONG_USES = {**WITHOUT_KERNELS, **WITH_KERNELS}
ALL = [(title, use) for title, (_, uses) in WRONG_USES.items() for use in uses]
# A rank that waits for its time limit is told nothing, but waits.
LIMIT_SECONDS = TIMEOUT_SECONDS / 2
HEAD = "| what is done wrongly | by | error | error of the other ranks |\n|---|---|---|---|\n"


def as_parameter(title: str, use: WrongUse) -> object:
    # All uses under a title are tried in one start of ranks.
    marks = [pytest.mark.xdist_group(title), *([pytest.mark.interpreted] if title in WITH_KERNELS else [])]
    return pytest.param(title, use, marks=marks, id=f"{title}: {use.what}")


@functools.cache
def outcomes_of(title: str) -> dict[str, list[Outcome]]:
    """What each rank has seen, by wrong use."""
    by_rank = run_ranks(RANKS, try_all, title)
    return {what: [own[what] for own in by_rank] for what in by_rank[0]}


def try_all(title: str) -> dict[str, Outcome]:
    """On a rank: the outcomes of all wrong uses under a title, by what is done wrongly."""
    with process_group(Rank.from_environment(), torch.device("cpu")):
        make_scene, uses = WRONG_USES[title]
        scene = make_scene()
        outcomes = {use.what: try_out(scene, use) for use in uses}
        symmetric_group().close()
    return outcomes


@pytest.fixture(scope="session")
def shown() -> Iterator[dict[tuple[str, str], str]]:
    """Rows of wrong_uses.md by title and use; to be filled anew where UPDATE_DOCS is set."""
    rows = rows_of_document()
    yield rows
    if "UPDATE_DOCS" in os.environ:
        tables = [
            f"## {title}\n\n{HEAD}" + "".join(rows.get((title, use.what), "") for use in uses)
            for title, (_, uses) in WRONG_USES.items()
        ]
        DOCUMENT.write_text("\n".join([DOCUMENT.read_text().split("## ")[0].rstrip() + "\n", *tables]))


def rows_of_document() -> dict[tuple[str, str], str]:
    rows = {}
    for section in DOCUMENT.read_text().split("\n## ")[1:]:
        title, table = section.split("\n", 1)
        for row in table.strip().splitlines()[2:]:
            rows[title, row.split(" | ")[0].removeprefix("| ")] = row + "\n"
    return rows


def row(use: WrongUse, seen: list[Outcome]) -> str:
    first = use.ranks[0]
    others = [outcome for rank, outcome in enumerate(seen) if rank not in use.ranks]
    error, other = settled(seen[first].message), settled(others[0].message) if others else ""
    by = "all ranks" if len(use.ranks) == RANKS else f"rank {first}"
    return f"| {use.what} | {by} | {error} | {'the same' if other == error else other} |\n"


def settled(message: str) -> str:
    """A message without what differs between machines and runs, as a cell of a Markdown table."""
    message = re.sub(r"rank (\d) on \S+ \(pid \d+\)", r"rank \1 on node0 (pid N)", message)
    message = re.sub(r"pid:\[\d+\]", "pid:[N]", message)
    message = re.sub(r"has [\d.]+ \w+ available", "has N GB available", message)
    return re.sub(r"workspace=\d+", "workspace=N", message).replace("|", "\\|").replace("<", "&lt;")


@pytest.mark.parametrize(("title", "use"), [as_parameter(title, use) for title, use in ALL])
def test_a_wrong_use_is_a_clear_error_on_every_rank_and_changes_nothing(
    title: str, use: WrongUse, shown: dict[tuple[str, str], str]
) -> None:
    seen = outcomes_of(title)[use.what]
    assert len(seen) == RANKS
    for rank, outcome in enumerate(seen):
        if rank in use.ranks:
            assert outcome.kind == use.error.__name__
            assert use.culprit in outcome.message
        else:
            assert outcome.kind in ("UsageError", "CommunicationError")
            assert use.others in outcome.message
        assert outcome.unchanged
        assert outcome.difference < TOLERANCE
        assert outcome.seconds < LIMIT_SECONDS
    if "UPDATE_DOCS" in os.environ:
        shown[title, use.what] = row(use, seen)
    assert shown.get((title, use.what)) == row(use, seen)


def test_the_document_shows_nothing_else() -> None:
    assert list(rows_of_document()) == [(title, use.what) for title, use in ALL]
