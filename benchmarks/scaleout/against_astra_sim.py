"""Compares the simulated collectives with ASTRA-Sim's analytical network backend, which queues chunks on links.

    git clone https://github.com/astra-sim/astra-network-analytical && git -C astra-network-analytical checkout 0f6d65e
    python -m benchmarks.scaleout.against_astra_sim --astra-sim astra-network-analytical --output astra_sim.json

Needs a C++17 compiler. ASTRA-Sim gets each message of a collective, with its route and what it waits for, from
``benchmarks.scaleout.messages``; its links, its queues and its events are its own. Exit status 1 above 5%.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.common.environment import describe_environment
from benchmarks.common.results import write_results
from benchmarks.scaleout import messages
from benchmarks.scaleout.messages import MESSAGES, Message, Wires
from dlrm_fused.scaleout.collectives import COLLECTIVES, seconds
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus

COMMIT = "0f6d65e7de09b5fa0a5c6e5f9a8a943981d6106c"
SIZES = (2**20, 2**26)
ALLOWED = 0.05
_CHUNKS = 64  # of a message: its store-and-forward at switches then adds less than 2%
_UNIT = 1e-12  # of ASTRA-Sim's integer clock, so that rounding is small; its own is a nanosecond
_SOURCES = (
    *("common/NetworkFunction.cc", "common/event-queue/Event.cc", "common/event-queue/EventList.cc"),
    *("common/event-queue/EventQueue.cc", "congestion_aware/network/Chunk.cc", "congestion_aware/network/Device.cc"),
    *("congestion_aware/network/Link.cc", "congestion_aware/topology/Topology.cc"),
)


Pairs = Sequence[tuple[str, str]]


def networks() -> Iterator[tuple[str, Topology, Wires, Pairs]]:
    """Name, ours, the same with links told apart, and the collectives that are modelled on it."""
    everywhere: Pairs = (("all_to_all", "direct"), ("all_reduce", "ring"), ("all_reduce", "direct"))
    on_switches: Pairs = (*everywhere, ("all_to_all", "pairwise"))
    with_hosts: Pairs = (*everywhere, ("all_to_all", "hierarchical"), ("all_reduce", "hierarchical"))
    for ranks in (2, 8, 32):
        yield f"switch of {ranks}", Switch(ranks, 50e9, 5e-6), messages.switch(ranks, 50e9, 5e-6), on_switches
    for rows, columns in ((1, 8), (4, 4), (8, 8)):
        wires = messages.torus(rows, columns, 25e9, 0.7e-6)
        yield f"torus of {rows} x {columns}", Torus(rows, columns, 25e9, 0.7e-6), wires, everywhere
    for hosts in (2, 4, 8):
        cluster = Cluster(hosts, 8, nvlink=450e9, nic=50e9, nvlink_latency=2e-6, nic_latency=5e-6)
        yield f"{hosts} hosts of 8", cluster, messages.cluster(hosts, 8, 450e9, 50e9, 2e-6, 5e-6), with_hosts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--astra-sim", type=Path, required=True, help="a clone of astra-sim/astra-network-analytical")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--commit", default="", help="of this repository, for the record")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = build(options.astra_sim, Path(folder) / "driver")
        rows = list(_compare(run))
    worst = max(abs(float(row["ours_over_astra_sim"]) - 1) for row in rows)
    print(f"the largest difference: {100 * worst:.2f}%")
    if options.output is not None:
        write_results(
            options.output,
            {
                **describe_environment(["CPU"], options.commit),
                "astra_sim": COMMIT,
                "chunks_of_a_message": _CHUNKS,
                "worst": worst,
                "rows": rows,
            },
        )
    return int(worst > ALLOWED)


def _compare(run: Callable[[Wires, list[Message]], float]) -> Iterator[dict[str, str | float]]:
    print(f"{'network':<16} {'collective':<24} {'MiB':>4} {'ours us':>11} {'ASTRA-Sim us':>13} {'ours / its':>10}")
    for name, topology, wires, pairs in networks():
        for kind, algorithm in pairs:
            for size in SIZES:
                ours = seconds(topology, COLLECTIVES[kind][algorithm](topology, size))
                theirs = run(wires, MESSAGES[kind, algorithm](wires, size))
                print(
                    f"{name:<16} {kind + ', ' + algorithm:<24} {size >> 20:>4} {1e6 * ours:>11.2f} {1e6 * theirs:>13.2f} "
                    f"{ours / theirs:>10.4f}",
                    flush=True,
                )
                yield {
                    "network": name,
                    "collective": f"{kind}, {algorithm}",
                    "bytes": size,
                    "ours_us": 1e6 * ours,
                    "astra_sim_us": 1e6 * theirs,
                    "ours_over_astra_sim": ours / theirs,
                }


def build(clone: Path, driver: Path) -> Callable[[Wires, list[Message]], float]:
    """Compile ASTRA-Sim's network with the driver. Returns: seconds from the start until the last message is there."""
    sources = [str(clone / source) for source in _SOURCES]
    source = str(Path(__file__).with_name("astra_sim_driver.cc"))
    include = str(clone / "include" / "astra-network-analytical")
    subprocess.run(["g++", "-std=c++17", "-O2", "-w", "-I", include, source, *sources, "-o", str(driver)], check=True)

    def run(wires: Wires, sent: list[Message]) -> float:
        ended = subprocess.run([str(driver)], input=_input(wires, sent), capture_output=True, text=True, check=True)
        return int(ended.stdout) * _UNIT

    return run


def _input(wires: Wires, sent: list[Message]) -> str:
    """A channel has so many bytes under way as its links hold, as windows of a transport are set, and eight chunks a link.

    With everything on the links at once, what passes through a node of a torus would wait for all that starts there.
    """
    ways = [way for rank in range(1, wires.ranks) for way in wires.routes(0, rank)]
    latency = sum(share * sum(wires.links[hop][1] for hop in pairwise(route)) for share, route in ways) / (wires.ranks - 1)
    rates = [rate for (start, _), (rate, _) in wires.links.items() if start == 0]
    chunk = max(message.bytes for message in sent) / _CHUNKS
    lines = [str(int(sum(rates) * latency + 8 * len(rates) * chunk)), f"{wires.devices} {len(wires.links)}"]
    for (start, end), (rate, of_link) in wires.links.items():
        lines.append(f"{start} {end} {rate * _UNIT * 1e9 / 2**30:.17g} {of_link / _UNIT:.17g}")
    lines.append(str(len(sent)))
    for message in sent:
        waits, route = " ".join(map(str, message.after)), " ".join(map(str, message.route))
        lines.append(
            f"{message.channel} {message.bytes:.17g} {_CHUNKS} {len(message.after)} {waits} {len(message.route)} {route}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
