"""Speed and losses of a config by settings. Runs take turns; the first is the measure.

    python -m benchmarks.training.compare --config configs/criteo_1tb_dcnv2_synthetic.yaml --ranks 2 --batches 16384 65536 \
        --output results.json "comm=fused" "comm=baseline" "comm=baseline training.compile=never"

Each argument is one contestant: settings, divided by spaces. Three words are no settings: ``ranks=1`` runs a contestant on
another number of ranks (scaling), ``hosts=2`` declares the ranks to be so many hosts, between which ``comm=fused`` sends
messages, and ``loop=generated`` or ``loop=resident`` takes the bare loop of
:mod:`benchmarks.training.bare_torchrec_loop` in place of the trainer.

A run's rate is that of all steps after the warm-up; the median over rounds counts. ``floor`` is the time that the step's work
takes at the rates of the GPU's data sheet (docs/training.md, "Efficiency"). That the same is trained, losses tell: ``loss off``
is how far any of them is from that of the first contestant's first run, relatively. To compare every step, let each have a
line: ``--warmup 0 --interval 1``. Sums in another order make losses drift apart; how far is usual, ``comm=baseline`` shows a
second time, or on half as many ranks.

With ``--hosts 2 2`` the trainer runs on so many network namespaces of this machine, with so many ranks each, on links of the
rates ``--gbits-per-second``; this needs root and ``ip netns``. ``KB a step`` is what all hosts send, headers included, and
``link ms`` the time that the host which sends most needs for its bytes.

``--machine``, a file of ``benchmarks.calibrate`` of this machine, adds the steps that ``dlrm_fused.scaleout`` foretells. The
smallest of ``--batches`` gives the time of the host: one that the GPU has done sooner.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.environment import describe_environment
from benchmarks.common.network import Hosts, obstacle
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.scaleout.beside_measured import Measured
from benchmarks.training.runs import Lengths, run_bare_loop, train, train_on_hosts

# Titles, keys of a row, factors and formats. A column of which no row has a value is left out.
_COLUMNS: Sequence[tuple[str, str, float, str]] = (
    ("batch", "batch", 1, ""),
    ("Gbit/s", "gbits_per_second", 1, "g"),
    ("M samples/s", "samples_per_second", 1e-6, ".4f"),
    ("step ms", "step_ms", 1, ".2f"),
    ("simulated", "simulated_ms", 1, ".2f"),
    ("floor", "floor_ms", 1, ".2f"),
    ("GiB", "peak_memory_gib", 1, ".2f"),
    ("first / it", "first_over_this", 1, ".2f"),
    ("KB a step", "sent_bytes", 1e-3, ".1f"),
    ("link ms", "link_ms", 1, ".2f"),
    ("loss", "loss", 1, ".5f"),
    ("loss off", "loss_off", 1, ".1e"),
    ("test AUC", "test_auc", 1, ".5f"),
)


# The words of a contestant that are no settings.
_WORDS = ("ranks=", "hosts=", "loop=")


@dataclass(frozen=True)
class Cell:
    """The conditions that contestants share: a global batch size, None for the config's, and the rate of the links of hosts."""

    batch: int | None
    gbits_per_second: float | None


@dataclass(frozen=True)
class Contestant:
    """Settings as they were given, with those words among them that are none."""

    text: str

    def word(self, name: str) -> str | None:
        """Return the value of a word that is no setting."""
        return next((word.partition("=")[2] for word in self.text.split() if word.startswith(f"{name}=")), None)

    @property
    def settings(self) -> list[str]:
        return [word for word in self.text.split() if not word.startswith(_WORDS)]


def run(options: argparse.Namespace, cell: Cell, contestant: Contestant, hosts: Hosts | None) -> dict[str, Any]:
    """Run a contestant once."""
    batch = [] if cell.batch is None else [f"training.global_batch_size={cell.batch}"]
    own = [*batch, *options.set.split(), *contestant.settings]
    lengths = Lengths(options.warmup, options.steps, options.interval)
    ranks = int(contestant.word("ranks") or options.ranks)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / "runs"
        if loop := contestant.word("loop"):
            return run_bare_loop(options.config, own, ranks, loop, lengths)
        settings = [*lengths.settings(), *own]
        if hosts is None:
            return train(options.config, settings, ranks, folder, lengths, int(contestant.word("hosts") or 1))
        assert cell.gbits_per_second is not None
        hosts.shape(cell.gbits_per_second * 1e9)
        return train_on_hosts(hosts, options.hosts, options.config, settings, folder, lengths)


