"""Kernels with ranks on several hosts, and slices put between these: under Triton's interpreter, by a model of NVSHMEM."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import on_hosts, run_ranks
from tests.ops.gemm_all_to_all import cases as products
from tests.ops.gemv_all_reduce import test_op as sums
from tests.ops.moe import cases as experts
from tests.ops.test_across_hosts import EQUAL, HOSTS, SMALL
from tests.symmetric.put_model import use_model, with_puts

pytestmark = pytest.mark.interpreted


def test_products_and_their_gradients() -> None:
    products.check([EQUAL, SMALL], 4, calls=2, with_gradients=True, hosts=HOSTS[0], mutate=use_model)


def test_sums_are_the_same_bits_on_all_ranks() -> None:
    fused = run_ranks(4, on_hosts, HOSTS[0], with_puts, sums.results_and_gradients, "auto")
    for own, wanted in zip(fused, run_ranks(4, sums.results_and_gradients, None), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(own["out"], fused[0]["out"])


def test_experts_are_the_dense_computation() -> None:
    case = experts.CASES[4][0]
    by_rank = run_ranks(4, on_hosts, HOSTS[0], with_puts, experts.run_cases, [case])
    for rank, wanted in enumerate(experts.expected(case, 0)):
        for own in by_rank[rank][0]:
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
