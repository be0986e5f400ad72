"""What the models' matrix products count: as torch counts them in a forward pass, and as one counts them by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlrm_fused.config import Config, ModelKind, Split
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import build_model
from dlrm_fused.models.flops import forward_flops, training_flops
from tests.unit.small_models import config_of

SAMPLES = 6
CPU = torch.device("cpu")
HISTORIES = [
    "data.synthetic.history_length=6",
    "data.synthetic.history_items=9",
    "model.d_model=16",
    "model.layers=3",
    "model.heads=4",
    "model.tensor_parallel=1",
]
KINDS = {
    "dlrm": ["model.kind=dlrm"],
    "dcnv2": ["model.kind=dcnv2", "model.cross_layers=4", "model.cross_rank=7"],
    "transformer": ["model.kind=transformer", *HISTORIES],
    "hstu": ["model.kind=hstu", *HISTORIES],
}
DIMS = ["embedding.tables.table_1.dim=8", "embedding.tables.table_4.dim=20"]
EXPERTS = ["model.experts.count=8", "model.experts.top_k=3", "model.experts.hidden=40"]
SHARED = [*EXPERTS, "model.experts.shared_hidden=14"]


def small(tmp_path: Path, *overrides: str) -> tuple[Config, Dataset]:
    config = config_of(tmp_path, *overrides)
    return config, open_dataset(config, CPU)


def counted_by_torch(config: Config, dataset: Dataset) -> int:
    """FLOPs of a forward pass of the whole model, which runs on one rank of the CPU, for ``SAMPLES`` samples."""
    task = build_model(config, dataset.schema, 1, CPU)
    task.model.sparse_arch.to_empty(device=CPU)
    samples = dataset.read(Split.train, torch.arange(SAMPLES))
    weights = torch.ones(SAMPLES)
    batch = Batch(samples.dense, samples.sparse, samples.labels, weights, SAMPLES, samples.tokens, samples.history_lengths)
    batch.token_times = samples.token_times
    # The counter does not know the fused attention of the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        task(batch)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ModelKind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("experts", [[], EXPERTS, SHARED], ids=["no experts", "experts", "and a shared one"])
def test_is_what_torch_counts(tmp_path: Path, kind: ModelKind, experts: list[str]) -> None:
    if kind is ModelKind.hstu and experts:
        with pytest.raises(ConfigError, match=r"model\.experts\.count=8: allowed: 0 with model\.kind=hstu"):
            small(tmp_path, *KINDS[kind.name], *experts)
        return
    config, dataset = small(tmp_path, *KINDS[kind.name], *experts)
    assert SAMPLES * forward_flops(config, dataset.schema) == counted_by_torch(config, dataset)


@pytest.mark.parametrize("kind", ModelKind, ids=lambda kind: kind.name)
def test_is_what_torch_counts_for_tables_that_differ_in_columns(tmp_path: Path, kind: ModelKind) -> None:
    of_tokens = ["embedding.tables.token_item.dim=16"] if kind.reads_histories else []
    config, dataset = small(tmp_path, *KINDS[kind.name], *DIMS, *of_tokens)
    assert SAMPLES * forward_flops(config, dataset.schema) == counted_by_torch(config, dataset)


def test_dlrm_by_hand(tmp_path: Path) -> None:
    config, dataset = small(tmp_path, *KINDS["dlrm"])
    bottom, interaction = 3 * 20 + 20 * 12, 6 * 12 * 6
    top = (12 + 15) * 24 + 24 * 10 + 10 * 1
    assert forward_flops(config, dataset.schema) == 2 * (bottom + interaction + top)


def test_each_label_has_an_output_of_the_last_layer(tmp_path: Path) -> None:
    one, three = (small(tmp_path, *KINDS["dlrm"], f"data.synthetic.labels={labels}") for labels in (1, 3))
    last_layers = forward_flops(three[0], three[1].schema) - forward_flops(one[0], one[1].schema)
    assert last_layers == 2 * (10 * 3 - 10 * 1)
    assert SAMPLES * forward_flops(three[0], three[1].schema) == counted_by_torch(*three)


def test_dcnv2_by_hand(tmp_path: Path) -> None:
    config, dataset = small(tmp_path, *KINDS["dcnv2"])
    bottom, cross = 3 * 20 + 20 * 12, 4 * (72 * 7 + 7 * 72)
    top = 72 * 24 + 24 * 10 + 10 * 1
    assert forward_flops(config, dataset.schema) == 2 * (bottom + cross + top)


def test_a_step_has_three_times_the_forward_pass(tmp_path: Path) -> None:
    config, dataset = small(tmp_path, *KINDS["dlrm"])
    assert training_flops(config, dataset.schema) == 3 * forward_flops(config, dataset.schema)
