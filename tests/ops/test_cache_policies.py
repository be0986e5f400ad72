"""Cache policies: what the selector gives which stream, that hints arrive in the compiled kernels, and that results stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.config import load_config
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common import cache_policy
from dlrm_fused.ops.common.cache_policy import (
    ALL_LOADS_FIRST,
    GRADIENTS_LAST,
    OFF,
    ROWS_FIRST,
    CachePolicy,
    Stream,
    once,
    picked,
    select,
)
from dlrm_fused.ops.common.gpus import INTERPRETER
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training import build
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks
from tests.ops.hinted_workloads import WORKLOADS
from tests.ops.test_compile_for_gpus import LAUNCHES
from tests.ops.test_compile_for_gpus import architecture as architecture
from tests.ops.test_compile_for_gpus import compiled as compiled

MB = 1e6
L2 = 52.4 * MB  # of an H100
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    cache_policy.use("off")


def lookup(rows: float, row_bytes: float, bags: int, pooling: int, zipf_exponent: float, sent: float) -> dict[str, Stream]:
    """In one table."""
    of_rows = picked(bags * pooling, rows, row_bytes, zipf_exponent=zipf_exponent)
    return {"rows": of_rows, "indices": once(8 * bags * pooling), "offsets": once(8 * bags), "sent": once(sent)}


def update(rows: float, row_bytes: float, bags: int, pooling: int, zipf_exponent: float, gradients: float) -> dict[str, Stream]:
    """Of one table."""
    updated = once(picked(bags * pooling, rows, row_bytes, zipf_exponent=zipf_exponent).distinct)
    read = Stream(gradients, pooling * gradients)
    return {"old_rows": updated, "new_rows": updated, "gradients": read, "order": once(8 * bags * pooling)}


# The selector: launches whose measured times over those without hints follow (docs/cache_policies.md).


@pytest.mark.parametrize(
    ("rows", "row_bytes", "bags", "zipf_exponent"),
    [(4e6, 512, 32768, 0.0), (4e6, 256, 32768, 0.0), (4e6, 512, 32768, 0.6), (8e6, 128, 65536, 0.0)],
    ids=["0.97", "0.94", "0.98", "0.95"],
)
def test_rows_that_hardly_come_again_pass(rows: float, row_bytes: float, bags: int, zipf_exponent: float) -> None:
    assert select(lookup(rows, row_bytes, bags, 16, zipf_exponent, 16.8 * MB), L2) is ALL_LOADS_FIRST


@pytest.mark.parametrize(("row_bytes", "sent"), [(256, 33.6), (256, 25.2), (512, 33.6)], ids=["1.04", "1.01", "1.02"])
def test_rows_that_pass_have_no_hint_where_their_results_do_not_stay_either(row_bytes: float, sent: float) -> None:
    bags = int(sent * MB / row_bytes / 2)
    assert select(lookup(4e6, row_bytes, bags, 16, 0.0, sent * MB), L2) is OFF


@pytest.mark.parametrize(
    ("rows", "row_bytes", "zipf_exponent", "sent"),
    [(4e6, 512, 0.9, 16.8), (4e6, 512, 1.05, 16.8), (4e6, 512, 1.05, 33.6), (1e5, 512, 0.0, 16.8)],
    ids=["1.06", "1.04", "1.14", "1.40"],
)
def test_rows_that_come_again_and_do_not_fit_have_no_hint(
    rows: float, row_bytes: float, zipf_exponent: float, sent: float
) -> None:
    """They would lose from evict_first."""
    assert select(lookup(rows, row_bytes, 32768, 16, zipf_exponent, sent * MB), L2) is OFF


def test_rows_that_fit_once_but_not_in_both_halves_are_evicted_first() -> None:
    assert select(lookup(4e6, 512, 32768, 16, 1.2, 16.8 * MB), L2) is ROWS_FIRST  # 0.95


def test_rows_that_fit_in_both_halves_have_no_hint() -> None:
    assert select(lookup(2e4, 512, 32768, 16, 0.0, 16.8 * MB), L2) is OFF  # evict_first: 1.10


def test_rows_that_fit_have_no_hint_beside_results_that_do_not() -> None:
    assert select(lookup(4e6, 512, 131072, 1, 1.05, 67.1 * MB), L2) is OFF  # evict_first: 1.06


def test_gradients_are_kept_beside_rows_that_pass() -> None:
    assert select(update(1e6, 512, 16384, 16, 0.0, 8.4 * MB), L2) is GRADIENTS_LAST  # 0.98


@pytest.mark.parametrize(
    ("rows", "row_bytes", "bags", "pooling", "zipf_exponent", "gradients"),
    [(1e6, 512, 16384, 16, 1.05, 8.4), (1e6, 512, 16384, 16, 1.2, 8.4), (4e6, 128, 131072, 1, 1.05, 33.6)],
    ids=["0.85", "0.82", "0.80"],
)
def test_an_update_of_few_rows_with_many_gradients_that_fits_is_evicted_first(
    rows: float, row_bytes: float, bags: int, pooling: int, zipf_exponent: float, gradients: float
) -> None:
    assert select(update(rows, row_bytes, bags, pooling, zipf_exponent, gradients * MB), L2) is ALL_LOADS_FIRST


def test_an_update_with_as_many_rows_as_gradients_has_no_hint_though_it_fits() -> None:
    assert select(update(4e6, 128, 16384, 16, 0.0, 4.2 * MB), L2) is GRADIENTS_LAST  # evict_first: 1.10


def test_gradients_that_are_read_once_and_do_not_fit_have_no_hint() -> None:
    assert select(update(1e6, 512, 131072, 1, 0.0, 67.1 * MB), L2) is OFF


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.2])
def test_estimates_for_zipf_rows_are_those_of_exact_sums(exponent: float) -> None:
    rows, count = 50_000, 20_000
    frequencies = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    frequencies /= frequencies.sum()
    stream = picked(count, rows, 100, zipf_exponent=exponent)
    expected = -torch.expm1(-count * frequencies).sum().item()
    assert stream.distinct / 100 == pytest.approx(expected, rel=0.01)
    assert stream.accessed == 100 * count


def test_rows_of_one_lookup_are_spread_over_its_tables() -> None:
    one, eight = picked(1e5, 1e6, 512, 1, 1.05), picked(8e5, 1e6, 512, 8, 1.05)
    assert eight.distinct == pytest.approx(8 * one.distinct)


# Turning it on.


def test_launches_have_no_hints_until_they_are_asked_for() -> None:
    assert cache_policy.choose(CPU, lambda: pytest.fail("streams are described for nothing")) is OFF


def test_the_selector_is_told_the_skew_that_a_launch_cannot_know() -> None:
    def rows() -> dict[str, Stream]:
        return {"rows": picked(1e6, 4e6, 512), "sent": once(1e5)}

    cache_policy.use("selected", zipf_exponent=0.0)
    assert cache_policy.choose(CPU, rows) is ALL_LOADS_FIRST
    cache_policy.use("selected", zipf_exponent=1.05)
    assert cache_policy.choose(CPU, rows) is OFF
    with pytest.raises(UsageError, match="'selected' needs zipf_exponent"):
        cache_policy.use("selected")


@pytest.mark.parametrize(("setting", "hints"), [("default", OFF), ("selected", ALL_LOADS_FIRST)])
def test_a_model_is_built_with_the_hints_that_its_config_asks_for(
    setting: str, hints: CachePolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("data: {source: synthetic}\ncomm: fused")
    config = load_config(tmp_path / "config.yaml", [f"embedding.cache_hints={setting}"])
    found: list[CachePolicy] = []

    def build_model(*_: object) -> None:
        streams = {"rows": picked(1e6, 4e6, 512), "sent": once(1e5)}
        found.append(cache_policy.choose(CPU, lambda: streams))

    monkeypatch.setattr(build, "build_model", build_model)
    monkeypatch.setattr(build, "shard", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    schema: Any = None
    build.build(config, schema, CPU)
    assert found == [hints]


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"cache policy 'fast'; allowed: selected, off"):
        cache_policy.use("fast")


# In compiled kernels.


# What is launched, and of each kernel that takes hints the streams.
HINTED: dict[str, dict[str, tuple[str, ...]]] = {
    "lookup_16_bits": {"lookup_and_scatter_kernel": ("rows", "indices", "offsets")},
    "lookup_row_wise": {"lookup_and_scatter_kernel": ("rows", "indices", "offsets")},
    "update_adagrad": {
        "update_kernel": ("old_rows", "gradients", "order", "new_rows"),
        "merge_kernel": ("old_rows", "new_rows"),
    },
}

_HINT = re.compile(r"\b(ld|st)\.global((?:\.c[agsv]|\.w[bt]|\.L1::evict_\w+)?)")


def hints_in(ptx: str) -> set[str]:
    """Such as ``ld .cg`` and ``st .L1::evict_first``."""
    return {f"{kind} {hint}" for kind, hint in _HINT.findall(ptx) if hint}


@pytest.mark.parametrize("launch", HINTED)
def test_each_hint_arrives_in_the_kernels_and_no_other(launch: str, compiled: dict[str, Any], monkeypatch: Any) -> None:
    for policy in (OFF, ALL_LOADS_FIRST, ROWS_FIRST, GRADIENTS_LAST):
        monkeypatch.setattr(cache_policy, "OFF", policy)
        compiled.clear()
        LAUNCHES[launch][0]()
        for kernel, built in compiled.items():
            streams = [(stream, getattr(policy, stream)) for stream in HINTED[launch].get(kernel, ())]
            expected = {f"{'st' if stream == 'new_rows' else 'ld'} .L1::{hint}" for stream, hint in streams if hint}
            assert hints_in(built.asm["ptx"]) == expected, f"{kernel}, {policy}"
            assert built.asm["cubin"]


def test_every_stream_is_one_of_a_kernel() -> None:
    streams = {stream for kernels in HINTED.values() for own in kernels.values() for stream in own}
    assert streams == set(CachePolicy._fields)


# Results, under Triton's interpreter.


def results_of_policies(number: int) -> dict[str, list[Tensor]]:
    """Of a tiny workload without hints, and with those of the selector, which takes the cache for small."""
    results = {}
    workload = WORKLOADS[number]
    with torch.no_grad(), process_group(Rank.from_environment(), CPU), closing(symmetric_group(device=CPU)) as group:
        torch.manual_seed(0)
        run = workload.make(group)
        cache_policy.gpu_of = lambda device: replace(INTERPRETER, l2=512)
        for policy in ("off", "selected"):
            cache_policy.use(policy, workload.zipf_exponent)
            results[policy] = [own.clone() for own in run()]
    return results


@pytest.mark.interpreted
@pytest.mark.parametrize("number", range(len(WORKLOADS)), ids=[workload.name for workload in WORKLOADS])
def test_no_policy_changes_a_bit(number: int) -> None:
    (results,) = run_ranks(1, results_of_policies, number)
    expected = results["off"]
    assert all(bool(own.any()) for own in expected)
    for policy, own in results.items():
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)), policy
