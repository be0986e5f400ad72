"""The facts of a machine that the rule knows: rates that are measured once, and costs of starting things.

Rates come from ``python -m dlrm_fused.doctor`` or from the ceilings of a benchmark, costs from a fit to measured calls
(benchmarks/schedules); of machines that nobody has measured, rates from data sheets with the costs of those that somebody has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The rates and costs of one rank.

    Attributes:
        teraflops: 10^12 operations a second, of the library's product of large matrices in 16 bits.
        memory: GB/s, bytes read plus bytes written within the GPU.
        peer_copies, peer_stores: GB/s to all peers together, by copy engines and by stores of a kernel.
        library_share: of ``peer_copies``, what the library's collectives reach.
        library_sum_share: the same of its all-reduce.
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
        collective_us: the library's, beside the bytes.
        sum_us: of a kernel that adds up over the ranks what they have, beside the bytes.
        sum_share: of ``peer_stores``, what such a kernel reaches.
    """

    name: str
    teraflops: float
    memory: float
    peer_copies: float
    peer_stores: float
    multiprocessors: int
    library_share: float = 0.8
    library_sum_share: float = 0.8
    kernel_share: float = 0.97
    store_depth: float = 75.0
    add_depth: float = 200.0
    contention: float = 1.03
    kernel_contention: float = 1.5
    started_us: float = 1.0
    tile_us: float = 3.0
    copy_start_us: float = 3.0
    move_us: float = 1.0
    mark_us: float = 4.0
    wait_us: float = 1.5
    collective_us: float = 15.0
    sum_us: float = 8.0
    sum_share: float = 0.8
