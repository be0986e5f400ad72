"""A step of the trainer as tasks, as it runs in the steady state.

While a batch is trained, the ids of the next one are exchanged. ``comm=baseline``: lookup, All-to-All, dense part, forward and
backward, All-to-All of gradients, update of tables; an AllReduce of dense gradients runs beside the last two. ``comm=fused``:
lookup and exchange are one kernel, which sends each slice of pooled embeddings when it is computed, and so are the products of
experts and tensor-parallel layers with their exchanges. The library's collectives, and fused kernels' stores within a host,
reach the share of a link that was measured (``Machine.share``); between hosts ``comm=fused`` fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dlrm_fused.ops.moe.between_hosts import share_of_visitors
from dlrm_fused.scaleout.collectives import Phase, algorithms_of
from dlrm_fused.scaleout.dense_trace import Exchange, Gradient, Kernel
from dlrm_fused.scaleout.groups import consecutive, strided
from dlrm_fused.scaleout.machine import Machine
from dlrm_fused.scaleout.step import Communicate, Compute, ComputeAndSend, Task
from dlrm_fused.scaleout.topologies import Pattern, Topology
from dlrm_fused.scaleout.workload import Workload

HOST, MAIN, IDS, EMBEDDINGS, GRADIENTS, SUMS = "host", "main", "input dist", "All-to-All", "AllReduce", "sums of layers"
LOOKUP, POOLED, LOOKUP_AND_POOLED = "lookup", "pooled embeddings", "lookup and All-to-All"
# By traces: what comes from ranks is joined, and brought to the order of features; gradients go the same way back, in pieces by
# rank, and are divided. On one rank the order of gradients is left.
_COPIES = {"forward": 2, "backward": 5}
_COPIES_OF_ONE_RANK = {"forward": 0, "backward": 1}
_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's


@dataclass(frozen=True)
class Algorithms:
    """Names of :func:`~dlrm_fused.scaleout.collectives.algorithms_of`, and the parts in which a fused kernel sends."""

    all_to_all: str = "direct"
    all_reduce: str = "auto"
    slices: int = 64

    def phases(self, collective: str, topology: Topology, size: float) -> list[Phase]:
        """
        Args:
            collective: A key of :data:`~dlrm_fused.scaleout.collectives.COLLECTIVES`.
            size: In bytes, as there.
        """
        return algorithms_of(collective)[getattr(self, collective, "ring")](topology, size)


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
        host_seconds: in which a rank's process launches a step. It runs ahead of a GPU, so the longer of both counts; a CPU
            computes after it.

    Raises:
        UsageError: groups of ranks that the topology does not have.
    """
    stream = MAIN if work.is_on_cpu else HOST
    launches = [Task("the host's launches", stream, Compute(host_seconds))] if host_seconds else []
    return [*launches, *_Step(work, machine, topology, algorithms, dtype, is_fused).tasks()]


