"""The facts of a machine that the rule knows: rates that are measured once, and costs of starting things.

Rates of the H100 and the H200 are measured ceilings of benchmarks in this repository. Costs, the defaults, are fitted to half
of the calls that were measured on two H200s, by a command that docs/schedules.md names; the other machines have them too, and
of the rates in data sheets the shares that an H100 reaches of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dlrm_fused.ops.common import gpus
from dlrm_fused.ops.common.gpus import Gpu


@dataclass(frozen=True)
class Machine:
    """The rates and costs of one rank.

    Attributes:
        teraflops: 10^12 operations a second, of the library's product of large matrices in 16 bits.
        memory: GB/s, bytes read plus bytes written within the GPU.
        peer_copies, peer_stores: GB/s to all peers together, by copy engines and by stores of a kernel.
        kernel_share: of the library's speed, what this project's products reach between two tiles.
        store_depth: what storing a tile takes them, in units of the inner dimension that could be multiplied meanwhile.
        add_depth: the same of adding to a tile what the peers have sent.
        contention: factor on the time of a product while copy engines move pieces beside it.
        kernel_contention: the same while another kernel does.
        started_us: from the end of one kernel to the work of the next in its stream.
        tile_us: of a product, for the first loads and the last stores.
        copy_start_us: until a copy engine begins with a copy, from the end of what the copy waits for.
        move_us: a copy engine's, beside the bytes.
        mark_us: until a peer knows that a piece has come.
        wait_us: of a gate, and of a kernel that finds its piece there.
        sum_us: of a kernel that adds up over the ranks what they have, beside the bytes.
        sum_share: of ``peer_stores``, what such a kernel reaches.
    """

    name: str
    teraflops: float
    memory: float
    peer_copies: float
    peer_stores: float
    multiprocessors: int
    kernel_share: float = 0.935
    store_depth: float = 75.0
    add_depth: float = 200.0
    contention: float = 1.059
    kernel_contention: float = 1.89
    started_us: float = 0.0
    tile_us: float = 3.12
    copy_start_us: float = 3.97
    move_us: float = 0.0
    mark_us: float = 5.83
    wait_us: float = 1.55
    sum_us: float = 9.21
    sum_share: float = 1.04


H200 = Machine(
    "NVIDIA H200",
    teraflops=771.4,
    memory=4246.0,
    peer_copies=375.6,
    peer_stores=362.3,
    multiprocessors=gpus.H100.multiprocessors,
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
