"""The quality of the rule that chooses a schedule from sizes alone. Costs are fitted to half of the measured calls.

    python -m benchmarks.schedules.rule gathered.json products.json sums.json lookups.json --output rule.json

The files are results of ``python -m benchmarks run``, of one machine: of all_gather_gemm (first: its ceilings are the machine's
rates), gemm_all_to_all, gemv_all_reduce and embedding_all_to_all. Times that were not steady do not count, nor calls without a
time for each schedule that the rule may take. Which calls are fitted and which are judged is drawn by ``--seed`` and listed in
the output before anything is fitted. Beside the rule stand its rivals: always the same kind of schedule.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.results import write_results
from benchmarks.schedules.measured import Call, read_calls, read_ceilings
from dlrm_fused.ops.common.gpus import GPUS
from dlrm_fused.ops.schedules import SCHEDULES, Mover, Pair
from dlrm_fused.ops.schedules.estimate import estimate
from dlrm_fused.ops.schedules.machine import Machine
from dlrm_fused.ops.schedules.rule import schedule_of, space_of

FITTED = (
    "library_share", "library_sum_share", "kernel_share", "kernel_contention", "started_us", "tile_us", "copy_start_us",
    "move_us", "mark_us", "wait_us", "collective_us", "sum_us", "sum_share",
)  # fmt: skip
# An error that all schedules of a call share changes no choice, so it counts less.
_WEIGHT_OF_COMMON_ERROR = 0.2
_FIRST_STEP, _LAST_STEP = 0.3, 0.01
_NEAR = 1.03

Choose = Callable[[Call], str]


def read_complete_calls(files: Sequence[Path]) -> list[Call]:
    """Return the calls for which every schedule that the rule may take has a time."""
    return [call for call in read_calls(files) if set(space_of(call.size)) <= call.microseconds.keys()]


def estimated(call: Call, machine: Machine) -> dict[str, float]:
    """Microseconds by schedule."""
    return {name: estimate(call.size, schedule_of(call.size, name), machine).microseconds for name in space_of(call.size)}


def fit(calls: Sequence[Call], machine: Machine) -> Machine:
    """The machine with the costs that fit best, by steps in one of them at a time."""
    best, step = squared_error(calls, machine), _FIRST_STEP
    while step > _LAST_STEP:
        has_improved = False
        for name in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(machine, **{name: getattr(machine, name) * factor})
                error = squared_error(calls, tried)
                if error < best:
                    machine, best, has_improved = tried, error, True
        step = step if has_improved else step / 2
    return machine


def squared_error(calls: Sequence[Call], machine: Machine) -> float:
    """Return the squared error of the logarithms of estimates, over all calls and schedules."""
    total = 0.0
    for call in calls:
        errors = [math.log(time / call.microseconds[name]) for name, time in estimated(call, machine).items()]
        common = statistics.fmean(errors)
        total += sum((error - common) ** 2 for error in errors) + _WEIGHT_OF_COMMON_ERROR * len(errors) * common**2
    return total


def by_rule(machine: Machine) -> Choose:
    def choose(call: Call) -> str:
        times = estimated(call, machine)
        return min(times, key=lambda name: times[name])

    return choose


def always(mover: Mover) -> Choose:
    """The first schedule of this kind that the pair has; the library's if it has none."""

    def choose(call: Call) -> str:
        return next((name for name in space_of(call.size) if SCHEDULES[name].mover is mover), "library")

    return choose


def judge(calls: Sequence[Call], choose: Choose) -> dict[str, Any]:
    """Return how often the fastest is chosen, how often one within 3 % of it, and the loss by a wrong choice."""
    losses = []
    for call in calls:
        fastest = min(call.microseconds[name] for name in space_of(call.size))
        losses.append(call.microseconds[choose(call)] / fastest - 1)
    wrong = [loss for loss in losses if loss > 0]
    return {
        "calls": len(calls),
        "fastest": sum(loss == 0 for loss in losses) / len(losses),
        "within_3_percent": sum(loss <= _NEAR - 1 for loss in losses) / len(losses),
        "mean_loss_of_wrong": statistics.fmean(wrong) if wrong else 0.0,
        "mean_loss": statistics.fmean(losses),
    }


def judge_all(calls: Sequence[Call], choices: Mapping[str, Choose]) -> dict[str, dict[str, Any]]:
    """By who chooses, and of the rule by pair."""
    judged = {name: judge(calls, choose) for name, choose in choices.items()}
    for pair in Pair:
        own = [call for call in calls if call.size.pair is pair]
        if own:
            judged[f"rule, {pair}"] = judge(own, choices["rule"])
    return judged


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    gpu, ceilings, teraflops, contention = read_ceilings(options.results[0])
    calls = read_complete_calls(options.results)
    random.Random(options.seed).shuffle(calls)
    fitted, judged = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    report: dict[str, Any] = {
        "results": [file.name for file in options.results],
        "seed": options.seed,
        "fitted_calls": [call.name for call in fitted],
        "judged_calls": [call.name for call in judged],
    }
    write_results(options.output, report)
    measured = Machine(
        gpu,
        teraflops,
        ceilings.copy,
        ceilings.peer_copies,
        ceilings.peer_stores,
        GPUS[gpu].multiprocessors,
        contention=contention,
    )
    machine = fit(fitted, measured)
    choices = {
        "rule": by_rule(machine),
        "always the library": always(Mover.library),
        "always one kernel": always(Mover.same_kernel),
        "always chunks": always(Mover.copy_engine),
    }
    report |= {"machine": asdict(machine), "fitted": judge_all(fitted, choices), "judged": judge_all(judged, choices)}
    report["choices"] = [
        {"call": call.name, "measured_us": dict(call.microseconds), "estimated_us": estimated(call, machine)} for call in judged
    ]
    write_results(options.output, report)
    print(f"{machine}\n\n{'judged':<28}{'calls':>7}{'fastest':>9}{'near':>7}{'wrong':>8}{'all':>8}")
    for name, result in report["judged"].items():
        print(
            f"{name:<28}{result['calls']:>7}{result['fastest']:>9.3f}{result['within_3_percent']:>7.3f}"
            f"{result['mean_loss_of_wrong']:>8.3f}{result['mean_loss']:>8.3f}"
        )


if __name__ == "__main__":
    main()
