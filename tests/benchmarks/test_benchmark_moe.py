"""benchmarks/moe/accuracy.py: DLRMs of equal compute, and what it makes of their runs."""

from __future__ import annotations

import pytest

from benchmarks.moe import accuracy as moe_accuracy


def test_no_dlrm_has_less_to_compute_with_than_the_experts_or_much_more() -> None:
    # Bottom MLP, interaction of 7 vectors of 8, first layer, router, 2 experts, the other layers.
    by_hand = 6 * 64 + 64 * 8 + 7 * 7 * 8 + (8 + 21) * 32 + 32 * 64 + 2 * 2 * 32 * 16 + 32 * 16 + 16
    experts = moe_accuracy.multiply_adds([])
    assert experts == by_hand
    for name, settings in moe_accuracy.variants().items():
        assert experts <= moe_accuracy.multiply_adds(settings) <= 1.01 * experts, name


def test_the_margin_is_that_over_the_best_dlrm_of_each_seed() -> None:
    aucs = {"experts": (0.9, 0.8), "deep": (0.7, 0.75), "wide": (0.8, 0.7)}
    runs = [{"model": name, "seed": seed, "test_auc": of[seed - 1]} for name, of in aucs.items() for seed in (1, 2)]
    summary = moe_accuracy.summarize(runs)
    assert summary["margin_over_best_dlrm"] == {1: pytest.approx(0.1), 2: pytest.approx(0.05)}
    assert summary["smallest_margin"] == pytest.approx(0.05)
    assert summary["mean_test_auc"]["wide"] == pytest.approx(0.75)
