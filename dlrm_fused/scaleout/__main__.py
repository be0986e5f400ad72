"""``python -m dlrm_fused.scaleout``: simulates the steps of a scenario, prints tables, writes CSV, timelines and pictures."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_fused.config import Comm
from dlrm_fused.errors import ConfigError, UsageError
from dlrm_fused.paths import user_path
from dlrm_fused.scaleout import plots
from dlrm_fused.scaleout.scenario import Scenario, load_scenario
from dlrm_fused.scaleout.step import Timeline
from dlrm_fused.scaleout.sweep import Row, Sensitivity, sensitivities, sweep

DESCRIPTION = """\
How long a training step takes on hosts that one does not have: python -m dlrm_fused.scaleout --config configs/scaleout/X.yaml.
docs/scaleout.md says how it counts.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; 1 for wrong input, with one line that says what to change."""
    parser = argparse.ArgumentParser("dlrm_fused.scaleout", description=DESCRIPTION)
    parser.add_argument("--config", type=user_path, required=True, help="a scenario, such as those in configs/scaleout")
    parser.add_argument("--output", type=user_path, help="folder for steps.csv and timelines of all steps, for ui.perfetto.dev")
    parser.add_argument("--plot", type=user_path, help="picture of samples/s by ranks")
    parser.add_argument("--tornado", type=user_path, help="picture of what each setting of sensitivity changes, and its table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the scenario")
    options = parser.parse_intermixed_args(arguments)
    try:
        scenario = load_scenario(options.config, options.overrides)
        if options.tornado is not None:
            _tornado(scenario, options.tornado)
            return 0
        rows = []
        for row, timeline in sweep(scenario):
            rows.append(row)
            if options.output is not None:
                _write_timeline(options.output, scenario, row, timeline)
        if options.plot is not None:
            if scenario.sweep:
                raise UsageError(f"--plot draws one scenario; leave out sweep, which has {', '.join(scenario.sweep)}")
            plots.scaling(options.plot, rows, scenario.name)
    except (ConfigError, UsageError) as error:
        print(f"dlrm_fused scaleout: {error}", file=sys.stderr)
        return 1
    print(_table(rows, list(scenario.sweep)))
    if options.output is not None:
        _write_csv(options.output / "steps.csv", rows)
    return 0


def _tornado(scenario: Scenario, path: Path) -> None:
    saved, found = sensitivities(scenario)
    plots.tornado(path, saved, found, scenario.name)
    print(_sensitivity_table(saved, found))


def _sensitivity_table(saved: float, found: Sequence[Sensitivity]) -> str:
    lines = [f"fusion saves {100 * saved:.1f}% of a step; with"]
    for one in found:
        shares = ", ".join(f"{value}: {100 * share:.1f}%" for value, share in zip(one.values, one.saved, strict=True))
        lines.append(f"  {one.key:<45} {shares}")
    return "\n".join(lines)


def _table(rows: Sequence[Row], swept: Sequence[str]) -> str:
    """Fused steps beside those of the baseline on as many hosts."""
    baseline = {_cell(row, swept): row["step_ms"] for row in rows if row["comm"] == Comm.baseline.name}
    heads = "".join(f"{key.rpartition('.')[2]:>20} " for key in swept)
    lines = [heads + f"{'hosts':>6} {'ranks':>6} {'comm':<9} {'step ms':>9} {'/ base':>7} {'samples/s':>13}  critical path, ms"]
    for row in rows:
        step = row["step_ms"]
        lines.append(
            "".join(f"{row[key]:>20} " for key in swept)
            + f"{row['hosts']:>6} {row['ranks']:>6} {row['comm']:<9} {step:>9.3f} {step / baseline[_cell(row, swept)]:>7.3f} "
            f"{row['samples_per_second']:>13,.0f}  {row['critical_path']}"
        )
    return "\n".join(lines)


def _cell(row: Row, swept: Sequence[str]) -> tuple[object, ...]:
    return (*(row[key] for key in swept), row["hosts"])


def _write_timeline(folder: Path, scenario: Scenario, row: Row, timeline: Timeline) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = "".join(f"_{key.rpartition('.')[2]}_{row[key].replace('/', '_')}" for key in scenario.sweep)
    (folder / f"{row['hosts']}_hosts_{row['comm']}{chosen}.json").write_text(json.dumps(timeline.trace_events()))


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