def summarize(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell and contestant, in the order of their first runs: medians over rounds, beside the first's."""
    cells: dict[tuple[int | None, float | None], dict[str, list[Mapping[str, Any]]]] = {}
    for one in runs:
        by_settings = cells.setdefault((one["batch"], one["gbits_per_second"]), {})
        by_settings.setdefault(one["settings"], []).append(one)
    return [_row(own, next(iter(by_settings.values()))) for by_settings in cells.values() for own in by_settings.values()]


def _row(own: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the runs of a contestant say, beside those of the first contestant of their cell."""
    rate, rate_of_first = (statistics.median(one["samples_per_second"] for one in runs) for runs in (own, first))
    expected = dict(first[0]["losses"])
    losses = [(step, loss) for one in own for step, loss in one["losses"]]
    off = [(abs(loss / expected[step] - 1), step) for step, loss in losses if step in expected]
    worst, at_step = max(off, default=(None, None))
    row = {
        **{key: own[0][key] for key in ("batch", "gbits_per_second", "settings")},
        "rounds": len(own),
        "samples_per_second": rate,
        "step_ms": statistics.median(one["step_ms"] for one in own),
        "floor_ms": own[0].get("median_parts", {}).get("floor_ms"),
        "peak_memory_gib": max((one["peak_memory_gib"] for one in own if one.get("peak_memory_gib")), default=None),
        "first_over_this": rate_of_first / rate,
        "loss": losses[-1][1] if losses else None,
        "loss_off": worst,
        "loss_off_at_step": at_step,
        "test_auc": own[-1].get("test_auc"),
    }
    if own[0]["gbits_per_second"] is not None:
        sent = [one["sent_bytes_per_step"] for one in own]
        row["sent_bytes"] = statistics.median(map(sum, sent))
        row["link_ms"] = statistics.median(map(max, sent)) * 8 / (own[0]["gbits_per_second"] * 1e6)  # 1e6 bits a ms
    return row


def add_simulated(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Give each row its simulated step, but for those of the smallest batch and of bare loops."""
    for text in options.contestants:
        contestant = Contestant(text)
        own = {row["batch"]: row for row in rows if row["settings"] == text}
        if contestant.word("loop"):
            continue
        ranks, hosts = int(contestant.word("ranks") or options.ranks), int(contestant.word("hosts") or 1)
        settings = [*options.set.split(), *contestant.settings]
        measured = Measured(options.config, settings, ranks, hosts, {batch: row["step_ms"] for batch, row in own.items()})
        for batch, step_ms in measured.simulated_ms(options.machine).items():
            own[batch]["simulated_ms"] = step_ms


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [column for column in _COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    lines = ["".join(f"{title:>13}" for title, *_ in shown) + "  settings"]
    for row in rows:
        values = (row.get(key) for _, key, *_ in shown)
        cells = ("-" if value is None else f"{value * of[2]:{of[3]}}" for value, of in zip(values, shown, strict=True))
        lines.append("".join(f"{cell:>13}" for cell in cells) + f"  {row['settings']}")
    return "\n".join(lines)


def _turns(options: argparse.Namespace) -> Iterator[tuple[Cell, Contestant]]:
    """Yield all runs; who begins alternates with the rounds."""
    contestants = [Contestant(text) for text in options.contestants]
    for batch, rate in itertools.product(options.batches or [None], options.gbits_per_second or [None]):
        for number in range(options.rounds):
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                yield Cell(batch, rate), contestant


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", default="", metavar="SETTINGS", help="of all contestants, in one argument")
    parser.add_argument("--ranks", type=int, default=2, help="of this machine, each with a GPU or, without GPUs, with cores")
    parser.add_argument("--hosts", type=int, nargs="+", metavar="RANKS", help="of each host, in place of --ranks")
    parser.add_argument("--gbits-per-second", type=float, nargs="+", metavar="RATE", help="of the links of hosts")
    parser.add_argument("--batches", type=int, nargs="+", help="global batch sizes; by default that of the config")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=50, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=200, help="that are timed")
    parser.add_argument("--interval", type=int, default=50, help="steps between lines of metrics.jsonl")
    parser.add_argument("--scratch", help="folder for the runs, which are deleted; a temporary one by default")
    parser.add_argument("--machine", metavar="FILE", help="of benchmarks.calibrate: adds simulated steps")
    parser.add_argument("--most-loss-off", type=float, default=float("inf"), help="exit status 1 if a loss is further off")
    add_report_arguments(parser)
    parser.add_argument("contestants", nargs="+", help="such as 'comm=fused training.precision=bf16'")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End this program if options do not go together."""
    if options.warmup % options.interval or options.steps % options.interval:
        wrong = f"--warmup={options.warmup} --steps={options.steps}"
        parser.error(f"{wrong}: both must be multiples of --interval={options.interval}")
    if options.machine and (options.hosts or len(options.batches or []) < 2):
        parser.error("--machine: needs two or more --batches, and no --hosts")
    if (options.hosts is None) != (options.gbits_per_second is None):
        parser.error("--hosts and --gbits-per-second: give both, or none")
    if options.hosts and any(word.startswith(_WORDS) for text in options.contestants for word in text.split()):
        parser.error(f"--hosts: no contestant may have {', '.join(_WORDS)}")
    if options.hosts and options.steps < 3 * options.interval:
        parser.error(f"--steps={options.steps}: bytes are counted over three times --interval={options.interval} at least")
    if options.hosts and (reason := obstacle()):
        parser.error(f"--hosts: this machine cannot have several hosts: {reason}")


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser()
    options = parser.parse_intermixed_args(arguments)
    _check(parser, options)
    gpus = [] if options.hosts else [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    devices = gpus[: options.ranks] or ["CPU"] * sum(options.hosts or [options.ranks])
    report: dict[str, Any] = {**describe_environment(devices, options.commit), "summary": [], "runs": []}
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(len(options.hosts))) if options.hosts else None
        for cell, contestant in _turns(options):
            report["runs"].append({**asdict(cell), "settings": contestant.text, **run(options, cell, contestant, hosts)})
            report["summary"] = summarize(report["runs"])
            # After each run, so that what was measured is there if a later one fails.
            write_results(options.output, report)
    if options.machine:
        add_simulated(report["summary"], options)
        write_results(options.output, report)
    print(table(report["summary"]))
    return int(any((row["loss_off"] or 0.0) > options.most_loss_off for row in report["summary"]))


if __name__ == "__main__":
    sys.exit(main())
