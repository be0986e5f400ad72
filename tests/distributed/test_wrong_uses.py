"""Wrong uses of operators and sharder: an error on every rank, nothing written, and all goes on.

What is tried stands in wrong_uses.py and gemv_wrong_uses.py. What is raised must be, to the letter, what
docs/reference/wrong_uses.md shows; ``UPDATE_DOCS=1 pytest tests/distributed/test_wrong_uses.py`` writes its tables anew.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.distributed.wrong_use import RANKS, TOLERANCE, Outcome, WrongUse
from tests.distributed.wrong_uses import WITH_KERNELS, WITHOUT_KERNELS, WRONG_USES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/reference/wrong_uses.md"
ALL = [(title, use) for title, (_, uses) in WRONG_USES.items() for use in uses]
# Of the whole: a rank that waits for its time limit is told nothing, but waits.
LIMIT_SECONDS = 5.0
HEAD = "| what is done wrongly | by | error | error of the other ranks |\n|---|---|---|---|\n"

Outcomes = dict[tuple[str, str], list[Outcome]]


@pytest.fixture(scope="module")
def outcomes_beside(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """What each rank has seen, by title and use: of a title and all others with kernels, or without, as it is."""
    folder = tmp_path_factory.mktemp("wrong_uses")

    @functools.cache
    def outcomes(with_kernels: bool) -> Outcomes:
        if with_kernels:
            return try_out(WITH_KERNELS, "1", folder / "kernels")
        return try_out(WITHOUT_KERNELS, "0", folder / "host")

    return lambda title: outcomes(title in WITH_KERNELS)


def try_out(titles: Iterable[str], interpret: str, path: Path) -> Outcomes:
    program = "from tests.distributed.wrong_uses import write_outcomes; write_outcomes()"
    ended = subprocess.run(
        [sys.executable, "-c", program, path, *titles],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5_000:]
    by_rank = pickle.loads(path.read_bytes())
    return {key: [own[key] for own in by_rank] for key in by_rank[0]}


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[tuple[str, str], str]]:
    """Rows of docs/reference/wrong_uses.md by title and use; to be filled anew where UPDATE_DOCS is set."""
    if "UPDATE_DOCS" not in os.environ:
        yield rows_of_document()
        return
    rows: dict[tuple[str, str], str] = {}
    yield rows
    tables = [
        f"## {title}\n\n{HEAD}" + "".join(rows[title, use.what] for use in uses) for title, (_, uses) in WRONG_USES.items()
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


@pytest.mark.slow
@pytest.mark.parametrize(("title", "use"), ALL, ids=[f"{title}: {use.what}" for title, use in ALL])
def test_a_wrong_use_is_a_clear_error_on_every_rank_and_changes_nothing(
    title: str, use: WrongUse, outcomes_beside: Callable[[str], Outcomes], shown: dict[tuple[str, str], str]
) -> None:
    seen = outcomes_beside(title)[title, use.what]
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
