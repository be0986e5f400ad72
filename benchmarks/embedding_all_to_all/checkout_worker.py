"""One rank of one checkout for compare_checkouts.py, which starts it: prepares cells and times them when it is told to.

It runs in the root of the checkout, whose own benchmark makes the inputs, the operator's workspace and the check. It is told
what to do by lines on stdin, JSON lists of a name and arguments, and answers each by a line of JSON on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The one place that knows how a checkout is arranged: today, or before benchmarks were modules (4d608c8 and earlier).
if Path("benchmarks/common").is_dir():
    from benchmarks.common import harness
    from benchmarks.embedding_all_to_all import benchmark, cells
else:
    sys.path.insert(0, "benchmarks")
    import embedding_all_to_all as benchmark  # type: ignore[import-not-found, no-redef]
    import embedding_cells as cells  # type: ignore[import-not-found, no-redef]
    import harness  # type: ignore[import-not-found, no-redef]

import dlrm_fused

# Bursts of a measurement, and steps whose launch is timed; under the interpreter, whose times mean nothing, as few as possible.
BURSTS, LAUNCHES = (5, 40) if torch.cuda.is_available() else (2, 1)
# Steps that follow each other before the host waits for the device.
LAUNCHES_IN_TURN = 8
_OPTIONS = Namespace(seconds_per_cell=0.0, experimental_tbe=False, graphs=False)


class Worker:
    """What it can be told to do. Each method is collective among the ranks of this checkout."""

    def __init__(self, world: harness.World) -> None:
        self.world = world
        self.run: benchmark.CellRun | None = None

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Take up a cell in place of the last one; whether the operator's results are right, and their errors."""
        self.run = None
        gc.collect()  # frees the tables of the last cell, which exist twice on a GPU: here and in the other checkout
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        cell = cells.Cell(**fields)
        self.run = benchmark.CellRun(self.world, cell, benchmark.Tables(cell, self.world.device), _OPTIONS)
        errors = self.run.errors(training=True)
        return {"passed": self.run.passes(errors), "errors": errors}

    def time(self, training: bool) -> float:
        """Microseconds of the device for one lookup, with its backward pass if it is training; of the slowest rank."""
        assert self.run is not None
        call = {"fused": self.run.pass_of("fused", training)}
        timing = harness.time_interleaved(self.world, call, seconds=0.0, rounds=(BURSTS, BURSTS))["fused"]
        return float(timing.microseconds / benchmark.LOOKUPS)

    def time_launch(self) -> dict[str, float]:
        """Microseconds of this rank's host until a forward pass, and a backward pass, are enqueued."""
        assert self.run is not None
        forward, lookup, gradient = self.run.forwards["fused"], self.run.lookups[0], self.run.gradient
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for number in range(LAUNCHES):
            if number % LAUNCHES_IN_TURN == 0:
                harness.synchronize(self.world.device)
            began = time.perf_counter()
            output = forward(lookup)
            enqueued = time.perf_counter()
            output.backward(gradient)
            times["backward"].append(time.perf_counter() - enqueued)
            times["forward"].append(enqueued - began)
        harness.synchronize(self.world.device)
        return {name: statistics.median(own) * 1e6 for name, own in times.items()}


def serve(tell: Callable[[Any], None]) -> None:
    """Do what the lines on stdin say until it is closed."""
    with harness.open_world() as world:
        worker = Worker(world)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            tell(getattr(worker, name)(*arguments))
        worker.run = None


def main() -> None:
    if not Path(dlrm_fused.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"{dlrm_fused.__file__} was imported instead of that of the checkout {Path.cwd()}")
    # Libraries print to stdout too: answers go through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(lambda answer: print(json.dumps(answer), file=answers, flush=True))


if __name__ == "__main__":
    main()
