"""What GPUs can do at most by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dlrm_fused.config import Precision


@dataclass(frozen=True)
class Peaks:
    """Of one GPU, by the second.

    Data sheets assume the highest clock. Large matrix products do not reach these rates: at the limit of its power, a GPU
    lowers its clock.

    Attributes:
        bf16, tf32, fp32: FLOPs; of tensor cores for bf16, which are those of fp16, and TF32, without structured sparsity.
        hbm: bytes that HBM reads and writes together.
        link: bytes to other GPUs over NVLink, in one direction: half of what data sheets give. Cards for PCIe have NVLink only
            where a bridge joins them.
    """

    bf16: float
    tf32: float
    fp32: float
    hbm: float
    link: float

    def flops(self, precision: Precision) -> float:
        """By the arithmetic of dense layers."""
        return {Precision.bf16: self.bf16, Precision.tf32: self.tf32, Precision.fp32: self.fp32}[precision]


_A100 = Peaks(bf16=312e12, tf32=156e12, fp32=19.5e12, hbm=1555e9, link=300e9)
_H100 = Peaks(bf16=989e12, tf32=494e12, fp32=67e12, hbm=3350e9, link=450e9)
# By torch.cuda.get_device_name; a slice of a GPU (MIG) has another name. Sources, all of NVIDIA: *A100 Tensor Core GPU*,
# *H100 Tensor Core GPU* and *H200 Tensor Core GPU*, data sheets; *Blackwell Architecture Technical Brief*, HGX B200.
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": replace(_A100, hbm=2039e9),
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": replace(_A100, hbm=1935e9),
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": Peaks(bf16=756e12, tf32=378e12, fp32=51e12, hbm=2000e9, link=300e9),
    "NVIDIA H200": replace(_H100, hbm=4800e9),
    "NVIDIA B200": Peaks(bf16=2250e12, tf32=1100e12, fp32=80e12, hbm=8000e9, link=900e9),
}


def data_sheet_peaks(device: torch.device) -> Peaks | None:
    """None for the CPU, and for a GPU that is not known here."""
    return _PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
