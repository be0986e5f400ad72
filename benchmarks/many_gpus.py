"""Everything that is measured on four GPUs or eight, in parts of less than eight minutes, beside the aims for four H200s.

    python -m benchmarks.many_gpus embedding --gpus 4 --output many
    python -m benchmarks.many_gpus report --output many

Parts: ``embedding``, ``products``, ``trainer``, ``models``, ``hosts``, ``killed``, ``tests``. Each writes ``PART.json``, the
results of its commands by name, and ``PART.log``, what they printed; the trainer's also has a picture. A command that fails, or
takes longer than it may, does not keep the others from running. ``report`` prints the aims beside the figures of the parts that
are there, and which commands did not end well. Exit status 1 says that one of the part did not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT, current_commit
from benchmarks.common.results import write_results

Results = Mapping[str, Any]
_TRAIN = "--warmup 100 --steps 150 --interval 50 --rounds 1 --at-once 2 comm=fused comm=baseline"
# With the share of the time of their stress tests; between hosts the embedding's epochs are long, and products are compiled
# one after the other.
_OPERATORS = {"embedding_all_to_all": 0.36, "gemv_all_reduce": 0.21, "gemm_all_to_all": 0.25, "all_gather_gemm": 0.18}


@dataclass(frozen=True)
class Command:
    """
    Attributes:
        name: of its results.
        module: with its arguments; ``{gpus}`` is their number, and ``--output`` is added.
        seconds: that it may take.
        is_started_by_torchrun: with a rank for each GPU.
    """

    name: str
    module: str
    seconds: int
    is_started_by_torchrun: bool = True

    def line(self, gpus: int, output: Path, commit: str) -> list[str]:
        launcher = [sys.executable]
        if self.is_started_by_torchrun:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        own = [] if self.module.startswith("pytest") else ["--output", str(output), "--commit", commit]
        return [*launcher, "-m", *shlex.split(self.module.format(gpus=gpus, powers=_powers(gpus), half=gpus // 2)), *own]


def _powers(gpus: int) -> str:
    """1 2 4 ... up to so many."""
    return " ".join(str(2**power) for power in range(gpus.bit_length()) if 2**power <= gpus)


def _stress(*arguments: str, seconds: int, is_started_by_torchrun: bool = True) -> list[Command]:
    """Of each operator; ``seconds`` of all together."""
    return [
        Command(
            f"{operator} {' '.join(arguments)}".strip(),
            f"benchmarks.{operator}.stress --{'epochs' if operator.startswith('embedding') else 'replays'} 10000 "
            + " ".join(arguments),
            int(seconds * share),
            is_started_by_torchrun,
        )
        for operator, share in _OPERATORS.items()
    ]


PARTS: dict[str, list[Command]] = {
    "embedding": [
        Command("embedding", "benchmarks.embedding_all_to_all.benchmark --cells full --graphs --seconds-budget 400", 470)
    ],
    "products": [
        Command("gemv", "benchmarks.gemv_all_reduce.benchmark --cells all --seconds-budget 190", 225),
        Command("gemm", "benchmarks.gemm_all_to_all.benchmark --cells full --stage all --seconds-budget 215", 250),
    ],
    "trainer": [
        Command(
            "scaling",
            "benchmarks.training.scaling --config configs/criteo_1tb_dcnv2_synthetic.yaml --gpus {powers}",
            470,
            is_started_by_torchrun=False,
        )
    ],
    "models": [
        Command(
            name,
            f"benchmarks.training.compare_settings --config configs/{name}.yaml --gpus {{gpus}} {_TRAIN}",
            160,
            is_started_by_torchrun=False,
        )
        for name in ("transformer_large", "moe_large")
    ]
    + [Command("online", "benchmarks.serving.online_latency --config configs/transformer_large.yaml", 120)],
    "hosts": _stress("--slices-by", "messages", "--ranks-per-host", "{half}", seconds=470),
    "killed": _stress(
        *("--slices-by", "messages", "--ranks-per-host", "{half}", "--ranks", "{gpus}", "--kill-rank", "1"),
        seconds=470,
        is_started_by_torchrun=False,
    ),
    "tests": [
        *_stress(seconds=170),
        Command("tests", "pytest -q --maxfail=20 -p no:cacheprovider tests/gpu", 300, is_started_by_torchrun=False),
    ],
}


@dataclass(frozen=True)
class Aim:
    """
    Attributes:
        value: of the results of the part; raises KeyError, IndexError or TypeError if what it is made of is not there.
        is_least: whether the limit is the least that is wanted, and not the most.
    """

    part: str
    what: str
    value: Callable[[Results], float]
    limit: float
    is_least: bool = False

    def line(self, results: Results | None) -> str:
        try:
            found = None if results is None else self.value(results)
        except (KeyError, IndexError, TypeError):
            found = None
        wanted = f"{'>=' if self.is_least else '<='} {self.limit:g}"
        if found is None:
            return f"{self.what:<66}{wanted:>10}{'not run':>10}"
        is_met = found >= self.limit if self.is_least else found <= self.limit
        return f"{self.what:<66}{wanted:>10}{found:>10.3f}  {'met' if is_met else 'missed'}"


def _mean(command: str, group: str, key: str = "ratio") -> Callable[[Results], float]:
    """A geometric mean of a benchmark's summary."""
    return lambda results: float(results[command]["summary"][group][key])


