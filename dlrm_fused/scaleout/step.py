"""A training step as tasks on streams, in time; communication shares the network with all that runs beside it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import simpy

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout import collectives
from dlrm_fused.scaleout.collectives import Phase
from dlrm_fused.scaleout.network import Network
from dlrm_fused.scaleout.topologies import Flows, Topology


@dataclass(frozen=True)
class Compute:
    """Kernels without communication, all ranks for as long."""

    seconds: float


@dataclass(frozen=True)
class Communicate:
    """A collective, which starts when all ranks have come to it: they are alike."""

    phases: Sequence[Phase]


@dataclass(frozen=True)
class ComputeAndSend:
    """A fused operator: each slice of its result is sent as soon as it is computed; it ends when all of them are there.

    Args:
        seconds: Of the computation.
        flows: Who sends to whom.
        bytes_each: Of one flow, all slices together.
        slices: The number of equal parts in which the result is finished.
    """

    seconds: float
    flows: Sequence[Flows]
    bytes_each: float
    slices: int


@dataclass(frozen=True)
class Task:
    """Work that starts when the task before it on its stream, and those that it names, have ended.

    Args:
        stream: Tasks of one stream run one after the other, in the order in which they are given, as on a CUDA stream.
    """

    name: str
    stream: str
    work: Compute | Communicate | ComputeAndSend
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """A task in time, in seconds; ``waited_for`` is the task whose end let it start, None at the start of the step."""

    task: Task
    start: float
    end: float
    waited_for: str | None


class Timeline:
    """The tasks of a step with their start and end."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = list(spans)
        self._by_name = {span.task.name: span for span in spans}

    def __getitem__(self, name: str) -> Span:
        return self._by_name[name]

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return max((span.end for span in self.spans), default=0.0)

    def critical_path(self) -> list[Span]:
        """Return the tasks, from the first to the last, each of which started when the one before it ended."""
        path: list[Span] = []
        span = max(self.spans, key=lambda span: span.end, default=None)
        while span is not None:
            path.insert(0, span)
            span = self._by_name[span.waited_for] if span.waited_for else None
        return path

    def trace_events(self) -> dict[str, object]:
        """Return events that https://ui.perfetto.dev shows once they are JSON (Chrome's Trace Event Format; microseconds)."""
        streams = list(dict.fromkeys(span.task.stream for span in self.spans))
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
            for number, stream in enumerate(streams)
        ]
        spans = [
            {
                "ph": "X",
                "name": span.task.name,
                "pid": 0,
                "tid": streams.index(span.task.stream),
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "args": {"waited for": span.waited_for},
            }
            for span in self.spans
        ]
        return {"traceEvents": names + spans}


def simulate(tasks: Sequence[Task], topology: Topology) -> Timeline:
    """Run one step.

    Raises:
        UsageError: Two tasks have one name, or a task comes after one that is not given before it.
    """
    _check(tasks)
    environment = simpy.Environment()
    network = Network(environment, topology.links)
    ended: dict[str, simpy.Process] = {}
    last_of_stream: dict[str, str] = {}
    spans: dict[str, Span] = {}

    def run(task: Task, before: Sequence[str]) -> Generator[simpy.Event, object, None]:
        yield environment.all_of([ended[name] for name in before])
        waited_for = max(before, key=lambda name: spans[name].end, default=None)
        start = environment.now
        yield from _work(task.work, environment, network)
        spans[task.name] = Span(task, start, environment.now, waited_for)

    for task in tasks:
        before = list(task.after)
        if task.stream in last_of_stream:
            before.append(last_of_stream[task.stream])
        ended[task.name] = environment.process(run(task, before))
        last_of_stream[task.stream] = task.name
    environment.run()
    return Timeline([spans[task.name] for task in tasks])


def _check(tasks: Sequence[Task]) -> None:
    given: set[str] = set()
    for task in tasks:
        if task.name in given:
            raise UsageError(f"two tasks are named {task.name!r}; give each a name of its own")
        missing = sorted(set(task.after) - given)
        if missing:
            raise UsageError(f"task {task.name!r} comes after {missing}, which are not given before it")
        given.add(task.name)


def _work(
    work: Compute | Communicate | ComputeAndSend, environment: simpy.Environment, network: Network
) -> Generator[simpy.Event, object, None]:
    match work:
        case Compute(seconds):
            yield environment.timeout(seconds)
        case Communicate(phases):
            yield collectives.run(environment, network, phases)
        case ComputeAndSend(seconds, flows, bytes_each, slices):
            sent: list[simpy.Event] = []
            for _ in range(slices):
                yield environment.timeout(seconds / slices)
                sent += [network.send(some, bytes_each / slices) for some in flows]
            yield environment.all_of(sent)
