"""Machines that the rule knows.

Rates of the H100 and the H200 are measured ceilings of benchmarks in this repository. Costs are fitted to half of the calls
that were measured on two H200s, by a command that docs/schedules.md names; the other machines have them
too, and of the rates in data sheets the shares that an H100 reaches of its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from dlrm_fused.ops.common import gpus
from dlrm_fused.ops.common.gpus import Gpu
from dlrm_fused.ops.schedules.machine import Machine

H200 = Machine(
    "NVIDIA H200",
    teraflops=771.4,
    memory=4246.0,
    peer_copies=375.6,
    peer_stores=362.3,
    multiprocessors=gpus.H100.multiprocessors,
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
)
H100 = replace(
    H200,
    name=gpus.H100.name,
    teraflops=781.5,
    memory=3002.0,
    peer_copies=379.3,
    peer_stores=362.9,
    contention=1.058,
)
MEASURED = {machine.name: machine for machine in (H100, H200)}


@functools.cache
def machine_of(gpu: Gpu) -> Machine:
    """The machine of a rank with this GPU: measured, or an H100 whose rates are scaled by those of the data sheets."""
    if measured := MEASURED.get(gpu.name):
        return measured
    links = gpu.link / gpus.H100.link
    return replace(
        H100,
        name=gpu.name,
        teraflops=H100.teraflops * (gpu.bf16 / gpus.H100.bf16),
        memory=H100.memory * (gpu.memory / gpus.H100.memory),
        peer_copies=H100.peer_copies * links,
        peer_stores=H100.peer_stores * links,
        multiprocessors=gpu.multiprocessors,
    )


# By name, those of which there is a data sheet.
MACHINES = {name: machine_of(gpu) for name, gpu in gpus.GPUS.items()}
