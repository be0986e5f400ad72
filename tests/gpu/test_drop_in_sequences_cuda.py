"""FusedEmbeddingCollectionSharder on GPUs, in place of TorchRec's: the same rows, also of distinct ids, and the same tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.modules.embedding_configs import DataType

from tests.distributed.launch import run_ranks
from tests.distributed.test_drop_in_sequences import Case, differences, odd_case

pytestmark = pytest.mark.gpu(2)
CASES = 40


def on_gpus(case: Case, dedup: bool) -> Case:
    """Without what amplifies or randomizes rounding: sums have another order there."""
    plain = {"optimizer": EmbOptimType.EXACT_SGD, "weights": DataType.FP32, "output": SparseType.FP32}
    return replace(case, device_type="cuda", dedup=dedup, **plain)


@pytest.mark.parametrize("dedup", [False, True])
def test_odd_cases_have_the_rows_of_torchrecs_sharder(dedup: bool) -> None:
    cases = {seed: on_gpus(case, dedup) for seed in range(CASES) if (case := odd_case(seed)).ranks == 2}
    # With distinct ids, TorchRec looks the ids up by which it finds them: wrong ones fail there.
    cases = {seed: case for seed, case in cases.items() if not (dedup and case.wrong_ids)}
    assert len(cases) > CASES // 4
    for found in run_ranks(2, differences, cases):
        assert {seed: names for seed, names in found.items() if names} == {}
