"""Machines that the rule knows.

Rates of the H100 and the H200 are measured ceilings of benchmarks in this repository. Costs are fitted to half of the calls
that were measured on two H200s, by ``python -m benchmarks.schedules.rule`` (docs/schedules.md); the other machines have them
too, and of the rates in data sheets the shares that an H100 reaches of its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dlrm_fused.ops.schedules.machine import Machine

H200 = Machine(
    "NVIDIA H200",
    teraflops=771.4,
    memory=4246.0,
    peer_copies=375.6,
    peer_stores=362.3,
    multiprocessors=132,
    library_share=0.552,
    library_sum_share=0.781,
    kernel_share=0.935,
    store_depth=75.0,
    add_depth=200.0,
    contention=1.059,
    kernel_contention=1.89,
    started_us=0.0,
    tile_us=3.12,
    copy_start_us=3.97,
    move_us=0.0,
    mark_us=5.83,
    wait_us=1.55,
    collective_us=13.4,
    sum_us=9.21,
    sum_share=1.04,
    lookup_share=0.766,
    kernel_lookup_share=0.81,
)
H100 = replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    teraflops=781.5,
    memory=3002.0,
    peer_copies=379.3,
    peer_stores=362.9,
    contention=1.058,
    lookup_share=0.93,
    kernel_lookup_share=1.0,
)
MEASURED = {machine.name: machine for machine in (H100, H200)}

# Dense bf16 teraflops, GB/s of memory, GB/s to the peers in one direction, multiprocessors; of NVIDIA's data sheets.
_DATA_SHEETS = {
    "NVIDIA H100 SXM": (989.0, 3350.0, 450.0, 132),
    "NVIDIA A100 SXM 80 GB": (312.0, 2039.0, 300.0, 108),
    "NVIDIA B200 SXM": (2250.0, 8000.0, 900.0, 148),
    "NVIDIA H100 PCIe, no NVLink": (756.0, 2000.0, 64.0, 114),
}


def from_data_sheet(name: str) -> Machine:
    """A machine of which nothing has been measured."""
    teraflops, memory, peers, multiprocessors = _DATA_SHEETS[name]
    of_h100 = _DATA_SHEETS["NVIDIA H100 SXM"]
    return replace(
        H100,
        name=name,
        teraflops=teraflops * H100.teraflops / of_h100[0],
        memory=memory * H100.memory / of_h100[1],
        peer_copies=peers * H100.peer_copies / of_h100[2],
        peer_stores=peers * H100.peer_stores / of_h100[2],
        multiprocessors=multiprocessors,
    )


UNMEASURED = tuple(name for name in _DATA_SHEETS if name != "NVIDIA H100 SXM")


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Of a rank's device; an H100 stands for GPUs that nobody has measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return MEASURED.get(name, H100)
