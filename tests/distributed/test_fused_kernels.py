"""The sharder with the kernels of GPUs, under the interpreter of Triton; in its own process, since Triton decides at import."""

from __future__ import annotations

import pytest

from tests.ops.interpreter import run_interpreted

TESTS = "tests/distributed/test_fused_sharder.py"
# Numbers of ranks, features, batches and uses that differ for the kernels; the interpreter is slow.
CASES = {
    "TestOneStepAfterTheOther": (
        "test_every_covered_kind_in_one_module[2]",
        "test_uneven_batches[sizes1]",
        "test_features_that_read_several_tables_and_tables_that_several_features_read",
        "test_ranks_without_tables",
        "test_mean_pooling_of_row_wise_tables",
        "test_weighted_features[2]",
        "test_gradients_of_the_weights[2]",
        "test_beside_tables_that_stay_on_torchrecs_path",
    ),
    "TestHeldTensors": (
        "test_equals_torchrec[accumulation]",
        "test_equals_torchrec[evaluation_in_between]",
        "test_two_sharded_modules[step_by_step]",
        "test_two_sharded_modules[many_forwards_before_any_backward]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", CASES)
def test_the_kernels_of_gpus_give_the_results_of_torchrec(group):
    nodes = [f"{TESTS}::{group}::{case}" for case in CASES[group]]
    assert run_interpreted(nodes) == len(nodes)
