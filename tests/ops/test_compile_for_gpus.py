"""Every kernel of the package compiles for each architecture, launched as on a GPU; needs no GPU, since nothing runs.

Each has room there: the shared memory and the registers of a program. For AMD's GPUs kernels compile too, without inline
assembly; whether they work there nobody has tried.

The compiled code is searched for what the interpreter cannot show: addresses by products of 32 bits, which may overflow, and
instructions that lose NaN or the smallest numbers.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.errors import PTXASError

from dlrm_fused.errors import UsageError
from dlrm_fused.inference.online import cached_attention as attention
from dlrm_fused.ops import adagrad
from dlrm_fused.ops.all_gather_gemm import kernel as pieces
from dlrm_fused.ops.all_gather_gemm import tuning as pieces_tuning
from dlrm_fused.ops.all_gather_gemm.kernel import (
    Epoch,
    multiply_and_add,
    multiply_and_send,
    multiply_arriving,
    push_and_multiply,
)
from dlrm_fused.ops.common import devices, meeting
from dlrm_fused.ops.common import scatter_rows as scatter
from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import INTERPRETER
from dlrm_fused.ops.common.recorded import recorded_tiles
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.embedding_all_to_all import ExchangeLayout, LookupLayout, reduce, update
from dlrm_fused.ops.embedding_all_to_all import tuning as lookup_tuning
from dlrm_fused.ops.embedding_all_to_all.kernel import Lookup, in_memory_of_ranks, in_slices, lookup_and_scatter
from dlrm_fused.ops.embedding_all_to_all.layout import feature_tables
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.scatter import scatter_tiles, store_tiles
from dlrm_fused.ops.feature_all_to_all.exchange import fetch_kernel, send_kernel
from dlrm_fused.ops.gemm_all_to_all import kernel as gemm
from dlrm_fused.ops.gemm_all_to_all import op as gemm_op
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemm_all_to_all import weight_gradient
from dlrm_fused.ops.gemm_all_to_all.weight_gradient import grouped_weight_gradient
from dlrm_fused.ops.gemv_all_reduce import kernel as gemv_kernel
from dlrm_fused.ops.gemv_all_reduce import op as gemv
from dlrm_fused.ops.gemv_all_reduce.chunks import ChunkedSums, ScatteredSums
from dlrm_fused.ops.gemv_all_reduce.copies import CopiedSums
from dlrm_fused.ops.gemv_all_reduce.kernel import ReceiveBuffer, SplitBuffer
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks, choose_blocks, fitted, needed_memory, override
from dlrm_fused.ops.gemv_all_reduce.workspace import Inputs
from dlrm_fused.ops.hstu_attention import BUCKETS, JaggedQueries, RelativeBias, backward
from dlrm_fused.ops.hstu_attention import kernel as hstu
from dlrm_fused.ops.moe import crossing_steps, dispatch, products, steps
from dlrm_fused.ops.moe.activations import ACTIVATIONS
from dlrm_fused.ops.schedules import Streams
from dlrm_fused.ops.schedules.piece_flags import PieceArgs, PieceFlags, mark_kernel
from dlrm_fused.ops.sequence_all_to_all import places
from dlrm_fused.ops.sequence_all_to_all.workspace import Counts
from dlrm_fused.symmetric import device
from dlrm_fused.symmetric.device import channel_args
from dlrm_fused.symmetric.hosts import Hosts
from dlrm_fused.symmetric.launches import Launches
from tests.ops.address_arithmetic import (
    PACKAGE,
    bounds_of_no_line,
    loads_that_warps_make_by_themselves_in_waits,
    unbounded_products_in_addresses,
)
from tests.ops.embedding_all_to_all.lookups import make_lookup, make_tables

WORLD, RANK = 2, 1
ONE_HOST = Hosts((tuple(range(WORLD)),), RANK)
INLINE_ASSEMBLY = "tt.elementwise_inline_asm"
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
EXPERTS, TOP_K, WIDTH, TILE_ROWS = 8, 2, 64, 64


@dataclass(frozen=True)
class Architecture:
    """Attributes:
    target: of Triton's compiler.
    memory: bytes of shared memory of a multiprocessor.
    """

    target: GPUTarget
    memory: int

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.target.arch, 10) if self.target.backend == "cuda" else (0, 0)


# Shared memory: NVIDIA's *CUDA C++ Programming Guide*, "Compute Capabilities"; AMD's white papers of CDNA 3 and CDNA 4.
NVIDIA = {f"sm_{arch}": Architecture(GPUTarget("cuda", arch, 32), kib << 10) for arch, kib in SHARED_KIB.items()}
AMD = {arch: Architecture(GPUTarget("hip", arch, 64), kib << 10) for arch, kib in {"gfx942": 64, "gfx950": 160}.items()}
ARCHITECTURES = NVIDIA | AMD


# Their loops may look at words as they like.
OF_ONE_WARP = {"poll"}


class NoGpu:
    """A driver that answers what Triton asks before it compiles."""

    def __init__(self, of: Architecture) -> None:
        self._of = of

    def get_current_target(self) -> GPUTarget:
        return self._of.target

    def get_current_device(self) -> int:
        # Triton remembers by this number what it has compiled.
        return list(ARCHITECTURES.values()).index(self._of)

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def architecture() -> str:
    """For which kernels are compiled, where a test says nothing else."""
    return "sm_90"


@pytest.fixture
def compiled(architecture: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """By name, the kernels that the test has launched: compiled, not run."""
    kernels: dict[str, Any] = {}
    with compile_only(ARCHITECTURES[architecture], monkeypatch, kernels.__setitem__):
        yield kernels


@contextmanager
def compile_only(of: Architecture, monkeypatch: pytest.MonkeyPatch, seen: Callable[[str, Any], None]) -> Iterator[None]:
    """Within, launches compile for an architecture and run nothing; ``seen`` gets each kernel's name and what was compiled."""
    run = JITFunction.run

    def compile_kernel(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> None:
        made = run(kernel, *args, warmup=True, **options)
        # Elsewhere Triton makes addresses of descriptors' coordinates, which are of 32 bits by definition, in 64 bits.
        if of.capability >= (9, 0):
            assert unbounded_products_in_addresses(made.asm["ttir"]) == set()
        if kernel.__name__ not in OF_ONE_WARP:
            assert loads_that_warps_make_by_themselves_in_waits(made.asm["ttir"]) == []
        if "ptx" in made.asm:
            assert set(re.findall(LOSES_NUMBERS, made.asm["ptx"])) <= LOSES_NOTHING.get(kernel.__name__, set())
        seen(kernel.__name__, made)

    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    # Such a hook of a user gets a kernel's constants as JSON.
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: None)
    monkeypatch.setattr(driver, "_active", NoGpu(of))
    monkeypatch.setattr(devices, "is_nvidia", lambda device: of.target.backend == "cuda")
    monkeypatch.setattr(devices, "capability", lambda device: of.capability)
    monkeypatch.setattr(gemv, "starts_early", lambda device, programs: devices.has_dependent_launches(device))
    for module in (gemm, weight_gradient, products, pieces, attention, hstu, backward):
        monkeypatch.setattr(module, "gpu_of", lambda device: replace(INTERPRETER, shared_memory=of.memory))
    for module in (scatter, dispatch, reduce, adagrad, meeting):
        monkeypatch.setattr(module, "uses_kernels", lambda device: True)
    monkeypatch.setattr(update, "_check_lookup", lambda tables, indices, offsets: tables.batch_size(offsets))
    yield
    override(None)
    gemm_tuning.override(None)