def _worst(command: str, *groups: str) -> Callable[[Results], float]:
    return lambda results: max(float(results[command]["summary"][group]["worst"][0]["ratio"]) for group in groups)


def _of_most_gpus(key: str, unit: float = 1) -> Callable[[Results], float]:
    """Of ``comm=fused``, with the config's batch."""

    def value(results: Results) -> float:
        rows = [row for row in results["scaling"]["summary"] if (row["scaling"], row["comm"]) == ("strong", "fused")]
        return float(max(rows, key=lambda row: row["gpus"])[key]) / unit

    return value


def _failures(results: Results) -> float:
    """Commands that did not end well, or whose reports say that something was not as it must be."""
    return sum(not (report.get("passed") and report["exit_status"] == 0) for report in results.values())


AIMS = [
    Aim("embedding", "embedding + All-to-All, forward, geometric mean", _mean("embedding", "forward"), 0.50),
    Aim("embedding", "forward + backward + update", _mean("embedding", "training"), 0.60),
    Aim("embedding", "row-wise, forward", _mean("embedding", "row_wise_forward"), 0.58),
    Aim(
        "embedding",
        "the slowest cell of all",
        _worst("embedding", "forward", "training", "row_wise_forward", "row_wise_training"),
        0.95,
    ),
    Aim("products", "GEMV + AllReduce, m <= 16", _mean("gemv", "small", "ratio_of_few_rows"), 0.50),
    Aim("products", "GEMV + AllReduce, all", _mean("gemv", "small"), 0.60),
    Aim("products", "its slowest cell", _worst("gemv", "small"), 0.85),
    Aim("products", "GEMM + AllReduce, many rows", _mean("gemv", "large"), 0.80),
    Aim("products", "GEMM + All-to-All", _mean("gemm", "op"), 0.68),
    Aim("products", "expert layer, forward + backward", _mean("gemm", "layer_training"), 0.36),
    Aim("products", "the slowest cell of both", _worst("gemm", "op", "layer_forward", "layer_training"), 1.0),
    Aim(
        "trainer",
        "DLRM-DCNv2, batch 65,536, comm=fused: million samples/s",
        _of_most_gpus("samples_per_second", 1e6),
        12.4,
        True,
    ),
    Aim("trainer", "over comm=baseline of the same run", _of_most_gpus("over_baseline"), 2.5, True),
    Aim("hosts", "two hosts: stress tests that failed", _failures, 0),
    Aim("killed", "two hosts: operators whose ranks did not all name a killed one", _failures, 0),
    Aim("tests", "one host: stress tests, and tests/gpu, that failed", _failures, 0),
]


def run(part: str, gpus: int, folder: Path, commit: str) -> bool:
    """Whether all commands ended well; their results and what they printed are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    ended_well = True
    with (folder / f"{part}.log").open("w") as log:
        for command in PARTS[part]:
            with tempfile.TemporaryDirectory() as scratch:
                output = Path(scratch) / "results.json"
                line = command.line(gpus, output, commit)
                if part == "trainer":
                    line += ["--plot", str(folder / "scaling.png")]
                began = time.monotonic()
                status = _run_within(line, command.seconds, log)
                seconds[command.name] = round(time.monotonic() - began, 1)
                found = json.loads(output.read_text()) if output.exists() else {"passed": status == 0}
                results[command.name] = {**found, "exit_status": status}
            ended_well &= status == 0
            print(f"{command.name}: exit status {status}, {seconds[command.name]} s", flush=True)
            report = {"commit": commit, "gpus": gpus, "seconds": seconds, "results": results}
            write_results(folder / f"{part}.json", report)
    return ended_well


def _run_within(line: Sequence[str], seconds: int, log: Any) -> int:
    """The exit status; that of ``timeout``, 124, if it takes longer."""
    log.write(f"$ {' '.join(line)}\n")
    log.flush()
    limited = ["timeout", "--kill-after=5", str(seconds), *line]
    return subprocess.run(limited, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def report(folder: Path) -> str:
    parts = {part: json.loads(path.read_text()) for part in PARTS if (path := folder / f"{part}.json").exists()}
    if not parts:
        raise SystemExit(f"{folder}: no results of any part; run one, such as embedding, with --output {folder}")
    runs = [f"{part}: {found['gpus']} GPUs, commit {found['commit']}" for part, found in parts.items()]
    aims = [aim.line(parts[aim.part]["results"] if aim.part in parts else None) for aim in AIMS]
    return "\n".join([*runs, *aims, *(line for found in parts.values() for line in _incomplete(found["results"]))])


def _incomplete(results: Results) -> Iterator[str]:
    for name, found in results.items():
        if found["exit_status"]:
            yield f"{name}: exit status {found['exit_status']}"
        if found.get("not_run"):
            yield f"{name}: {len(found['not_run'])} cells not run"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True, help="a folder, the same for all parts")
    parser.add_argument("--commit", help="of the code, where there is no git repository")
    options = parser.parse_args(arguments)
    if options.gpus < 2 or options.gpus % 2:
        parser.error(f"--gpus {options.gpus}: they are divided among two hosts, and must be an even number")
    if options.part == "report":
        print(report(options.output))
        return 0
    return 0 if run(options.part, options.gpus, options.output, options.commit or current_commit()) else 1


if __name__ == "__main__":
    sys.exit(main())
