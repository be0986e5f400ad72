"""What today's selector would have cost in a recorded run of the benchmark, for tuning it without a GPU.

    python -m benchmarks.cache_policies.replay results.json

A workload's time with the hints that the selector gives now is looked up among those that were measured. Times are of the first
round, in which every policy was timed, so that ratios may differ from the report's by a percent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache_policies.report import line, summarize, text
from benchmarks.cache_policies.workloads import LOOKUP_STREAMS
from dlrm_fused.ops.common.cache_hints import LOAD_HINTS, OFF, STATIC, STORE_HINTS, STORES, with_hints
from dlrm_fused.ops.common.cache_policy import Stream, select

Hints = dict[str, str]
WINDOW = "L2 window"  # an access-policy window of CUDA, which older results have beside the policies


def measured_hints(cell: Mapping[str, Any], name: str) -> Hints:
    """Of the workload's streams under a policy that was timed: a static one, the selector's then, or a stream and its hint."""
    if name == "selected":
        return dict(cell["selected"])
    policy = STATIC.get(name)
    if policy is None:
        stream, hint = name.split(" ", 1)
        policy = with_hints(**{stream: (STORE_HINTS if stream in STORES else LOAD_HINTS)[hint]})
    hints = policy.hints()
    return {stream: hints[stream] for stream in cell["off"]}


def selected_hints(streams: Mapping[str, Stream], l2_bytes: float) -> Hints:
    """Of all streams of the launches whose streams these are: a lookup, an update, both one after the other, or another one."""
    lookup = {name: own for name, own in streams.items() if name in LOOKUP_STREAMS}
    others = {name: own for name, own in streams.items() if name not in LOOKUP_STREAMS}
    hints = select(others, l2_bytes).hints()
    if "rows" in lookup:
        of_lookup = select(lookup, l2_bytes).hints()
        hints |= {name: of_lookup[name] for name in LOOKUP_STREAMS}
    return hints


def replay(cell: Mapping[str, Any], l2_bytes: float) -> dict[str, Any]:
    """A workload's record with today's choice; an error where its hints were not timed."""
    known = cell["streams"].items()
    streams = {name: Stream(own["distinct_bytes"], own["distinct_bytes"] * own["passes"]) for name, own in known}
    hints, us = selected_hints(streams, l2_bytes), cell["us"]
    selected = {stream: hints[stream] for stream in cell["off"]}
    record = {"name": cell["name"], "off": cell["off"], "selected": selected, "us": us, "differ": cell["differ"]}
    own = next((us[name] for name in us if measured_hints(cell, name) == selected), None)
    if own is None:
        given = ", ".join(f"{stream} {hint}" for stream, hint in selected.items() if hint != cell["off"][stream])
        return {**record, "passed": False, "error": f"not timed: {given}"}
    static = {name: us[name] for name in us if name in STATIC}
    window = cell.get("window", {})
    if "over_off" in window and "rows" in cell["off"]:
        static[WINDOW] = window["us"] / window["off_us"][0] * us["off"]
    best = min(static, key=lambda name: static[name])
    return {
        **record,
        "passed": cell["passed"],
        "best": best,
        "selected_over_best": own / static[best],
        "selected_over_off": own / us["off"],
        "selected_over_hardware": own / us.get("no hints", us["off"]),
        "best_over_off": static[best] / us["off"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="of benchmarks.cache_policies.benchmark")
    report = json.loads(parser.parse_args(arguments).results.read_text())
    assert OFF.hints() == report["static_policies"]["off"], "the defaults were others then"
    cells = [replay(cell, report["l2_bytes"]) for cell in report["cells"] if "us" in cell]
    for cell in cells:
        print(line(cell))
    print(text({"summary": summarize(cells)}))


if __name__ == "__main__":
    main()