@dataclass
class _Step:
    _work: Workload
    _machine: Machine
    _topology: Topology
    _algorithms: Algorithms
    _dtype: str
    _is_fused: bool
    _last: tuple[str, ...] = ()
    _last_gradients: tuple[str, ...] = ()

    def tasks(self) -> Iterator[Task]:
        work, machine = self._work, self._machine
        # An input dist of its own is one by kernels, within a host.
        has_own = self._topology.ranks == self._topology.ranks_per_host and not work.is_on_cpu
        ids = _uneven(self._phases("all_to_all", work.id_bytes, fused_has_own=has_own), work.id_imbalance, "in")
        yield from self._exchange("ids of the next batch", IDS, ids)
        yield from self._lookup()
        yield from self._pass("forward", work.dense.forward)
        yield from self._pass("backward", work.dense.backward, work.dense.gradients)

        ready = self._last
        if not (self._is_fused and work.is_covered):
            ready = ("copies of gradients",)
            yield Task(*ready, MAIN, Compute(self._copies("backward", work.pooled_gradient_bytes)), self._last)
        exchange = _uneven(self._phases("all_to_all", work.pooled_gradient_bytes), work.imbalance, "in")
        yield from self._exchange("gradients of embeddings", EMBEDDINGS, exchange, ready)
        update = machine.launch + work.update_bytes / (machine.update * self._speed("update"))
        yield Task("update of tables", MAIN, Compute(update), ("gradients of embeddings",))
        optimizer = machine.launch + work.parameter_bytes / machine.optimizer
        yield Task("dense optimizer", MAIN, Compute(optimizer), self._last_gradients)

    def _lookup(self) -> Iterator[Task]:
        work = self._work
        lookup = self._machine.launch + work.lookup_bytes / (self._machine.lookup * self._speed("lookup"))
        if self._is_fused and work.is_covered:
            direct = [Phase(self._topology.flows(Pattern.all_pairs), work.pooled_bytes / self._topology.ranks)]
            (pairs,) = _uneven(self._sent_by("stores", direct), work.imbalance, "out")
            sent = ComputeAndSend(lookup, pairs.flows, pairs.bytes_each, self._algorithms.slices)
            yield Task(LOOKUP_AND_POOLED, MAIN, sent)
            self._last = (LOOKUP_AND_POOLED,)
            if "sort" in self._machine.fused_speeds:
                # It runs beside the dense part, but both share the GPU.
                sort = work.update_bytes / (self._machine.update * self._speed("sort"))
                yield Task("sort for the update", MAIN, Compute(sort))
        else:
            yield Task(LOOKUP, MAIN, Compute(lookup))
            exchange = _uneven(self._phases("all_to_all", work.pooled_bytes), work.imbalance, "out")
            yield from self._exchange("exchange of pooled embeddings", EMBEDDINGS, exchange, (LOOKUP,))
            copies = self._copies("forward", work.pooled_bytes)
            yield Task(POOLED, MAIN, Compute(copies), ("exchange of pooled embeddings",))
            self._last = (POOLED,)

    def _copies(self, part: str, size: float) -> float:
        """Return seconds in which TorchRec's path copies pooled embeddings, or gradients of them, around their exchange."""
        copies = _COPIES if self._topology.ranks > 1 else _COPIES_OF_ONE_RANK
        return copies[part] * (self._machine.launch + 2 * size / self._machine.memory)

    def _speed(self, kernel: str) -> float:
        """Over that of FBGEMM."""
        return self._machine.fused_speeds.get(kernel, 1.0) if self._is_fused and self._work.is_covered else 1.0

    def _pass(self, part: str, pieces: Sequence[Kernel | Exchange], gradients: Sequence[Gradient] = ()) -> Iterator[Task]:
        """Yield the tasks of a pass; AllReduces of dense gradients start when these have been computed."""
        buckets = _buckets(gradients)
        beside: tuple[str, ...] = ()
        in_order = fused(pieces, is_backward=part == "backward") if self._is_fused else enumerate(pieces)
        for number, piece in in_order:
            name = f"{part} {number}: {_name(piece)}"
            if part == "backward" and isinstance(piece, Exchange) and piece.collective == "all_reduce":
                # It sums gradients of a tensor-parallel layer's input, while that of the weight is computed.
                yield from self._piece(name, piece, SUMS)
                beside = (name,)
                continue
            yield from self._piece(name, piece)
            self._last, beside = (name, *beside), ()
            while buckets and buckets[0].after <= number:
                yield from self._bucket(buckets.pop(0))
        sharded = sum(gradient.bytes for gradient in gradients if gradient.is_sharded)
        if sharded:
            phases = self._library_phases("all_reduce", strided(self._topology, self._work.group_ranks), sharded)
            yield from self._exchange("gradients of shards", GRADIENTS, phases, self._last)

    def _piece(self, name: str, piece: Kernel | Exchange | SendingKernel, stream: str = MAIN) -> Iterator[Task]:
        after = self._last
        match piece:
            case Kernel():
                yield Task(name, MAIN, Compute(self._machine.seconds(piece, self._dtype)), after)
            case Exchange():
                group = consecutive(self._topology, piece.ranks)
                yield from self._exchange(name, stream, self._library_phases(piece.collective, group, piece.bytes), after)
            case SendingKernel(kernel, exchange):
                group = consecutive(self._topology, exchange.ranks)
                # An AllReduce sends parts to be summed, and sums.
                messages = 2 if exchange.collective == "all_reduce" else 1
                each = messages * exchange.bytes / exchange.ranks
                phases = [Phase(group.flows(Pattern.all_pairs), each)]
                hosts = group.ranks // group.ranks_per_host
                if exchange.collective == "all_to_all" and hosts > 1:
                    crossing = crossing_rows(hosts, self._work.top_k)
                    phases = _crossing(phases, lambda link: 1.0 if link.startswith("nvlink") else crossing)
                (pairs,) = self._sent_by("stores", phases)
                seconds = self._machine.seconds(kernel, self._dtype)
                yield Task(name, MAIN, ComputeAndSend(seconds, pairs.flows, pairs.bytes_each, self._algorithms.slices), after)

    def _bucket(self, bucket: Gradient) -> Iterator[Task]:
        # Between hosts of CPUs it sends what is summed within hosts; GPUs leave this to NCCL.
        phases = self._phases("all_reduce", bucket.bytes, fused_has_own=self._work.is_on_cpu)
        yield from self._exchange(f"dense gradients {bucket.after}", GRADIENTS, phases, self._last)

    def _phases(self, collective: str, size: float, *, fused_has_own: bool = True) -> list[Phase]:
        """Among all ranks; ``fused_has_own`` if ``comm=fused`` has an exchange of its own for it, and calls no library's."""
        if self._is_fused and self._work.is_covered and fused_has_own:
            return self._sent_by("stores", self._algorithms.phases(collective, self._topology, size))
        return self._library_phases(collective, self._topology, size)

    def _library_phases(self, collective: str, topology: Topology, size: float) -> list[Phase]:
        return self._sent_by(collective, self._algorithms.phases(collective, topology, size))

    def _sent_by(self, sender: str, phases: Sequence[Phase]) -> list[Phase]:
        """At the share of each link's rate that the sender reaches: as if so much more crossed it."""
        return _crossing(phases, lambda link: 1 / self._machine.share(sender, link))

    def _exchange(self, name: str, stream: str, phases: Sequence[Phase], after: tuple[str, ...] = ()) -> Iterator[Task]:
        if stream == GRADIENTS:
            self._last_gradients = (name,)
        yield Task(f"start of {name}", stream, Compute(self._machine.collective), after)
        yield Task(name, stream, Communicate(phases))