def channel(control: int = 1 << 46) -> Any:
    """A channel whose words for the host are at an address ``control``."""
    words = torch.zeros(8, dtype=torch.int64)
    args = channel_args(words, words, words, control, 10**10, RANK, WORLD)
    group = SimpleNamespace(rank=RANK, world_size=WORLD, hosts=ONE_HOST, device=torch.device("cpu"))
    return SimpleNamespace(args=args, group=group, launches=Launches())


def memory() -> Any:
    return SimpleNamespace(local=torch.zeros(4096, dtype=torch.uint8), addresses=torch.zeros(WORLD, dtype=torch.int64))


def window() -> ReceiveWindow:
    return ReceiveWindow(memory(), channel(), offset=4096, fingerprint=1)


def groups() -> gemm.Groups:
    return gemm.Groups(TILE_ROWS, torch.zeros(EXPERTS // WORLD + 1).int(), torch.zeros(EXPERTS // WORLD).int())


def rows(dtype: torch.dtype = torch.bfloat16, count: int = 2 * TILE_ROWS, width: int = WIDTH) -> Tensor:
    return torch.zeros(count, width, dtype=dtype)


def launch_scatter_rows(dtype: torch.dtype, scale: Tensor | None, destinations_at: int | None) -> None:
    scatter.scatter_rows(
        rows(dtype), torch.zeros(4 * TILE_ROWS).int(), window(), rows_per_rank=99, repeats=2, scale=scale,
        destinations_at=destinations_at,
    )  # fmt: skip


def launch_chosen_rows() -> None:
    chosen = torch.zeros(4 * TILE_ROWS, dtype=torch.int64)
    scatter.scatter_rows(
        rows(torch.float16), chosen.int(), window(), rows_per_rank=99, source_rows=chosen, dtype=SINGLE, destinations_at=8192,
        places_at=12288,
    )  # fmt: skip


def launch_place_rows(with_lookup: bool) -> None:
    counts = Counts(asked=(3, 1), sent=(2, 4), first_rows=(0, 3), most_rows=6, fingerprint=1)
    offsets, ids = torch.zeros(2 * 5 + 1, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    lookup = (ids, torch.zeros(2, dtype=torch.int64)) if with_lookup else ()
    for by_rank in (False, True):
        places.place_rows(offsets, [2, 3], counts, *lookup, by_rank=by_rank)


def launch_route() -> None:
    ids = torch.zeros(64, TOP_K, dtype=torch.int64)
    block = rows(), torch.zeros(2 * TILE_ROWS).int()
    for elsewhere in (None, torch.zeros(2, 1 + EXPERTS).int()[:, 1:]):
        dispatch.route(
            ids, window(), count=EXPERTS, tile_rows=TILE_ROWS, rows_per_rank=2 * TILE_ROWS, block=block, elsewhere=elsewhere
        )


def launch_crossing(dtype: torch.dtype, own_host: int, others: list[int]) -> None:
    host_of_expert, tokens = torch.zeros(128, dtype=torch.int64), rows(dtype)
    experts, gates = torch.zeros(len(tokens), TOP_K, dtype=torch.int64), torch.zeros(len(tokens), TOP_K)
    for is_named in (True, False):
        crossing = crossing_steps.KernelCrossing(host_of_expert, own_host, others, 1, names_elsewhere=is_named)
        places, _ = crossing.find_places(experts)
        packed = crossing.pack(len(tokens), places, tokens, experts, gates)
        crossing.unpack(packed, tokens, experts, gates, len(tokens))
    crossing.add(crossing.pack(len(tokens), places, tokens), places, tokens)
    crossing.add(crossing.pack(len(tokens), None, tokens, gates=gates), places, tokens, gates)


def launch_steps(dtype: torch.dtype) -> None:
    of_experts, tokens = steps.KernelSteps(ACTIVATIONS["silu"]), rows(dtype)
    of_experts.zero_pads(tokens, torch.zeros(len(tokens)).int(), groups())
    targets = torch.zeros(len(tokens)).int()
    of_experts.sum_slots(tokens, targets, torch.zeros(64, TOP_K), 64, TOP_K)
    of_experts.sum_slots(tokens, targets, None, 64, TOP_K)
    of_experts.gates_gradient(rows(dtype, 64), tokens, targets, TOP_K)


def launch_hidden_layer(activation: str, tile_rows: int) -> None:
    of_experts, local = steps.KernelSteps(ACTIVATIONS[activation]), EXPERTS // WORLD
    of_tiles = gemm.Groups(tile_rows, torch.zeros(local + 1).int(), torch.zeros(local).int())
    w_in = torch.zeros(local, of_experts.activation.parts * WIDTH, WIDTH, dtype=HALF)
    hidden, _ = of_experts.hidden(rows(), w_in, of_tiles)
    of_experts.hidden_gradient(rows(), torch.zeros(local, WIDTH, WIDTH, dtype=HALF), hidden, of_tiles)


def launch_gemm(dtype: torch.dtype) -> None:
    x, weight, out = rows(dtype), torch.zeros(EXPERTS // WORLD, WIDTH, WIDTH, dtype=dtype), rows(dtype)
    gemm.gemm(x, weight[0], out)
    gemm.grouped_gemm(x, weight, groups(), out)
    gemm.grouped_gemm(x, weight, groups(), out, weight_is_transposed=True)
    grouped_weight_gradient(x, x, groups(), weight)
    grouped_weight_gradient(x, x, groups(), weight.float(), expected_rows=4096)


def launch_gemm_combine(dtype: torch.dtype, fp8: bool) -> None:
    weight, scale = torch.zeros(EXPERTS // WORLD, WIDTH, WIDTH, dtype=dtype), None
    if fp8:
        weight, scale = weight.to(torch.float8_e4m3fn), torch.zeros(EXPERTS // WORLD, WIDTH)
    gemm.gemm(rows(dtype), weight[0], window(), None if scale is None else scale[0])
    routes = gemm.Routes(groups(), torch.zeros(2 * TILE_ROWS).int(), slots=99)
    gemm.grouped_gemm(rows(dtype), weight, routes, window())


def launch_split_gemm(fp8: bool) -> None:
    """K in four pieces, with and without other ranks."""
    tiles = gemm_tuning.Tiles(64, 64, 128, band=4, warps=4, stages=5, programs=1, splits=4)
    gemm_tuning.override(gemm_tuning.fitted(tiles, HALF.itemsize, gemm.gpu_of(torch.device("cpu")).shared_memory))
    weight, scale = torch.zeros(WIDTH, 1024, dtype=HALF), torch.zeros(WIDTH) if fp8 else None
    weight = weight.to(torch.float8_e4m3fn) if fp8 else weight
    gemm.gemm(rows(width=1024), weight, rows(), scale)
    gemm.gemm(rows(width=1024), weight, window(), scale)


def piece_flags(has_own_channel: bool = True) -> Any:
    flags: Any = object.__new__(PieceFlags)
    words = torch.zeros(8, dtype=torch.int64)
    flags.__dict__.update(most=8, _channel=channel(), _own=has_own_channel, args=PieceArgs(words, memory().addresses, words, 8))
    return flags


def launch_piece_flags(has_own_channel: bool) -> None:
    flags = piece_flags(has_own_channel)
    flags.begin(1)
    flags.wait(1, 2)
    mark_kernel[(1,)](flags.args, channel().args, 0, 2, num_warps=1)


def launch_products_of_pieces(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Rows of a shard, columns and depth."""
    count, columns, depth = shape
    own, weight, ours = rows(dtype, count, depth), rows(dtype, columns, depth), memory()
    ours.local = torch.zeros(WORLD * count * max(depth, columns) * dtype.itemsize, dtype=torch.uint8)
    out, counters = rows(dtype, WORLD * count, columns), torch.zeros(WORLD, dtype=torch.int64)
    x = rows(dtype, WORLD * count, depth)
    for ends, is_transposed in (((count // 4, count // 2, count), False), ((count,), True)):
        of_product = weight.T.contiguous() if is_transposed else weight
        epoch = Epoch(channel(), piece_flags(), 1, ends, counters)
        multiply_arriving(own, ours, of_product, out, epoch, is_transposed=is_transposed)
        push_and_multiply(own, ours, of_product, out, epoch, is_transposed=is_transposed)
        multiply_and_add(own, of_product, out[:count], out, epoch, is_transposed=is_transposed)
        multiply_and_send(x, of_product, out[:count], ours, epoch, is_transposed=is_transposed)


def launch_products_of_small_pieces() -> None:
    """In tiles that take little time to compile."""
    gemm_tuning.override(gemm_tuning.Tiles(64, 64, 32, band=8, warps=4, stages=2, programs=1))
    launch_products_of_pieces(HALF, (64, 64, 64))


def launch_gemv(dtype: torch.dtype, blocks: Blocks, with_norm: bool = False, count: int = 5, *, is_given: bool = False) -> None:
    override(blocks)
    words, parts = torch.zeros(8, dtype=torch.int64), torch.zeros(4096)
    workspace: Any = SimpleNamespace(
        world_size=WORLD, gpu=gemm.gpu_of(torch.device("cpu")), squares=parts, slot_words=4096, channel=channel()
    )  # fmt: skip
    workspace.kernel_args = workspace.channel.args
    workspace.split_buffer = SplitBuffer(words, parts, words)
    workspace.buffer_args = lambda flagged: ReceiveBuffer(words, memory().addresses, 65536, 0, 8192, 30000)
    x, weight, residual, bias = (
        rows(dtype, count, 96),
        rows(dtype, WIDTH, 96),
        rows(dtype, count),
        torch.zeros(WIDTH, dtype=dtype),
    )
    inputs = Inputs(x, weight, bias, residual, bias if with_norm else None, 1e-6)
    gemv.KernelCall(workspace, inputs, is_given=is_given)(workspace, inputs)


def launch_sum_of_many_rows(dtype: torch.dtype, sums: Callable[..., Any]) -> None:
    given, ours = channel(), memory()
    ours.local = torch.zeros(70 * WIDTH * dtype.itemsize, dtype=torch.uint8)
    pool = {"receive": lambda shape, dtype: torch.zeros(shape, dtype=dtype), "to_hold": lambda result: result}
    results = SimpleNamespace(memory=memory(), offset_of=lambda _: 4096, **pool)
    workspace: Any = SimpleNamespace(
        world_size=WORLD, device=rows().device, parts=ours, results=results, channel=given, dtype=dtype,
        streams=Streams(rows().device),
    )  # fmt: skip
    inputs = Inputs(rows(dtype, 70), rows(dtype, WIDTH), None, rows(dtype, 70), None, 1e-6)
    sums(workspace, inputs, fingerprint=1)(workspace, inputs)


def launch_copied_sums() -> None:
    """In tiles that take little time to compile."""
    gemm_tuning.override(gemm_tuning.Tiles(64, 64, 32, band=8, warps=4, stages=2, programs=1))
    ours = memory()
    ours.local = torch.zeros(64 * WORLD * WIDTH * HALF.itemsize, dtype=torch.uint8)
    ours.peer = lambda rank: ours.local
    workspace: Any = SimpleNamespace(
        rank=RANK, world_size=WORLD, dtype=HALF, gpu=INTERPRETER, parts=ours, results=SimpleNamespace(memory=ours),
        channel=channel(), pieces=piece_flags(has_own_channel=False), streams=Streams(rows().device),
    )  # fmt: skip
    workspace.pieces.__dict__.update(_stamp=torch.zeros(1, dtype=torch.int64))
    inputs = Inputs(rows(HALF, 64 * WORLD), rows(HALF, WIDTH), rows(HALF, WIDTH)[0], rows(HALF, 64 * WORLD), None, 1e-6)
    CopiedSums(workspace, inputs, fingerprint=1)(workspace, inputs)


def launch_update(dtype: torch.dtype, optimizer: str, features: list[int], weighted: bool) -> None:
    tables = make_tables(
        [9, 6], [64, 20], features, dtype=dtype, mean=weighted, optimizer=optimizer, stochastic_rounding=dtype != SINGLE
    )
    lookup = make_lookup(tables, 4, 3, weighted=weighted)
    order = update.sort_lookup(tables, lookup.indices, lookup.offsets)
    inputs = (lookup.indices, lookup.offsets)
    cancelled = torch.zeros(1, dtype=torch.int64)
    update.apply_gradients(tables, order, lookup.gradients, *inputs, lookup.per_sample_weights, cancelled=cancelled)
    update.per_sample_weight_gradients(tables, lookup.gradients, *inputs)


def launch_lookup(wire: torch.dtype, row_wise: bool, output: torch.dtype = torch.float32) -> None:
    """The lookup of a feature of each of two block dims, and what its receiver does."""
    tables, lookup = make_tables([9, 6], [64, 20], [0, 1]), LookupLayout((0, 64), (64, 20), row_wise)
    plan = BatchPlan(ExchangeLayout(((lookup,),) * WORLD, 84), ONE_HOST, (4, 4), output, wire, wire, torch.device("cpu"))
    features = feature_tables(tables.offsets, lookup.dims, lookup.columns, torch.device("cpu"))
    staging = SimpleNamespace(local=torch.zeros(1 << 16, dtype=torch.uint8), addresses=torch.zeros(WORLD, dtype=torch.int64))
    workspace: Any = SimpleNamespace(
        tables=[tables], own_lookups=[lookup], layout=plan.layout, partial_sum_tables=features, forward_wire=wire,
        forward_channel=channel(), device=torch.device("cpu"), rank=RANK, world_size=WORLD, staging=lambda: staging,
        destination_memory=lambda plan, lookup: staging,
    )  # fmt: skip
    batch = make_lookup(tables, 8, 3, weighted=row_wise)
    for own in features:
        lookup_and_scatter(
            workspace, plan,
            Lookup(0, own, tables.weights, batch.indices, batch.offsets, batch.per_sample_weights),
            in_memory_of_ranks(workspace, plan, 0), receive_offset=4096, first=True, last=True,
        )  # fmt: skip
        lookup_and_scatter(
            workspace, plan,
            Lookup(0, own, tables.weights, batch.indices, batch.offsets, batch.per_sample_weights),
            in_slices(plan.slices, staging.local), receive_offset=0, first=False, last=False,
        )  # fmt: skip
    reduce._finish_staged(workspace, plan, torch.zeros(4, 84, dtype=output), are_empty_bags_sent=not row_wise)


def launch_feature_exchange(values: torch.dtype) -> None:
    lengths, ids, words = torch.zeros(64).int(), torch.zeros(500, dtype=values), torch.zeros(64, dtype=torch.int64)
    send_kernel[(4,)](
        lengths, lengths, ids, words, 2, 32, 1, 500, 64, 640, words, memory().addresses, channel().args, 1,
        BAGS=1024, ELEMENTS=2048, num_warps=8,
    )  # fmt: skip
    for hosts in (False, True):
        fetch_kernel[(4, 8)](
            words, 4, memory().addresses, ids, ids, WORLD=WORLD, RUNS=4, HOSTS=hosts, ELEMENTS=2048, num_warps=8
        )


def launch_scatter_tiles(wire: torch.dtype) -> None:
    layout = ExchangeLayout(((LookupLayout((0,), (WIDTH,)),), (LookupLayout((WIDTH,), (WIDTH,)),)), WORLD * WIDTH)
    plan = BatchPlan(layout, ONE_HOST, (4, 4), SINGLE, wire, wire, torch.device("cpu"))
    for relative in (True, False):
        scatter_tiles(rows(SINGLE), plan.pooled_tables[0], 4, window(), wire=wire, relative=relative)


def launch_store_tiles(wire: torch.dtype) -> None:
    """A gradient is packed into slices, and one that has arrived is spread."""
    layout = ExchangeLayout(((LookupLayout((0,), (WIDTH,)),), (LookupLayout((WIDTH,), (WIDTH,)),)), WORLD * WIDTH)
    plan = BatchPlan(layout, Hosts(((0,), (1,)), 0), (4, 4), SINGLE, wire, wire, torch.device("cpu"))
    buffer = plan.slices.gradients.new_buffer(torch.device("cpu"))
    store_tiles(rows(SINGLE, 4, WORLD * WIDTH), plan.slices.gradient_buffer_table, 4, buffer, 0, wire)
    store_tiles(rows(wire, 4).flatten(), plan.slices.spread_table, 4, memory().addresses, 0, wire)


def launch_sums_of_many_ranks() -> None:
    """Three sources: products with 0 and 1 the compiler leaves out."""
    sources, output = torch.zeros(3, 5, WIDTH, dtype=torch.float16), torch.zeros(5, WIDTH, dtype=torch.float16)
    reduce.add_up(sources, output)
    presence, features = torch.zeros(3, 2, 16, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.int64)
    reduce.add_up_present_kernel[(2, 1)](
        sources, presence, output, features, 5, sources.stride(0), sources.stride(1), presence.stride(0), presence.stride(1),
        output.stride(0), SOURCES=3, ROWS=4, DIM=WIDTH, num_warps=4,
    )  # fmt: skip


def launch_attention(dtype: torch.dtype) -> None:
    attention.cached_attention(torch.zeros(5, 2, 3, 24, dtype=dtype), torch.zeros(2, dtype=torch.int64), 1, 1000)


def launch_hstu_attention(
    dtype: torch.dtype, d: int, biases: str = "", has_targets: bool = False, queries: int | None = None
) -> None:
    """All that training launches, of queries, keys and values in one tensor."""
    bounds, heads = torch.zeros(3, dtype=torch.int64), 4
    targets = bounds[1:] if has_targets else None
    batch = JaggedQueries(bounds, bounds, bounds[1:], longest=1000, targets_from=targets, most_queries=queries)
    by_distance = torch.zeros(heads, 1000) if "distance" in biases else None
    by_time = (torch.zeros(heads, BUCKETS), torch.zeros(8, dtype=torch.int64)) if "time" in biases else ()
    of_rows = torch.zeros(8, heads, 4, d, dtype=dtype).unbind(2)
    call = hstu.Call(*of_rows[:3], batch, RelativeBias(by_distance, *by_time), scale=0.1, divisor=1000.0)
    gradient = hstu.forward(call)
    backward.queries_and_biases_gradients(call, gradient, of_distances="distance" in biases, of_times="time" in biases)
    backward.keys_and_values_gradients(call, gradient)


def launch_adagrad() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3000))
    parameter.grad = torch.zeros(3000)
    adagrad.Adagrad(parameter, lr=0.1, weight_decay=0.1, eps=1e-8).step()


def launch_waits() -> None:
    for poll in (device._poll, gemv_kernel.poll):
        poll[(1,)](channel().args, torch.zeros(8, dtype=torch.int64), num_warps=1)


HALF, SINGLE = torch.bfloat16, torch.float32
# Instructions that lose NaN or the smallest numbers, or add 16 bits in memory.
LOSES_NUMBERS = r"\b(?:(?:min|max)\.(?!NaN)[\w.]*f(?:16|32)\w*|\w+\.[\w.]*ftz[\w.]*|(?:red|atom)\.[\w.]*f(?:16|32)\w*)"
LOSES_NOTHING = {
    # The largest score is only subtracted from all, NaN among them; shares below 2^-126 of the largest may be 0.
    "_part_kernel": {"max.f32", "ex2.approx.ftz.f32", "fma.rn.ftz.f32"},
    "_merge_kernel": {"max.f32", "ex2.approx.ftz.f32"},
    # First guesses of a quotient in fp64, which are made exact.
    "step_kernel": {"rcp.approx.ftz.f64", "abs.ftz.f32"},
    # Square roots of numbers that are not tiny.
    "update_kernel": {"sqrt.approx.ftz.f32"},
    "merge_kernel": {"sqrt.approx.ftz.f32"},
    # Powers that are added to 1.
    "forward_kernel": {"ex2.approx.ftz.f32", "rsqrt.approx.ftz.f32"},
    "queries_gradient_kernel": {"ex2.approx.ftz.f32", "rsqrt.approx.ftz.f32"},
    "keys_gradient_kernel": {"ex2.approx.ftz.f32", "rsqrt.approx.ftz.f32"},
}
ONE_SHOT = Blocks(columns=16, depth=64, splits=3, warps=4, stages=3, two_shot=False, flagged=False)
TWO_SHOT = Blocks(columns=16, depth=64, splits=1, warps=4, stages=3, two_shot=True, flagged=False)
FLAGGED = Blocks(columns=16, depth=64, splits=1, warps=4, stages=3, two_shot=True, flagged=True)
OF_UPDATE = {f"{name}_kernel" for name in ("label", "order", "count", "plan", "update", "merge", "product")}
OF_ADAM = OF_UPDATE | {"step_kernel"}
OF_GEMM = {"gemm_kernel", "tile_order_kernel"}
OF_FLAGS = {"begin_kernel", "gate_kernel", "mark_kernel"}
OF_PIECES = {"arriving_gemm_kernel", "pushing_gemm_kernel", "adding_gemm_kernel", "sending_gemm_kernel"}
# What is launched, and the kernels that it compiles.
OF_HSTU = {"forward_kernel", "queries_gradient_kernel", "keys_gradient_kernel"}
OF_CROSSING = {"find_places_kernel", "pack_kernel", "unpack_kernel", "add_kernel"}
OF_HIDDEN_LAYER = {"hidden_kernel", "hidden_gradient_kernel", "tile_order_kernel"}
LAUNCHES: dict[str, tuple[Callable[[], None], set[str]]] = {
    "scatter_rows": (lambda: launch_scatter_rows(HALF, torch.zeros(4 * TILE_ROWS), None), {"scatter_rows_kernel"}),
    "scatter_rows_fp32": (lambda: launch_scatter_rows(SINGLE, None, 8192), {"scatter_rows_kernel"}),
    "scatter_chosen_rows": (launch_chosen_rows, {"scatter_rows_kernel"}),
    "place_rows": (lambda: launch_place_rows(False), {"place_rows_kernel"}),
    "place_rows_of_tables": (lambda: launch_place_rows(True), {"place_rows_kernel"}),
    "route": (launch_route, {"count_kernel", "exchange_counts_kernel", "place_kernel"}),
    "crossing": (lambda: launch_crossing(HALF, 1, [0]), OF_CROSSING),
    "crossing_fp32": (lambda: launch_crossing(SINGLE, 0, [1, 2]), OF_CROSSING),
    "hidden_layer": (lambda: launch_hidden_layer("silu", TILE_ROWS), OF_HIDDEN_LAYER),
    "hidden_layer_of_few_rows": (lambda: launch_hidden_layer("silu", 16), OF_HIDDEN_LAYER),
    "hidden_layer_swiglu": (lambda: launch_hidden_layer("swiglu", 128), OF_HIDDEN_LAYER),
    "steps": (lambda: launch_steps(HALF), {"zero_pads_kernel", "sum_slots_kernel", "gates_gradient_kernel"}),
    "gemm": (lambda: launch_gemm(HALF), {*OF_GEMM, "weight_gradient_kernel"}),
    "gemm_fp32": (lambda: launch_gemm(SINGLE), {*OF_GEMM, "weight_gradient_kernel"}),
    "gemm_combine": (lambda: launch_gemm_combine(HALF, fp8=False), OF_GEMM),
    "gemm_combine_fp8": (lambda: launch_gemm_combine(HALF, fp8=True), OF_GEMM),
    "gemm_split": (lambda: launch_split_gemm(fp8=False), {"gemm_kernel"}),
    "gemm_split_fp8": (lambda: launch_split_gemm(fp8=True), {"gemm_kernel"}),
    "piece_flags": (lambda: launch_piece_flags(has_own_channel=True), OF_FLAGS),
    "piece_flags_of_a_shared_channel": (lambda: launch_piece_flags(has_own_channel=False), OF_FLAGS),
    "products_of_pieces": (lambda: launch_products_of_pieces(HALF, (512, 1024, 1024)), OF_PIECES),
    "products_of_small_pieces": (launch_products_of_small_pieces, OF_PIECES),
    "products_of_pieces_fp32": (lambda: launch_products_of_pieces(SINGLE, (128, 256, 256)), OF_PIECES),
    "update_rowwise_adagrad": (lambda: launch_update(SINGLE, "rowwise_adagrad", [0, 1], weighted=False), OF_UPDATE),
    "update_sgd_shared_weighted_16_bits": (lambda: launch_update(HALF, "sgd", [1, 0, 1], weighted=True), OF_UPDATE),
    "update_adagrad": (lambda: launch_update(SINGLE, "adagrad", [0, 1], weighted=False), OF_UPDATE),
    "update_adam": (lambda: launch_update(SINGLE, "adam", [0, 1], weighted=False), OF_ADAM),
    "update_rowwise_adam_shared_weighted_16_bits": (
        lambda: launch_update(torch.float16, "rowwise_adam", [1, 0, 1], weighted=True),
        OF_ADAM,
    ),
    "lookup": (lambda: launch_lookup(SINGLE, row_wise=False), {"lookup_and_scatter_kernel"}),
    "lookup_16_bits": (lambda: launch_lookup(HALF, row_wise=False), {"lookup_and_scatter_kernel", "add_up_kernel"}),
    "lookup_all_16_bits": (lambda: launch_lookup(HALF, row_wise=False, output=HALF), {"lookup_and_scatter_kernel"}),
    "lookup_row_wise_16_bits": (
        lambda: launch_lookup(SINGLE, row_wise=True, output=HALF),
        {"lookup_and_scatter_kernel", "add_up_present_kernel"},
    ),
    "lookup_row_wise": (lambda: launch_lookup(SINGLE, row_wise=True), {"lookup_and_scatter_kernel", "add_up_present_kernel"}),
    "feature_exchange": (lambda: launch_feature_exchange(torch.int64), {"send_kernel", "fetch_kernel"}),
    "sums_of_many_ranks": (launch_sums_of_many_ranks, {"add_up_kernel", "add_up_present_kernel"}),
    "attention": (lambda: launch_attention(torch.float16), {"_part_kernel", "_merge_kernel"}),
    "attention_fp32": (lambda: launch_attention(SINGLE), {"_part_kernel", "_merge_kernel"}),
    "hstu_attention": (lambda: launch_hstu_attention(HALF, 64), OF_HSTU),
    "hstu_attention_of_candidates": (
        lambda: launch_hstu_attention(HALF, 128, "distance, time", has_targets=True),
        OF_HSTU,
    ),
    "hstu_attention_of_one_query": (
        lambda: launch_hstu_attention(torch.float16, 24, "distance", queries=1),
        OF_HSTU,
    ),
    "hstu_attention_fp32": (lambda: launch_hstu_attention(SINGLE, 32, "distance, time"), OF_HSTU),
    "adagrad": (launch_adagrad, {"adagrad_kernel"}),
    "meeting": (lambda: meeting.meet(channel(), 1), {"meet_kernel"}),
    "meeting_low_address": (lambda: meeting.meet(channel(control=1 << 20), 1), {"meet_kernel"}),
    "waits": (launch_waits, {"_poll", "poll"}),
    "scatter_tiles": (lambda: launch_scatter_tiles(torch.float16), {"scatter_tiles_kernel"}),
    "store_tiles": (lambda: launch_store_tiles(HALF), {"store_tiles_kernel"}),
    "gemv_one_shot": (lambda: launch_gemv(HALF, ONE_SHOT), {"gemv_all_reduce_kernel"}),
    "gemv_two_shot_with_norm": (lambda: launch_gemv(HALF, TWO_SHOT, with_norm=True), {"gemv_all_reduce_kernel"}),
    "gemv_of_a_product": (lambda: launch_gemv(HALF, FLAGGED, True, is_given=True), {"gemv_all_reduce_kernel"}),
    "gemv_flagged_fp32": (lambda: launch_gemv(SINGLE, FLAGGED), {"gemv_all_reduce_kernel"}),
    "gemv_chunks": (lambda: launch_sum_of_many_rows(HALF, ChunkedSums), {"sum_chunk_kernel"}),
    "gemv_copies": (launch_copied_sums, {"begin_kernel", "adding_gemm_kernel", "gate_kernel", "mark_kernel"}),
    "gemv_scatter": (lambda: launch_sum_of_many_rows(HALF, ScatteredSums), {"gemm_kernel", "sum_chunk_kernel"}),
}


# Long ones: products in fp32, and those of pieces, are many instructions.
LONG = {"gemm_fp32", "gemm_combine_fp8", "hstu_attention_fp32", "products_of_pieces", "products_of_pieces_fp32"}
# They read float8_e4m3fn, which needs compute capability 8.9.
WITH_FLOAT8 = {"gemm_combine_fp8", "gemm_split_fp8"}


def is_possible(name: str, architecture: str) -> bool:
    return name not in WITH_FLOAT8 or architecture not in ("sm_80", "sm_86")


# In `make test-all`: what differs most from Hopper, in little time.
SLOW = {
    "sm_80": LAUNCHES.keys() - LONG,
    "sm_90": {
        *("gemm_fp32", "gemm_combine_fp8", "products_of_small_pieces", "products_of_pieces_fp32"),
        *("hstu_attention", "hstu_attention_of_one_query", "hstu_attention_fp32"),
    },
    "sm_120": LAUNCHES.keys() - LONG - {"products_of_small_pieces"},
    "gfx942": {"lookup", "update_rowwise_adagrad", "gemv_one_shot", "feature_exchange", "attention", "hstu_attention"},
}


def matrix() -> Iterator[Any]:
    """All launches on all architectures: Hopper's in `make test`, some others in `make test-all`, all in `make test-hosts`."""
    for architecture, name in itertools.product(ARCHITECTURES, LAUNCHES):
        marks = []
        if name in SLOW.get(architecture, ()):
            marks = [pytest.mark.slow]
        elif architecture != "sm_90":
            marks = [pytest.mark.exhaustive]
        if is_possible(name, architecture):
            yield pytest.param(name, architecture, marks=marks, id=f"{name}-{architecture}")


@pytest.mark.parametrize(("name", "architecture"), matrix())
def test_kernels_compile(name: str, architecture: str, compiled: dict[str, Any]) -> None:
    launch, kernels = LAUNCHES[name]
    launch()
    assert compiled.keys() == kernels
    for kernel in compiled.values():
        check_limits(kernel, ARCHITECTURES[architecture])


@pytest.mark.parametrize("architecture", ["sm_90"])
@pytest.mark.parametrize(
    ("name", "kernel", "hints"),
    [
        ("update_adagrad", "update_kernel", {"ld.global.L1::evict_first", "st.global.L1::evict_first"}),
        ("update_adagrad", "merge_kernel", {"ld.global.L1::evict_first", "st.global.L1::evict_first"}),
        ("lookup_16_bits", "lookup_and_scatter_kernel", set()),
    ],
)
def test_rows_of_updated_tables_leave_the_cache_first(
    name: str, kernel: str, hints: set[str], architecture: str, compiled: dict[str, Any]
) -> None:
    LAUNCHES[name][0]()
    assert set(re.findall(r"\b(?:ld|st)\.global\.(?:c[agsv]\b|w[bt]\b|L1::evict_\w+)", compiled[kernel].asm["ptx"])) == hints


def check_limits(kernel: Any, of: Architecture) -> None:
    """The kernel is code of the architecture, and a program of it has room on a multiprocessor."""
    assert kernel.metadata.shared <= room_of_program(of.memory), kernel.name
    if of.target.backend == "cuda":
        assert f".target sm_{of.target.arch}" in kernel.asm["ptx"]
        assert registers(kernel) <= 255
        assert -(-registers(kernel) // 8) * 8 * 32 * kernel.metadata.num_warps <= 65_536, kernel.name
    else:
        assert f"amdgcn-amd-amdhsa--{of.target.arch}" in kernel.asm["amdgcn"]
        assert INLINE_ASSEMBLY not in kernel.asm["ttgir"], kernel.name


def registers(kernel: Any) -> int:
    """Registers of a thread, as the assembler has written them into the code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+)", told)
    return int(found)


def test_a_kernel_that_starts_early_reads_the_epoch_around_the_l1_cache(compiled: dict[str, Any]) -> None:
    """A program of the kernel before may load the word into the cache of a multiprocessor after this one has begun there."""
    launch_gemv(HALF, ONE_SHOT)
    begins = compiled["gemv_all_reduce_kernel"].asm["ptx"].partition("griddepcontrol.wait")[2]
    first = re.search(r"\bld\.(?!param)\S+", begins)
    assert first is not None
    assert first[0] == "ld.volatile.global.b64"


def test_every_bound_of_a_product_is_of_a_line_of_the_package() -> None:
    assert bounds_of_no_line() == []


def test_every_kernel_of_the_package_is_compiled_here() -> None:
    """A kernel is a function of Triton that no other one calls."""
    functions: list[ast.FunctionDef] = []
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        functions += [
            node
            for node in nodes
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
        ]
    called = {
        node.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    kernels = {function.name for function in functions} - called
    assert kernels == set().union(*(names for _, names in LAUNCHES.values()))


@triton.jit
def impatient_kernel(word):
    seen = tl.load(word, volatile=True)
    while seen == 0:
        seen = tl.load(word, volatile=True)


@triton.jit
def hasty_kernel(word):
    seen = tl.zeros((), tl.int64)
    while seen == 0:
        own = tl.load(word, volatile=True)
        seen = tl.atomic_max(word + 1, own) + own


@triton.jit
def patient_kernel(word):
    seen = tl.zeros((), tl.int64)
    while seen == 0:
        seen = tl.atomic_max(word + 1, tl.load(word, volatile=True))


@pytest.mark.parametrize("kernel", [impatient_kernel, hasty_kernel])
def test_a_wait_in_which_warps_may_disagree_is_noticed(kernel: Any, compiled: dict[str, Any]) -> None:
    """Some would go on, others not, and neither reach the barrier of the other: two ranks waited for each other for ever."""
    with pytest.raises(AssertionError, match=r"tt\.load"):
        kernel[(1,)](torch.zeros(2, dtype=torch.int64))
    assert not compiled


def test_a_wait_in_which_one_thread_looks_for_all_warps_is_none(compiled: dict[str, Any]) -> None:
    patient_kernel[(1,)](torch.zeros(2, dtype=torch.int64))
    assert re.search(r"@%p\d+ atom\.\S+\.max\.s64", compiled["patient_kernel"].asm["ptx"])


@triton.jit
def fence_kernel():
    device.order_bulk_loads(True)


@triton.jit
def early_kernel():
    devices.wait_for_earlier_kernels()


@pytest.mark.parametrize("kernel", [fence_kernel, early_kernel], ids=["fence", "early start"])
@pytest.mark.parametrize("architecture", NVIDIA)
def test_an_instruction_that_an_architecture_lacks_is_found(architecture: str, kernel: Any, compiled: dict[str, Any]) -> None:
    """Both instructions assemble from Hopper on: kernels that are given them elsewhere do not compile."""
    if ARCHITECTURES[architecture].capability >= (9, 0):
        kernel[(1,)]()
        assert INLINE_ASSEMBLY in compiled[kernel.__name__].asm["ttgir"]
    else:
        with pytest.raises(PTXASError, match=r"requires \.target sm_90 or higher"):
            kernel[(1,)]()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("architecture", "error"), [("sm_86", "cannot read"), ("sm_89", "needed with scale: torch.bfloat16 on cuda")]
)
def test_float8_weights_are_refused_where_kernels_cannot_read_them(error: str) -> None:
    """On Ada the first error is another one: there is no such GPU here, so that the tensors are on the CPU."""
    workspace: Any = SimpleNamespace(name="products", dtype=HALF, device=torch.device("cuda", 0), world_size=2)
    weight = rows().to(gemm_op.FP8)
    with pytest.raises(UsageError, match=re.escape(error)):
        gemm_op._check_matrices(workspace, weight, weight, torch.zeros(len(weight)))


def tiles_that_are_chosen(memory: int) -> set[gemm_tuning.Tiles]:
    """All that were measured, and those of rules, as they fit so many bytes of shared memory; without communication."""
    measured = [gemm_tuning.Tiles(*fields) for fields in recorded_tiles().values()]
    chosen = [*measured, *gemm_tuning._SMALL.values(), *(tiles for tiles, *_ in pieces_tuning._SHAPES)]
    return {replace(gemm_tuning.fitted(tiles, HALF.itemsize, memory), band=8, splits=1) for tiles in chosen}


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.slow if name == "sm_90" else pytest.mark.exhaustive) for name in NVIDIA],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_tiles_that_are_chosen_fit_in_shared_memory(fp8: bool, architecture: str, compiled: dict[str, Any]) -> None:
    of, weight, scale = ARCHITECTURES[architecture], torch.zeros(WIDTH, 1024, dtype=HALF), torch.zeros(WIDTH) if fp8 else None
    if fp8 and of.capability < (8, 9):
        return
    for tiles in tiles_that_are_chosen(of.memory):
        gemm_tuning.override(tiles)
        gemm.gemm(rows(width=1024), weight.to(gemm_op.FP8) if fp8 else weight, window(), scale)
        check_room(compiled, tiles, of)


def check_room(compiled: dict[str, Any], tiles: gemm_tuning.Tiles, of: Architecture) -> None:
    for kernel in compiled.values():
        assert kernel.metadata.shared <= gemm_tuning.needed_memory(tiles, HALF.itemsize), tiles
        assert kernel.metadata.shared <= room_of_program(of.memory, tiles.programs), tiles


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", NVIDIA)
def test_tiles_of_pieces_fit_in_shared_memory(architecture: str, compiled: dict[str, Any]) -> None:
    of = ARCHITECTURES[architecture]
    for tiles in tiles_that_are_chosen(of.memory):
        gemm_tuning.override(tiles)
        launch_products_of_pieces(HALF, (128, 256, 256))
        check_room(compiled, tiles, of)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", NVIDIA)
def test_blocks_of_gemv_fit_in_shared_memory(architecture: str, compiled: dict[str, Any]) -> None:
    of, chosen = ARCHITECTURES[architecture], set()
    shapes = itertools.product((4, 16, 64), (64, 1024, 4096, 16384), (512, 8192), (HALF, SINGLE), (False, True))
    for count, columns, depth, dtype, with_norm in shapes:
        blocks = choose_blocks(count, columns, depth, WORLD, dtype.itemsize, INTERPRETER, with_norm=with_norm)
        chosen.add((replace(fitted(blocks, count, dtype.itemsize, of.memory), splits=1), dtype, count))
    for blocks, dtype, count in chosen:
        launch_gemv(dtype, blocks, count=count)
        shared = compiled["gemv_all_reduce_kernel"].metadata.shared
        assert shared <= needed_memory(blocks, count, dtype.itemsize) <= room_of_program(of.memory), (blocks, dtype, count)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", NVIDIA)
def test_blocks_of_lookups_fit(architecture: str, compiled: dict[str, Any]) -> None:
    of = ARCHITECTURES[architecture]
    try:
        for blocks in {one for by_length in lookup_tuning.measured_blocks().values() for one in by_length}:
            lookup_tuning.override(blocks)
            launch_lookup(HALF, row_wise=False)
            for kernel in compiled.values():
                check_limits(kernel, of)
    finally:
        lookup_tuning.override(None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", NVIDIA)
@pytest.mark.parametrize("d_head", [64, 128, 256])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_attention_fits_in_shared_memory(architecture: str, d_head: int, dtype: torch.dtype, compiled: dict[str, Any]) -> None:
    count = 32 if dtype == SINGLE and d_head == 256 else 64  # with more, queries alone leave no room in 99 KiB
    attention.cached_attention(torch.zeros(count, 2, 3, d_head, dtype=dtype), torch.zeros(2, dtype=torch.int64), 1, 1000)
    for kernel in compiled.values():
        assert kernel.metadata.shared <= room_of_program(ARCHITECTURES[architecture].memory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_hstu_attention_fits(architecture: str, d: int, dtype: torch.dtype, compiled: dict[str, Any]) -> None:
    launch_hstu_attention(dtype, d, "distance, time", has_targets=True)
    for kernel in compiled.values():
        check_limits(kernel, ARCHITECTURES[architecture])
