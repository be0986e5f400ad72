"""GPUs by which rules choose: figures of data sheets, devices that are known and that are not, ranks that differ."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import GPUS, H100, INTERPRETER, Gpu, data_sheet, gpu_of, nearest
from dlrm_fused.ops.common.workspace import _agree_on_settings

CUDA = torch.device("cuda", 0)
# FLOPs of a multiprocessor in a clock cycle, by compute capability, of dense matrices in bf16 with sums in fp32: those of
# GeForces are half of those of the same generation's cards.
DENSE_BF16 = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024}
EVERY_GPU = pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the GPU of this machine one of a name, a capability and so many multiprocessors."""

    def make(name: str, capability: tuple[int, int], multiprocessors: int) -> None:
        properties = SimpleNamespace(
            major=capability[0],
            minor=capability[1],
            multi_processor_count=multiprocessors,
            shared_memory_per_multiprocessor=100 << 10,
            L2_cache_size=33 << 20,
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        gpu_of.cache_clear()

    yield make
    gpu_of.cache_clear()


class TestDataSheets:
    @EVERY_GPU
    def test_have_rates_of_dense_matrices_that_a_clock_can_explain(self, gpu: Gpu) -> None:
        of_cycle = DENSE_BF16[gpu.capability] // (2 if "GeForce" in gpu.name else 1)
        gigahertz = gpu.bf16 / gpu.multiprocessors / of_cycle / 1e9
        assert 1.3 < gigahertz < 2.7
        assert gpu.tf32 == pytest.approx(gpu.bf16 / 2, rel=0.03)
        cores = 64 if gpu.capability == (8, 0) else 128
        assert gpu.fp32 / gpu.multiprocessors / (2 * cores) / 1e9 == pytest.approx(gigahertz, rel=0.25)

    @EVERY_GPU
    def test_have_links_of_one_direction(self, gpu: Gpu) -> None:
        assert gpu.pcie in (32e9, 64e9, 128e9)
        assert gpu.nvlink in (0, 300e9, 450e9, 900e9)
        assert gpu.link == (gpu.nvlink if gpu.nvlink and not gpu.needs_bridge else gpu.pcie)

    @EVERY_GPU
    def test_have_as_much_shared_memory_as_the_programming_guide_says(self, gpu: Gpu) -> None:
        of_program = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(gpu.capability, 99)
        assert room_of_program(gpu.shared_memory) == of_program << 10
        assert 2 * (room_of_program(gpu.shared_memory, programs=2) + 1024) <= gpu.shared_memory

    def test_are_of_all_that_the_documentation_names(self) -> None:
        names = " ".join(GPUS)
        for model in ("A100-SXM4-40GB", "A100-SXM4-80GB", "A10", "L4", "L40S", "RTX 4090", "RTX 5090", "RTX PRO 6000"):
            assert model in names
        for model in ("H100 80GB HBM3", "H100 PCIe", "H100 NVL", "H200", "GH200", "B200", "B300"):
            assert model in names


class TestDevices:
    def test_that_are_known_have_the_rates_of_their_data_sheet_and_tell_the_rest(self, device: Any) -> None:
        device("NVIDIA L40S", (8, 9), 140)  # fewer than the data sheet's
        gpu = gpu_of(CUDA)
        assert (gpu.multiprocessors, gpu.shared_memory, gpu.l2) == (140, 100 << 10, 33 << 20)
        assert replace(gpu, multiprocessors=142, l2=96 << 20) == GPUS["NVIDIA L40S"] == data_sheet(CUDA)

    def test_that_are_unknown_have_rates_like_the_nearest_and_the_log_says_so_once(
        self, device: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        device("NVIDIA RTX 6000 Ada Generation", (8, 9), 71)
        with caplog.at_level(logging.INFO, "dlrm_fused"):
            gpu = gpu_of(CUDA)
            assert gpu_of(CUDA) is gpu
        assert gpu.multiprocessors == 71
        assert gpu.memory == pytest.approx(GPUS["NVIDIA L4"].memory * 71 / 58)
        assert gpu.pcie == GPUS["NVIDIA L4"].pcie
        (line,) = caplog.messages
        assert line.startswith("NVIDIA RTX 6000 Ada Generation: no data sheet")
        assert "71 multiprocessors" in line
        assert "NVIDIA L4" in line
        assert data_sheet(CUDA) is None

    @pytest.mark.parametrize(
        "name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"]
    )
    def test_are_not_taken_for_others_whose_names_begin_alike(self, device: Any, name: str) -> None:
        device(name, (9, 0), 16)
        assert data_sheet(CUDA) is None
        assert gpu_of(CUDA).bf16 < H100.bf16

    def test_the_cpu_stands_for_an_h100_whose_shared_memory_has_no_end(self) -> None:
        assert data_sheet(torch.device("cpu")) is None
        assert gpu_of(torch.device("cpu")) == INTERPRETER
        assert replace(INTERPRETER, shared_memory=H100.shared_memory, l2=H100.l2) == H100

    @pytest.mark.parametrize(
        ("capability", "multiprocessors", "name"),
        [
            ((7, 5), 40, "NVIDIA A100-SXM4-40GB"),
            ((8, 6), 84, "NVIDIA A10"),
            ((8, 9), 142, "NVIDIA L40S"),
            ((9, 0), 78, "NVIDIA H100 PCIe"),
            ((12, 1), 48, "NVIDIA GeForce RTX 5090"),
        ],
    )
    def test_the_nearest_is_as_new_and_about_as_large(
        self, capability: tuple[int, int], multiprocessors: int, name: str
    ) -> None:
        assert nearest(capability, multiprocessors).name == name


def test_ranks_that_differ_choose_for_what_all_of_them_have() -> None:
    smaller, with_less = GPUS["NVIDIA H100 PCIe"], GPUS["NVIDIA L40S"]
    group: Any = SimpleNamespace(process_group=object(), world_size=3, device=torch.device("cpu"))
    group.gather = lambda work: [(work()[0], gpu) for gpu in (H100, smaller, with_less)]
    assert _agree_on_settings(group, "sums", lambda: {"max_rows": 3}) == replace(smaller, shared_memory=with_less.shared_memory)
