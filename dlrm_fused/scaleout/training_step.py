"""A step of the trainer as tasks, as it runs in the steady state.

While a batch is trained, the ids of the next one are exchanged. ``comm=baseline``: lookup, All-to-All, dense part, forward and
backward, All-to-All of gradients, update of tables; an AllReduce of dense gradients runs beside the last two. ``comm=fused``:
lookup and exchange are one kernel, which sends each slice of pooled embeddings when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dlrm_fused.scaleout.collectives import COLLECTIVES, Phase
from dlrm_fused.scaleout.dense_part import Kernel
from dlrm_fused.scaleout.machine import Machine
from dlrm_fused.scaleout.step import Communicate, Compute, ComputeAndSend, Task
from dlrm_fused.scaleout.topologies import Topology
from dlrm_fused.scaleout.workload import Workload

HOST, MAIN, IDS, EMBEDDINGS, GRADIENTS = "host", "main", "input dist", "All-to-All", "AllReduce"


@dataclass(frozen=True)
class Algorithms:
    """Names in :data:`~dlrm_fused.scaleout.collectives.COLLECTIVES`, and the parts in which a fused kernel sends its result."""

    all_to_all: str = "direct"
    all_reduce: str = "ring"
    slices: int = 64


def tasks_of_step(
    work: Workload,
    machine: Machine,
    topology: Topology,
    algorithms: Algorithms,
    dtype: str,
    *,
    is_fused: bool,
    host_seconds: float = 0.0,
) -> list[Task]:
    """
    Args:
        dtype: of matrix products, ``bf16`` or ``fp32``.
        host_seconds: in which a rank's process launches a step; it runs ahead of the GPU, so the longer of both counts.
    """
    launches = [Task("the host's launches", HOST, Compute(host_seconds))] if host_seconds else []
    return [*launches, *_tasks(work, machine, topology, algorithms, dtype, is_fused)]


def _tasks(
    work: Workload, machine: Machine, topology: Topology, algorithms: Algorithms, dtype: str, is_fused: bool
) -> Iterator[Task]:
    all_to_all = COLLECTIVES["all_to_all"][algorithms.all_to_all]
    all_reduce = COLLECTIVES["all_reduce"][algorithms.all_reduce]

    def collective(name: str, stream: str, phases: Sequence[Phase], after: tuple[str, ...] = ()) -> Iterator[Task]:
        yield Task(f"start of {name}", stream, Compute(machine.collective), after)
        yield Task(name, stream, Communicate(phases))

    yield from collective("ids of the next batch", IDS, all_to_all(topology, work.id_bytes))

    lookup = machine.launch + work.lookup_bytes / machine.lookup
    if is_fused and work.is_covered:
        pairs = _uneven([Phase(topology.all_pairs(), work.pooled_bytes / topology.ranks)], work.imbalance, "out")[0]
        yield Task("lookup and All-to-All", MAIN, ComputeAndSend(lookup, pairs.flows, pairs.bytes_each, algorithms.slices))
        ready: tuple[str, ...] = ()
    else:
        yield Task("lookup", MAIN, Compute(lookup))
        exchange = _uneven(all_to_all(topology, work.pooled_bytes), work.imbalance, "out")
        yield from collective("pooled embeddings", EMBEDDINGS, exchange, ("lookup",))
        ready = ("pooled embeddings",)

    last = ""
    for part, kernels in (("forward", work.dense.forward), ("backward", work.dense.backward)):
        for number, kernel in enumerate(kernels):
            last = f"{part} {number}: {kernel.name}"
            yield Task(last, MAIN, Compute(machine.seconds(kernel, dtype)), ready)
            ready = ()

    yield from collective("dense gradients", GRADIENTS, all_reduce(topology, work.gradient_bytes), (last,))
    exchange = _uneven(all_to_all(topology, work.pooled_gradient_bytes), work.imbalance, "in")
    yield from collective("gradients of embeddings", EMBEDDINGS, exchange, (last,))
    update = machine.launch + work.update_bytes / machine.update
    yield Task("update of tables", MAIN, Compute(update), ("gradients of embeddings",))
    optimizer = machine.seconds(Kernel("optimizer", 0, work.parameter_bytes), dtype)
    yield Task("dense optimizer", MAIN, Compute(optimizer), ("dense gradients",))


def _uneven(phases: Sequence[Phase], imbalance: float, direction: str) -> list[Phase]:
    """With the links that lead out of, or into, a rank as full as those of the rank that sends or receives most.

    The other end of each flow has its average, since every rank sends to, or receives from, all others.
    """
    other = {"out": " in", "in": " out"}[direction]
    return [
        replace(
            phase,
            flows=[
                replace(
                    flows,
                    crossings={
                        name: share if name.endswith(other) or name == "spine" else share * imbalance
                        for name, share in flows.crossings.items()
                    },
                )
                for flows in phase.flows
            ],
        )
        for phase in phases
    ]
