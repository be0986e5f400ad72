"""What docs/ shows of trainers of one's own: the script of sharder.md trains alike with our sharder and with TorchRec's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused import EmbeddingWorkspace, ExchangeLayout, LookupLayout, pooled_all_to_all, symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "examples/own_trainer.py"
# The package of TorchRec's sharder, and its name, by the script that has ours.
THEIRS = {
    SCRIPT: ("torchrec.distributed.embeddingbag", "EmbeddingBagCollectionSharder"),
    DOCS / "examples/sequence_model.py": ("torchrec.distributed.embedding", "EmbeddingCollectionSharder"),
}


def with_torchrecs_sharder(script: Path, folder: Path) -> Path:
    package, sharder = THEIRS[script]
    text, ours = script.read_text(), f"sharders=[Fused{sharder}("
    assert text.count(ours) == 1
    written = folder / "with_torchrecs_sharder.py"
    written.write_text(f"from {package} import {sharder}\n{text.replace(ours, f'sharders=[{sharder}(')}")
    return written


def _losses(script: Path) -> list[float]:
    losses = runpy.run_path(str(script))["main"]()
    assert isinstance(losses, list)
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", THEIRS, ids=lambda script: script.stem)
def test_one_argument_is_all_that_changes(tmp_path, script, ranks):
    ours = run_ranks(ranks, _losses, script)
    theirs = run_ranks(ranks, _losses, with_torchrecs_sharder(script, tmp_path))
    assert ours == theirs
    assert all(losses[-1] < 0.7 * losses[0] for losses in ours)


def test_the_page_shows_the_script_and_it_is_as_short_as_it_says():
    (shown,) = re.findall(r"```python\n(.*?)```", (DOCS / "sharder.md").read_text(), re.DOTALL)[-1:]
    script = SCRIPT.read_text()
    assert shown.strip() == script[script.index("import os") :].strip()
    assert len([line for line in shown.splitlines() if line]) <= 42


def test_the_use_of_an_operator_in_docs_operators():
    batch_sizes = [3, 2]
    pooled = [torch.randn(5, 8) for _ in batch_sizes]
    (output_0, gradient_0), (output_1, gradient_1) = run_ranks(2, _run_the_page, pooled, batch_sizes)
    whole = torch.cat(pooled, dim=1)
    assert output_0.equal(whole[:3])
    assert output_1.equal(whole[3:])
    assert gradient_0.equal(2 * pooled[0])
    assert gradient_1.equal(2 * pooled[1])


def _run_the_page(of_ranks: list[Tensor], batch_sizes: list[int]) -> tuple[Tensor, Tensor]:
    (code,) = re.findall(r"```python\n([^`]*pooled_all_to_all\(.*?)```", (DOCS / "operators.md").read_text(), re.DOTALL)
    rank, device = Rank.from_environment(), torch.device("cpu")
    with process_group(rank, device):
        pooled = of_ranks[rank.index].clone().requires_grad_()
        names: dict[str, object] = {"pooled": pooled, "batch_sizes": batch_sizes, "device": device, "dist": dist}
        operators = (EmbeddingWorkspace, ExchangeLayout, LookupLayout, pooled_all_to_all, symmetric_group)
        names.update({operator.__name__: operator for operator in operators})
        exec(code, names)
        output = names["output"]
        assert isinstance(output, Tensor)
        assert pooled.grad is not None
        return output.detach().clone(), pooled.grad
