"""One rank of one checkout for compare.py, which starts it: prepares cells and times them when it is told to.

The benchmark is today's, and the package dlrm_fused that of the checkout, whose folder is the first argument; the second is
that of today's checkout. What to do is told by lines on stdin, JSON lists of a name and arguments; each is answered by a line
of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, sys.argv[1])
import dlrm_fused

sys.path[0] = sys.argv[2]
from benchmarks.common.harness import World, open_world, synchronize, time_interleaved  # noqa: E402
from benchmarks.operators import load  # noqa: E402
from benchmarks.operators.case import Case  # noqa: E402

# Bursts of a measurement, and calls whose launch is timed; under the interpreter, whose times mean nothing, as few as possible.
BURSTS, LAUNCHES = (5, 40) if torch.cuda.is_available() else (2, 1)
# Calls that follow each other before the host waits for the device.
_LAUNCHES_IN_TURN = 8


class Worker:
    """The tasks of a rank. Each method is collective among the ranks of this checkout."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.case: Case | None = None

    def prepare(self, operator: str, cells: str, name: str) -> dict[str, Any]:
        """Take up a cell in place of the last one; whether the operator's results are right, and their errors."""
        self.case = None
        self.world.free_memory()  # the inputs of the last cell exist twice on a GPU: here and in the other checkout
        (cell,) = (cell for cell in load(operator).sets[cells]() if cell.name == name)
        self.case = load(operator).open(self.world, cell)
        stage = load(operator).stages(cell)[-1]
        self.case.passes(stage)["fused"]()
        checked = self.case.check(stage)
        return {"passed": checked["passed"], "errors": checked["errors"]}

    def time(self, training: bool) -> float:
        """Microseconds of the device for a call, with its backward pass if it is training; of the slowest rank."""
        assert self.case is not None
        call = {"fused": self.case.own_pass(training=training)}
        timing = time_interleaved(self.world, call, seconds=0.0, rounds=(BURSTS, BURSTS))["fused"]
        return timing.microseconds / self.case.calls

    def time_launch(self, training: bool) -> float:
        """Microseconds of this rank's host until a call, with its backward pass if it is training, is enqueued."""
        assert self.case is not None
        call, times = self.case.own_pass(training=training), []
        for number in range(LAUNCHES):
            if number % _LAUNCHES_IN_TURN == 0:
                synchronize(self.world.device)
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        synchronize(self.world.device)
        return statistics.median(times) * 1e6 / self.case.calls


def main() -> None:
    """Do what the lines on stdin say until it is closed."""
    if not Path(dlrm_fused.__file__).is_relative_to(sys.argv[1]):
        raise SystemExit(f"{dlrm_fused.__file__} was imported instead of that of the checkout {sys.argv[1]}")
    # Libraries print to stdout too: answers go through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open_world() as world:
        worker = Worker(world)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(worker, name)(*arguments)), file=answers, flush=True)
        worker.case = None


if __name__ == "__main__":
    main()
