"""GPUs by which rules choose: what a device tells of itself, and what only its data sheet does, which are rates.

Rates are those of dense matrices and of one direction: half of what data sheets give for structured sparsity, and of what
they give for NVLink and PCIe. Sources, all of NVIDIA: data sheets of the A100, A10, L4, L40S, H100, H200, GH200, and HGX with
B200 and B300; white papers of the architectures *Ada*, *RTX Blackwell* and *RTX PRO Blackwell*, with rates for sums in fp32;
shared memory by compute capability: *CUDA C++ Programming Guide*, technical specifications.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass, replace

import torch

logger = logging.getLogger("dlrm_fused")

FP8_CAPABILITY = (8, 9)  # GPUs of less have no products of 8-bit operands


@dataclass(frozen=True)
class Gpu:
    """Properties of one GPU by which rules choose.

    Data sheets assume the highest clock. Large matrix products do not reach these rates: at the limit of its power, a GPU
    lowers its clock.

    Attributes:
        name: as ``torch.cuda.get_device_name`` gives it.
        capability: for computing, major and minor.
        multiprocessors: of the GPU.
        shared_memory: bytes of a multiprocessor, which its programs share.
        l2: bytes of the L2 cache.
        memory: bytes a second that its memory reads and writes together.
        bf16, tf32, fp32: FLOPs a second; of tensor cores for bf16, which are those of fp16, and TF32.
        pcie: bytes a second over PCIe, in one direction.
        nvlink: the same over NVLink to all other GPUs together; 0 where there is none.
        needs_bridge: a card, which has NVLink only where somebody has put a bridge between two of them.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    l2: int
    memory: float
    bf16: float
    tf32: float
    fp32: float
    pcie: float
    nvlink: float = 0.0
    needs_bridge: bool = False

    @property
    def fp8(self) -> float:
        """FLOPs a second of tensor cores for 8-bit operands: twice those for bf16 where there are any, otherwise the same."""
        return 2 * self.bf16 if self.capability >= FP8_CAPABILITY else self.bf16

    @property
    def link(self) -> float:
        """Bytes a second to other GPUs, in one direction, without a bridge."""
        return self.pcie if self.needs_bridge or not self.nvlink else self.nvlink

    @property
    def fastest_link(self) -> float:
        """Bytes a second as of ``link``, with a bridge where there may be one."""
        return self.nvlink or self.pcie


# Bytes of multiprocessors, by compute capability: 8.0; 8.6, 8.9 and 12.0; 9.0 and 10.x.
_164_KIB, _100_KIB, _228_KIB = (kib << 10 for kib in (164, 100, 228))
_MIB = 1 << 20
_A100 = Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, _164_KIB, 40 * _MIB, 1555e9, 312e12, 156e12, 19.5e12, pcie=32e9, nvlink=300e9)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, _228_KIB, 50 * _MIB, 3350e9, 989e12, 494e12, 67e12, pcie=64e9, nvlink=450e9)
_PRO_6000 = Gpu(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, _100_KIB, 128 * _MIB, 1597e9, 503.8e12, 251.9e12, 126e12,
    pcie=64e9,
)  # fmt: skip
_B200 = Gpu("NVIDIA B200", (10, 0), 148, _228_KIB, 126 * _MIB, 8000e9, 2250e12, 1100e12, 80e12, pcie=64e9, nvlink=900e9)
_ALL = (
    _A100,
    replace(_A100, name="NVIDIA A100-SXM4-80GB", memory=2039e9),
    replace(_A100, name="NVIDIA A100-PCIE-40GB", needs_bridge=True),
    replace(_A100, name="NVIDIA A100 80GB PCIe", memory=1935e9, needs_bridge=True),
    Gpu("NVIDIA A10", (8, 6), 72, _100_KIB, 6 * _MIB, 600e9, 125e12, 62.5e12, 31.2e12, pcie=32e9),
    Gpu("NVIDIA L4", (8, 9), 58, _100_KIB, 48 * _MIB, 300e9, 121e12, 60e12, 30.3e12, pcie=32e9),
    Gpu("NVIDIA L40S", (8, 9), 142, _100_KIB, 96 * _MIB, 864e9, 362e12, 183e12, 91.6e12, pcie=32e9),
    Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, _100_KIB, 72 * _MIB, 1008e9, 165.2e12, 82.6e12, 82.6e12, pcie=32e9),
    Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, _100_KIB, 96 * _MIB, 1792e9, 209.5e12, 104.8e12, 104.8e12, pcie=64e9),
    _PRO_6000,
    replace(_PRO_6000, name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition", memory=1792e9),
    H100,
    replace(
        H100, name="NVIDIA H100 PCIe", multiprocessors=114, memory=2000e9, bf16=756e12, tf32=378e12, fp32=51e12, nvlink=300e9,
        needs_bridge=True,
    ),
    replace(
        H100, name="NVIDIA H100 NVL", memory=3900e9, bf16=835e12, tf32=417e12, fp32=60e12, nvlink=300e9, needs_bridge=True
    ),
    replace(H100, name="NVIDIA H200", memory=4800e9),
    replace(H100, name="NVIDIA GH200 480GB", memory=4000e9),  # 96 GB of HBM3; 480 is the CPU's memory
    replace(H100, name="NVIDIA GH200 144G HBM3e", memory=4900e9),
    _B200,
    replace(_B200, name="NVIDIA B300 SXM6 AC", capability=(10, 3), fp32=75e12, pcie=128e9),
)  # fmt: skip
# By their names in full: a laptop's GPU, another edition or a slice of a GPU (MIG) is another one.
GPUS = {gpu.name: gpu for gpu in _ALL}
# Stands for the CPU, where kernels run under Triton's interpreter: an H100 with a small cache, whose shared memory has no end.
# Most rules choose as for that.
INTERPRETER = replace(H100, shared_memory=sys.maxsize, l2=_MIB)


def data_sheet(device: torch.device) -> Gpu | None:
    """None for the CPU, and for a GPU that is not known here."""
    return GPUS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that rules take a device for: rates from its data sheet, the rest as it says.

    A GPU without a data sheet here has the rates of the :func:`nearest` that has one, and the log says so once.
    """
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability, multiprocessors = (properties.major, properties.minor), properties.multi_processor_count
    known = data_sheet(device) or _like(torch.cuda.get_device_name(device), capability, multiprocessors)
    return replace(
        known,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_memory=properties.shared_memory_per_multiprocessor,
        l2=properties.L2_cache_size,
    )


def _like(name: str, capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """An unknown GPU, with rates of the :func:`nearest` in proportion."""
    like = nearest(capability, multiprocessors)
    logger.info(
        "%s: no data sheet in dlrm_fused/ops/common/gpus.py; kernels are cut for its %d multiprocessors, rates are taken to be "
        "those of %s in proportion where auto cannot measure",
        *(name, multiprocessors, like.name),
    )
    scale = multiprocessors / like.multiprocessors
    rates = {rate: scale * getattr(like, rate) for rate in ("memory", "bf16", "tf32", "fp32")}
    return replace(like, name=name, **rates)


def nearest(capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """The known GPU that is most like one of this capability: as new, or the newest before it, and about as large."""
    capabilities = {gpu.capability for gpu in _ALL}
    newest = max((one for one in capabilities if one <= capability), default=min(capabilities))
    like = [gpu for gpu in _ALL if gpu.capability == newest]
    return min(like, key=lambda gpu: abs(gpu.multiprocessors - multiprocessors))
