"""GPUs of one host without peer access, as ``NCCL_P2P_DISABLE=1`` makes of any: all models train as with comm=baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import losses
from tests.gpu.test_moe_training_cuda import SETTINGS as EXPERTS
from tests.gpu.test_transformer_training_cuda import SETTINGS as TRANSFORMER
from tests.gpu.training_runs import LOG, WITHOUT_AMPLIFIED_ROUNDING, train_together

pytestmark = pytest.mark.gpu(2)
GPUS = 2
MODELS = {
    "dlrm": ["model.kind=dlrm", *WITHOUT_AMPLIFIED_ROUNDING],
    "dcnv2": ["model.kind=dcnv2", "embedding.sharding=row_wise", *WITHOUT_AMPLIFIED_ROUNDING],
    "dcnv2 with a plan": ["model.kind=dcnv2", "embedding.sharding=auto", *WITHOUT_AMPLIFIED_ROUNDING],
    "transformer": [*TRANSFORMER, f"model.tensor_parallel={GPUS}"],
    "experts": [*EXPERTS, f"model.experts.parallel={GPUS}"],
}


@pytest.fixture(autouse=True)
def without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_baseline_and_one_line_says_what_to_expect(tmp_path: Path, model: str) -> None:
    runs = {comm: (GPUS, [*MODELS[model], f"comm={comm}"]) for comm in ("baseline", "fused", "auto")}
    done = train_together(tmp_path, runs)
    expected = losses(done["baseline"])
    assert len(expected) == 50
    for comm, run in done.items():
        assert losses(run) == pytest.approx(expected, rel=1e-4), comm
        said = (run.parent / LOG).read_text().count("GPUs of one host have no peer access (NCCL_P2P_DISABLE=1)")
        assert said == (comm != "baseline"), comm
