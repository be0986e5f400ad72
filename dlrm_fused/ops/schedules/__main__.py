"""A command that prints the rule's choice for a call, and its timelines:

python -m dlrm_fused.ops.schedules --pair all_gather_gemm --ranks 2 --rows 16384 --columns 3584 --depth 4096
    [--machine "NVIDIA H200"] [--schedule chunks_4] [--draw timeline.svg]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_fused.ops.schedules.estimate import Size, estimate
from dlrm_fused.ops.schedules.machines import H200, MACHINES
from dlrm_fused.ops.schedules.rule import choose, explain, schedule_of
from dlrm_fused.ops.schedules.schedule import SCHEDULES, Pair
from dlrm_fused.ops.schedules.timeline import draw, table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=[str(pair) for pair in Pair], required=True)
    for name, what in (("ranks", "of the host"), ("rows", "M"), ("columns", "N of a rank"), ("depth", "K of a rank")):
        parser.add_argument(f"--{name}", type=int, required=True, help=what)
    parser.add_argument("--machine", choices=list(MACHINES), default=H200.name)
    parser.add_argument("--schedule", choices=list(SCHEDULES), help="whose timeline is shown; else that which the rule takes")
    parser.add_argument("--draw", type=Path, help="the timeline as SVG")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("ranks", "rows", "columns", "depth")}
    if wrong := [f"--{name}={value}" for name, value in sizes.items() if value < (2 if name == "ranks" else 1)]:
        parser.error(f"{', '.join(wrong)}: needed: at least 1, of ranks at least 2")
    size = Size(Pair(options.pair), **sizes)
    machine = MACHINES[options.machine]
    print(explain(size, machine))
    try:
        timeline = estimate(size, schedule_of(size, options.schedule or choose(size, machine)), machine)
    except ValueError as error:
        parser.error(f"--schedule={options.schedule}: {error}")
    print(f"\n{timeline.schedule.name}:\n{table(timeline)}")
    if options.draw:
        options.draw.write_text(draw(timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
