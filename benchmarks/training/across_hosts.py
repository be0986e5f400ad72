"""Step time and bytes on the network of comm=fused and comm=baseline between hosts, on links of several rates.

    python -m benchmarks.training.across_hosts --output results.json
    python -m benchmarks.training.across_hosts --configs quickstart mixed_sharding --rates 0.1 --rounds 3 --output results.json

The trainer runs on network namespaces of this machine, with two ranks on each if ``--ranks`` says nothing else. It needs root,
``ip netns``, and for the configs of MovieLens their data (`make data/movielens-100k/dataset.json`;
configs/transformer_movielens.yaml has its command). Every host sends at most at the given rate. Both settings take turns, and
what comes first alternates with the rounds.

A cell is a config at a rate. ``step ms`` is the median over rounds, ``KB per step`` what all hosts together send, headers
included, ``floor ms`` the time that the host which sends most needs for its bytes at the rate. That the same is trained, losses
tell: a cell in which those of a round differ by more than 1e-5, relatively, is marked with ``!``, and this program then ends
with an error.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.network import Hosts, obstacle
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.training.runs_on_hosts import train_on_hosts

_COMMS = ("fused", "baseline")
_LARGEST_LOSS_DIFFERENCE = 1e-5
# SGD has no division by small sums, which would amplify the rounding of sums in another order: losses can be compared.
SETTINGS = [
    "embedding.optimizer.kind=sgd",
    "embedding.optimizer.learning_rate=1",
    "training.dense_optimizer.kind=sgd",
    "training.dense_optimizer.learning_rate=0.003",
    "runtime.device=cpu",
    "checkpoint.every_steps=0",
    "checkpoint.keep_best=false",
    "evaluation.every_steps=0",
]


@dataclass(frozen=True)
class Workload:
    """A config with settings that let it step in less than 0.1 s on two cores."""

    config: str
    settings: Sequence[str] = ()


WORKLOADS = {
    "quickstart": Workload("configs/quickstart.yaml"),
    "moe_movielens": Workload("configs/moe_movielens.yaml"),
    "transformer_movielens": Workload("configs/transformer_movielens.yaml", ["training.global_batch_size=128"]),
    # Its model, tables cut to 20,000 rows and generated ids whose popularity is that of Zipf's law.
    "criteo_kaggle": Workload(
        "configs/criteo_kaggle.yaml",
        [
            "training.global_batch_size=512",
            "data.source=synthetic",
            'data.path=""',
            "data.shuffle_window_rows=0",
            "data.synthetic.tables=26",
            "data.synthetic.rows=[20000]",
        ],
    ),
    "mixed_sharding": Workload(
        "configs/synthetic.yaml",
        [
            "training.global_batch_size=1024",
            "data.synthetic.tables=6",
            "data.synthetic.rows=[20000]",
            "data.synthetic.pooling=[8]",
            "data.synthetic.jagged=true",
            "embedding.dim=32",
            "model.bottom_mlp=[64,32]",
            *(
                f"embedding.tables.table_{table}.sharding={sharding}"
                for table, sharding in enumerate(["table_wise", "column_wise", "row_wise"] * 2)
            ),
        ],
    ),
}


@dataclass(frozen=True)
class Lengths:
    """Steps of a run: those before the timed ones, the timed ones, and those between two lines of metrics.jsonl."""

    warmup: int
    timed: int
    interval: int

    def settings(self) -> list[str]:
        return [f"training.max_steps={self.warmup + self.timed}", f"telemetry.log_every_steps={self.interval}"]


def measure(
    hosts: Hosts,
    ranks: Sequence[int],
    name: str,
    gbit_per_second: float,
    comm: str,
    lengths: Lengths,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """One run of a cell: its name, rate and comm, and what :func:`train_on_hosts` returns.

    Args:
        ranks: of each host.
        overrides: further settings.
    """
    workload = WORKLOADS[name]
    strict = "true" if comm == "fused" else "false"
    settings = [*SETTINGS, *workload.settings, *lengths.settings(), *overrides, f"comm={comm}", f"comm_strict={strict}"]
    hosts.shape(gbit_per_second * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        run = train_on_hosts(hosts, ranks, workload.config, settings, Path(scratch) / "runs", lengths.warmup)
    return {"config": name, "gbit_per_second": gbit_per_second, "comm": comm, **run}


def summarize(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each cell of which both settings have run."""
    cells: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        cells.setdefault((run["config"], run["gbit_per_second"]), {}).setdefault(run["comm"], []).append(run)
    return [
        _row(*cell, *(by_comm[comm] for comm in _COMMS)) for cell, by_comm in cells.items() if by_comm.keys() == set(_COMMS)
    ]


