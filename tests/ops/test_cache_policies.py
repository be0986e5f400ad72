"""Cache policies: what the selector gives which stream, that hints arrive in the compiled kernels, and that results stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cache_policies.workloads import tiny
from benchmarks.common.harness import open_world
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common import cache_policy
from dlrm_fused.ops.common.cache_hints import HARDWARE, LOADS, OFF, STATIC, STORES, CachePolicy, Hint, with_hints
from dlrm_fused.ops.common.cache_policy import Stream, once, picked, select
from dlrm_fused.ops.common.l2_persistence import set_aside
from dlrm_fused.serving.cached_attention import cached_attention
from tests.distributed.launch import run_ranks
from tests.ops.test_compile_for_gpus import LAUNCHES
from tests.ops.test_compile_for_gpus import compiled as compiled

MB = 1e6
L2 = 50 * MB
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    cache_policy.use("off")


def given(policy: CachePolicy) -> dict[str, str]:
    """Hints that differ from the defaults."""
    off = OFF.hints()
    return {stream: hint for stream, hint in policy.hints().items() if hint != off[stream]}


def lookup(rows: float, zipf_exponent: float, sent: float) -> dict[str, Stream]:
    """A million rows of 512 bytes."""
    return {"rows": picked(1e6, rows, 512, zipf_exponent=zipf_exponent), "indices": once(8 * MB), "sent": once(sent)}


# The selector.


def test_a_launch_that_the_cache_holds_needs_no_hints() -> None:
    assert select({"gradients": Stream(4 * MB, 400 * MB), "old_rows": once(8 * MB)}, L2) is OFF


def test_uniform_rows_of_a_large_table_find_nothing_to_protect() -> None:
    assert select(lookup(1e8, 0.0, 60 * MB), L2) is OFF


def test_skewed_rows_are_kept_and_large_results_pass() -> None:
    assert given(select(lookup(4e6, 1.05, 60 * MB), L2)) == {"rows": "evict_last", "sent": "evict_first"}


def test_results_that_the_next_kernel_finds_in_the_cache_stay() -> None:
    assert given(select(lookup(4e6, 1.05, 10 * MB), L2)) == {"rows": "evict_last"}


def test_gradients_of_an_update_are_kept_beside_its_rows() -> None:
    update = {"gradients": Stream(8 * MB, 128 * MB), "old_rows": once(60 * MB), "new_rows": once(60 * MB)}
    assert given(select(update, L2)) == {"gradients": "evict_last"}  # rows have evict_first anyway


def test_what_is_read_again_but_too_large_to_be_kept_has_no_hint() -> None:
    assert select({"activations": Stream(200 * MB, 400 * MB), "sent": once(400 * MB)}, L2) is OFF


def test_equal_launches_share_a_policy_which_kernels_are_looked_up_by() -> None:
    assert select(lookup(4e6, 1.05, 60 * MB), L2) is select(lookup(5e6, 1.05, 60 * MB), L2)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.2])
def test_estimates_for_zipf_rows_are_those_of_exact_sums(exponent: float) -> None:
    rows, count, kept = 50_000, 20_000, 3_000
    frequencies = torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent
    frequencies /= frequencies.sum()
    stream = picked(count, rows, 100, zipf_exponent=exponent)
    expected = -torch.expm1(-count * frequencies).sum().item()
    assert stream.distinct / 100 == pytest.approx(expected, rel=0.01)
    assert stream.kept_share(kept * 100) == pytest.approx(frequencies[:kept].sum().item(), rel=0.02)
    assert stream.kept_share(1e12) == pytest.approx(1.0)


def test_tables_of_one_lookup_share_the_cache() -> None:
    one, eight = picked(1e5, 1e6, 512, 1, 1.05), picked(8e5, 1e6, 512, 8, 1.05)
    assert eight.distinct == pytest.approx(8 * one.distinct)
    assert eight.kept_share(8 * MB) == pytest.approx(one.kept_share(MB))


# Turning it on.


def test_launches_have_no_hints_until_they_are_asked_for() -> None:
    assert cache_policy.choose(CPU, lambda: pytest.fail("streams are described for nothing")) is OFF


def test_a_policy_is_used_for_every_launch_until_another_one_is() -> None:
    cache_policy.use("stores .wt")
    assert cache_policy.choose(CPU, dict) is STATIC["stores .wt"]
    own = with_hints(rows=Hint(".cg"))
    cache_policy.use(own)
    assert cache_policy.choose(CPU, dict) is own
    cache_policy.use("off")
    assert cache_policy.choose(CPU, dict) is OFF


def test_the_selector_is_told_the_skew_that_a_launch_cannot_know() -> None:
    def rows() -> dict[str, Stream]:
        return {"rows": picked(1e6, 4e6, 512)}

    cache_policy.use("selected")
    assert cache_policy.choose(CPU, rows) is OFF
    cache_policy.use("selected", zipf_exponent=1.5)
    assert given(cache_policy.choose(CPU, rows)) == {"rows": "evict_last"}


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"cache policy 'fast'; allowed: selected, off, .*stores evict_first"):
        cache_policy.use("fast")


def test_l2_cache_is_set_aside_on_gpus_only() -> None:
    with pytest.raises(UsageError, match="cpu: only the L2 cache of a GPU"), set_aside(CPU):
        pass


# In compiled kernels.


def launch_attention() -> None:
    cached_attention(torch.zeros(16, 4, 3, 64, dtype=torch.float16), torch.zeros(2, dtype=torch.int64), 0, 8192)


# What is launched, and of each kernel that takes hints the streams.
HINTED: dict[str, tuple[Callable[[], None], dict[str, tuple[str, ...]]]] = {
    name: (LAUNCHES[name][0], streams)
    for name, streams in {
        "lookup_16_bits": {
            "lookup_and_scatter_kernel": ("rows", "indices", "offsets", "sent"),
            "add_up_kernel": ("received", "results"),
        },
        "lookup_row_wise": {
            "lookup_and_scatter_kernel": ("rows", "indices", "offsets", "sent"),
            "add_up_present_kernel": ("received", "results"),
        },
        "lookup_and_put": {"lookup_and_put_kernel": ("rows", "indices", "offsets", "sent")},
        "update_adagrad": {
            "update_kernel": ("old_rows", "gradients", "order", "new_rows"),
            "merge_kernel": ("old_rows", "new_rows"),
        },
        "scatter_rows": {"scatter_rows_kernel": ("activations", "routes", "sent")},
        "scatter_tiles": {"scatter_tiles_kernel": ("activations", "sent")},
        "route": {"count_kernel": ("routes", "results"), "place_kernel": ("routes", "results")},
        "steps": {"sum_slots_kernel": ("received", "results")},
        "gemm": {"gemm_kernel": ("results",)},
        "gemm_combine": {"gemm_kernel": ("sent",)},
        "gemv_one_shot": {"gemv_all_reduce_kernel": ("results",)},
    }.items()
} | {"attention": (launch_attention, {"_part_kernel": ("results",), "_merge_kernel": ("results",)})}

_HINT = re.compile(r"\b(ld|st)\.global((?:\.c[agsv]|\.w[bt]|\.L1::evict_\w+)?)")


def hints_in(ptx: str) -> set[str]:
    """Such as ``ld .cg`` and ``st .L1::evict_first``."""
    return {f"{kind} {hint}" for kind, hint in _HINT.findall(ptx) if hint}


def as_in_ptx(stream: str, hint: Hint) -> str:
    return f"{'st' if stream in STORES else 'ld'} {hint.modifier or f'.L1::{hint.eviction}'}"


@pytest.mark.parametrize("family", HINTED)
def test_each_hint_arrives_in_the_kernels_and_no_other(family: str, compiled: dict[str, Any]) -> None:
    launch, kernels = HINTED[family]
    for name, policy in STATIC.items():
        cache_policy.use(policy)
        compiled.clear()
        launch()
        for kernel, built in compiled.items():
            streams = [(stream, getattr(policy, stream)) for stream in kernels.get(kernel, ())]
            expected = {as_in_ptx(stream, hint) for stream, hint in streams if hint != HARDWARE}
            assert hints_in(built.asm["ptx"]) == expected, f"{kernel}, {name}"
            assert built.asm["cubin"]


def test_every_stream_is_one_of_a_kernel() -> None:
    streams = {stream for _, kernels in HINTED.values() for own in kernels.values() for stream in own}
    assert streams == {*LOADS, *STORES}


# Results, under Triton's interpreter.


def results_of_policies(number: int) -> dict[str, list[Tensor]]:
    """Of a tiny workload under each policy; the selector takes the cache for so small that it gives hints."""
    results = {}
    with torch.no_grad(), open_world() as world:
        workload = tiny()[number]
        run = workload.make(world)
        cache_policy._l2_bytes = lambda device: 512
        for policy in (*STATIC, cache_policy.SELECTED):
            cache_policy.use(policy, workload.zipf_exponent)
            results[policy] = run.results()
    return results


@pytest.mark.interpreted
@pytest.mark.parametrize("number", range(len(tiny())), ids=[workload.name for workload in tiny()])
def test_no_policy_changes_a_bit(number: int) -> None:
    (results,) = run_ranks(1, results_of_policies, number)
    expected = results["off"]
    assert all(bool(own.any()) for own in expected)
    for policy, own in results.items():
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)), policy