def crossing_rows(hosts: int, top_k: int) -> float:
    """Return how many rows of experts ``comm=fused`` sends to other hosts over those of ``comm=baseline``.

    A token crosses once to each other host that has some of its experts, and not once for each of them. Within the host it goes
    on to as many ranks as it would come from others.

    Args:
        hosts: That share the experts; at least 2. A switch is one host here, as NVLink's is.
        top_k: Experts of a token, evenly spread.
    """
    return hosts * share_of_visitors(hosts, top_k) / top_k


@dataclass(frozen=True)
class SendingKernel:
    """A kernel that sends each slice of its result when it is computed."""

    kernel: Kernel
    exchange: Exchange


def fused(pieces: Sequence[Kernel | Exchange], *, is_backward: bool) -> Iterator[tuple[int, Kernel | Exchange | SendingKernel]]:
    """Yield the pieces that ``comm=fused`` leaves after joining, each with the number of the last piece that it stands for.

    The exchanges of experts' rows, and the AllReduce after a row-parallel product, are one kernel with the product before them.
    Where none is, as for the tokens that experts get, the kernel that gathers rows sends them. Rows are sent to where they
    belong, so that copies beside an exchange are not needed, and how many they are is sent beside them.
    """
    before: list[tuple[int, Kernel]] = []  # the last kernel that is no copy, and copies since
    follows_rows = False
    for number, piece in enumerate(pieces):
        match piece:
            case Kernel(is_copy=True):
                if not follows_rows:
                    before.append((number, piece))
            case Kernel():
                yield from before
                before, follows_rows = [(number, piece)], False
            case Exchange(collective="all_to_all" | "all_reduce", has_numbers=True):
                pass
            case Exchange(collective="all_to_all"):
                sender = _sender(before)
                yield from (kernel for kernel in before if kernel[1] != sender and not kernel[1].is_copy)
                yield number, SendingKernel(sender, piece) if sender else piece
                before, follows_rows = [], True
            case Exchange(collective="all_reduce") if not is_backward and before and before[-1][1].flops:
                yield number, SendingKernel(before.pop()[1], piece)
            case Exchange():
                yield from before
                yield number, piece
                before = []
    yield from before


def _sender(before: Sequence[tuple[int, Kernel]]) -> Kernel | None:
    """Return the product whose result is exchanged, or else the largest of the copies."""
    kernels = [kernel for _, kernel in before]
    products, copies = [kernel for kernel in kernels if kernel.flops], [kernel for kernel in kernels if kernel.is_copy]
    return products[0] if products else max(copies, key=lambda kernel: kernel.bytes, default=None)


def _buckets(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Gradients that all ranks average, together as DistributedDataParallel sends them."""
    buckets: list[Gradient] = []
    for gradient in gradients:
        if gradient.is_sharded:
            continue
        if buckets and (buckets[-1].bytes < _BUCKET_BYTES or buckets[-1].after == gradient.after):
            buckets[-1] = replace(gradient, bytes=gradient.bytes + buckets[-1].bytes)
        else:
            buckets.append(gradient)
    return buckets


def _name(piece: Kernel | Exchange | SendingKernel) -> str:
    match piece:
        case Kernel(name):
            return name
        case Exchange(collective):
            return collective
        case SendingKernel(kernel, exchange):
            return f"{kernel.name} and {exchange.collective}"


def _uneven(phases: Sequence[Phase], imbalance: float, direction: str) -> list[Phase]:
    """Return phases in which a rank's links out, or in, are as full as those of the rank that sends or receives most.

    The other end of each flow has its average, since every rank sends to, or receives from, all others.
    """
    other = {"out": " in", "in": " out"}[direction]
    return _crossing(phases, lambda link: 1 if link.endswith(other) or link == "spine" else imbalance)


def _crossing(phases: Sequence[Phase], factor: Callable[[str], float]) -> list[Phase]:
    """Return phases with ``factor(link)`` times as many bytes on each link, by its name."""
    return [
        replace(
            phase,
            flows=[
                replace(flows, crossings={link: share * factor(link) for link, share in flows.crossings.items()})
                for flows in phase.flows
            ],
        )
        for phase in phases
    ]