def _row(name: str, rate: float, fused: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"config": name, "gbit_per_second": rate, "rounds": min(len(fused), len(baseline))}
    for comm, own in zip(_COMMS, (fused, baseline), strict=True):
        row[f"{comm}_step_ms"] = statistics.median(run["step_ms"] for run in own)
        row[f"{comm}_bytes"] = statistics.median(sum(run["sent_bytes_per_step"]) for run in own)
        # 1 Gbit/s is 1e6 bits/ms.
        row[f"{comm}_floor_ms"] = statistics.median(max(run["sent_bytes_per_step"]) for run in own) * 8 / (rate * 1e6)
    row["fused_over_baseline"] = row["fused_step_ms"] / row["baseline_step_ms"]
    row["fused_over_baseline_bytes"] = row["fused_bytes"] / row["baseline_bytes"]
    row["loss_difference"] = max(
        abs(ours - theirs) / abs(theirs)
        for one, other in zip(fused, baseline, strict=False)
        for (_, ours), (_, theirs) in zip(one["losses"], other["losses"], strict=True)
    )
    return row


def same_losses(row: dict[str, Any]) -> bool:
    return bool(row["loss_difference"] <= _LARGEST_LOSS_DIFFERENCE)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cells and the geometric means of the ratios."""
    titles = f"{'':<24}{'':>8}{'step ms':^27}{'KB per step':^27}{'floor ms':^18}{'loss':>10}"
    names = "".join(f"{'fused':>{wide}}{'baseline':>9}{'ratio':>9}" for wide in (9, 9))
    lines = [titles, f"{'config':<24}{'Gbit/s':>8}{names}{'fused':>9}{'baseline':>9}{'differs':>10}"]
    for row in rows:
        lines.append(
            f"{row['config']:<24}{row['gbit_per_second']:>8g}"
            f"{row['fused_step_ms']:>9.2f}{row['baseline_step_ms']:>9.2f}{row['fused_over_baseline']:>9.3f}"
            f"{row['fused_bytes'] / 1e3:>9.1f}{row['baseline_bytes'] / 1e3:>9.1f}{row['fused_over_baseline_bytes']:>9.3f}"
            f"{row['fused_floor_ms']:>9.2f}{row['baseline_floor_ms']:>9.2f}"
            f"{row['loss_difference']:>10.1e}{'' if same_losses(row) else ' !'}"
        )
    means = [
        statistics.geometric_mean(row[key] for row in rows) for key in ("fused_over_baseline", "fused_over_baseline_bytes")
    ]
    lines.append(f"{'geometric mean':<32}{means[0]:>27.3f}{means[1]:>27.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 1, 10], metavar="GBIT_PER_SECOND")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2], help="of each host")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=20, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=80, help="that are timed")
    parser.add_argument("--interval", type=int, default=10, help="steps between lines of metrics.jsonl")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs")
    add_report_arguments(parser)
    options = parser.parse_args(arguments)
    lengths = Lengths(options.warmup, options.steps, options.interval)
    if lengths.warmup % lengths.interval or lengths.timed % lengths.interval or lengths.timed < 3 * lengths.interval:
        parser.error(
            f"--warmup={lengths.warmup} --steps={lengths.timed}: both must be multiples of --interval={lengths.interval}, "
            "and --steps at least three times as much"
        )
    if reason := obstacle():
        raise SystemExit(f"this machine cannot have several hosts: {reason}")

    devices = ["CPU"] * sum(options.ranks)
    report: dict[str, Any] = {**describe_environment(devices, options.commit), "summary": [], "runs": []}
    turns = [
        (name, rate, comm)
        for name in options.configs
        for rate in options.rates
        for number in range(options.rounds)
        for comm in (_COMMS if number % 2 == 0 else reversed(_COMMS))
    ]
    with Hosts(len(options.ranks)) as hosts:
        for name, rate, comm in turns:
            report["runs"].append(measure(hosts, options.ranks, name, rate, comm, lengths, options.set))
            report["summary"] = summarize(report["runs"])
            # After each run, so that what was measured is there if a later one fails.
            write_results(options.output, report)
    print(table(report["summary"]))
    if not all(map(same_losses, report["summary"])):
        raise SystemExit(f"losses differ by more than {_LARGEST_LOSS_DIFFERENCE:g} where a cell is marked with !")


if __name__ == "__main__":
    main()
