"""Choices of the rules on each GPU that has a data sheet: they fit the GPU, and the table of them is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.schedules.choices import CALLS, OPERATORS, Choice, main
from dlrm_fused.ops.all_gather_gemm.tuning import pushers_at_least_and_at_most, tiles_and_pushers
from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import GPUS, H100, Gpu
from dlrm_fused.ops.embedding_all_to_all.tuning import Blocks as LookupBlocks
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles, tiles_of_product
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks, choose_blocks

RANKS = 4
EVERY_GPU = pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
LIKE_H100 = ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e")


def choices(gpu: Gpu) -> list[Choice]:
    return [one for operator in OPERATORS.values() for one in operator(gpu, RANKS)]


@EVERY_GPU
def test_programs_that_wait_for_each_other_are_resident(gpu: Gpu) -> None:
    """Else those that run wait for those that cannot begin."""
    waiting = [one for one in choices(gpu) if one.resident]
    assert len(waiting) > CALLS
    for one in waiting:
        at_once = one.blocks.programs if isinstance(one.blocks, Tiles) else 1
        assert one.resident <= at_once * gpu.multiprocessors, one


@EVERY_GPU
def test_no_program_asks_for_more_shared_memory_than_it_can_have(gpu: Gpu) -> None:
    for one in choices(gpu):
        at_once = one.blocks.programs if isinstance(one.blocks, Tiles) else 1
        assert one.memory <= room_of_program(gpu.shared_memory, at_once), one
        assert one.memory > 0 or isinstance(one.blocks, LookupBlocks)


@EVERY_GPU
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("columns", [16, 1000, 4096, 8192, 16384, 30000])
def test_a_norm_waits_for_programs_that_are_resident_whatever_the_width(gpu: Gpu, rows: int, columns: int) -> None:
    blocks = choose_blocks(rows, columns, 4096, RANKS, 2, gpu, with_norm=True)
    assert -(-columns // blocks.columns) * blocks.splits <= gpu.multiprocessors


@EVERY_GPU
def test_products_occupy_multiprocessors_all_of_them_if_large(gpu: Gpu) -> None:
    for one in OPERATORS["gemm_reduce_scatter"](gpu, RANKS) + OPERATORS["gemm_all_to_all"](gpu, RANKS):
        assert isinstance(one.blocks, Tiles)
        rows, columns, _ = map(int, one.call.split("x"))
        all_places = one.blocks.programs * gpu.multiprocessors
        assert gpu.multiprocessors / 3 < one.programs <= all_places, one
        if rows * columns >= all_places * one.blocks.rows * one.blocks.columns:
            assert one.programs == all_places, one


@EVERY_GPU
def test_lookups_have_several_programs_for_each_multiprocessor(gpu: Gpu) -> None:
    for one in OPERATORS["embedding_all_to_all"](gpu, RANKS):
        assert isinstance(one.blocks, LookupBlocks)
        assert one.blocks.can_be_compiled
        assert one.programs >= gpu.multiprocessors
        assert one.blocks.programs >= 8 * gpu.multiprocessors


@EVERY_GPU
def test_as_many_programs_push_as_fill_the_links_and_few_of_all(gpu: Gpu) -> None:
    fewest, most = pushers_at_least_and_at_most(gpu)
    for one in OPERATORS["all_gather_gemm"](gpu, RANKS):
        assert fewest <= one.pushers <= most
        assert 3 * one.pushers <= gpu.multiprocessors


def test_faster_links_and_faster_products_want_more_programs_that_push() -> None:
    links = [pushers_at_least_and_at_most(replace(H100, nvlink=rate))[1] for rate in (0.0, 300e9, 450e9, 900e9)]
    assert links == sorted(links)
    assert links[0] < links[-1]
    assert pushers_at_least_and_at_most(H100) == (8, 24)
    slow, fast = (replace(H100, bf16=rate) for rate in (300e12, 2000e12))
    call = (16384, 8192, 4096, 2, RANKS - 1)
    assert tiles_and_pushers(*call, slow)[1] <= tiles_and_pushers(*call, H100)[1] <= tiles_and_pushers(*call, fast)[1]


def test_more_multiprocessors_never_get_larger_tiles_for_the_same_product() -> None:
    sizes = (16, 58, 72, 108, 128, 142, 148, 170, 188, 300)
    for call in ((1024, 4096, 1024), (2048, 2048, 2048), (512, 1024, 4096), (256, 256, 8192), (8192, 8192, 1024)):
        tiles = [tiles_of_product(*call, 2, replace(H100, multiprocessors=count)) for count in sizes]
        areas = [one.rows * one.columns / one.splits for one in tiles]
        assert areas == sorted(areas, reverse=True), call


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpus_with_the_multiprocessors_and_links_of_an_h100_choose_its_blocks(operator: str) -> None:
    expected = [(one.blocks, one.programs, one.pushers) for one in OPERATORS[operator](H100, RANKS)]
    for name in LIKE_H100:
        assert [(one.blocks, one.programs, one.pushers) for one in OPERATORS[operator](GPUS[name], RANKS)] == expected


def test_where_links_are_slow_more_is_moved_beside_the_product() -> None:
    """On a GPU with PCIe alone no large product waits for all of its data, and most are cut into more pieces than shards."""
    for gpu in GPUS.values():
        if gpu.link <= 64e9:
            taken = [one.schedule for one in OPERATORS["all_gather_gemm"](gpu, RANKS)]
            taken += [one.schedule for one in OPERATORS["gemm_reduce_scatter"](gpu, RANKS)]
            assert sum(name in ("chunks_2", "chunks_4", "tapered") for name in taken) >= CALLS


@EVERY_GPU
def test_sums_of_few_rows_occupy_about_half_of_the_multiprocessors_at_least(gpu: Gpu) -> None:
    """Tiles are powers of two, and a tile in more than four parts takes longer to add up than to read."""
    of_few_rows = [one for one in OPERATORS["gemv_all_reduce"](gpu, RANKS) if isinstance(one.blocks, Blocks)]
    assert len(of_few_rows) == 15
    assert all(one.programs >= 0.5 * gpu.multiprocessors for one in of_few_rows)


@pytest.mark.parametrize("name", ["NVIDIA L4", "NVIDIA GeForce RTX 5090", "NVIDIA B200"])
def test_the_command_prints_twenty_calls_of_each_operator(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpu", name])
    first, *sections = capsys.readouterr().out.split("### ")
    assert first.startswith(f"## {name}\n")
    assert f"{GPUS[name].multiprocessors} multiprocessors" in first
    assert [section.split("\n")[0] for section in sections] == list(OPERATORS)
    for section in sections:
        assert section.count("\n| ") == CALLS + 1


def test_one_rank_has_nothing_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--ranks", "1"])
    assert "--ranks=1: needed: at least 2" in capsys.readouterr().err
