"""The user's own TorchRec script of docs/sharder.md: it trains alike with our sharder and with TorchRec's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "examples/own_trainer.py"
OURS = "sharders=[FusedEmbeddingBagCollectionSharder("
THEIRS = "sharders=[EmbeddingBagCollectionSharder("
THEIR_IMPORT = "from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder"


def with_torchrecs_sharder(folder: Path) -> Path:
    text = SCRIPT.read_text()
    assert text.count(OURS) == 1
    script = folder / "with_torchrecs_sharder.py"
    script.write_text(f"{THEIR_IMPORT}\n{text.replace(OURS, THEIRS)}")
    return script


def _losses(script: Path) -> list[float]:
    losses = runpy.run_path(str(script))["main"]()
    assert isinstance(losses, list)
    return losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_argument_is_all_that_changes(tmp_path, ranks):
    ours = run_ranks(ranks, _losses, SCRIPT)
    theirs = run_ranks(ranks, _losses, with_torchrecs_sharder(tmp_path))
    assert ours == theirs
    assert all(losses[-1] < 0.7 * losses[0] for losses in ours)


def test_the_page_shows_the_script_and_it_is_as_short_as_it_says():
    (shown,) = re.findall(r"```python\n(.*?)```", (DOCS / "sharder.md").read_text(), re.DOTALL)[-1:]
    script = SCRIPT.read_text()
    assert shown.strip() == script[script.index("import os") :].strip()
    assert len([line for line in shown.splitlines() if line]) <= 42
