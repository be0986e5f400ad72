"""The HTTP service under load: requests answered, their times, and its answers to misbehaving clients.

Clients ask one after the other and compare every answer with what the loader predicts; while they go on asking, others
send what is wrong (:mod:`benchmarks.serving.trouble`):

    python -m benchmarks.serving.http_service --run runs/first --model model --output results.json [--clients 64] [--seconds 60]

The run's data set gives the rows: one of ids and numbers. Clients and service share the machine.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.serving.clients import Load, Question, send
from benchmarks.serving.rows import prepared_rows
from benchmarks.serving.service_process import running_service
from benchmarks.serving.trouble import cause
from dlrm_fused.inference.export.loader import load

QUESTIONS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="the run that was exported")
    parser.add_argument("--model", type=Path, required=True, help="its exported model")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="of a request")
    parser.add_argument("--repeats", type=int, default=20, help="of each trouble")
    add_report_arguments(parser)
    args = parser.parse_args()
    report = measure(args.run, args.model, args.clients, args.seconds, args.rows, args.repeats)
    write_results(args.output, {**describe_environment(["CPU"], args.commit), **report})
    print(json.dumps(report, indent=2))


def measure(
    run: Path, model: Path, clients: int, seconds: float, rows_of_requests: Sequence[int], repeats: int
) -> dict[str, Any]:
    """The report; ``seconds`` for each number of rows."""
    rows = prepared_rows(run, QUESTIONS, with_history=bool(load(model).info["history_length"]))
    with running_service(model) as service:
        loads = []
        for count in rows_of_requests:
            load_ = send(service.port, questions_of(model, rows, count), clients, seconds)
            loads.append({"rows": count, **summary(load_)})
        during = Load()
        asking = threading.Thread(
            target=lambda: vars(during).update(
                vars(send(service.port, questions_of(model, rows, 1), clients, max(seconds / 4, 3)))
            )
        )
        asking.start()
        incidents = cause(service, rows[0], repeats)
        asking.join()
        is_healthy = service.request("GET", "/health")[0] == 200
    return {
        "clients": clients,
        "loads": loads,
        "trouble": {name: asdict(incident) for name, incident in incidents.items()},
        "load_during_trouble": {"rows": 1, **summary(during)},
        "healthy_afterwards": is_healthy,
    }


def questions_of(model: Path, rows: Sequence[dict[str, Any]], count: int) -> list[Question]:
    """Requests of ``count`` rows each, with what the loader predicts for them."""
    probabilities = load(model).predict(rows).tolist()
    starts = range(0, len(rows) - count + 1, count)
    return [
        Question(json.dumps({"rows": rows[first : first + count]}).encode(), probabilities[first : first + count])
        for first in starts
    ]


def summary(load_: Load) -> dict[str, Any]:
    return {
        "requests": len(load_.seconds),
        "lost": len(load_.lost),
        "what_was_lost": sorted(set(load_.lost))[:5],
        "requests_per_second": round(len(load_.seconds) / load_.wall, 1),
        "p50_ms": round(load_.percentile_ms(50), 2),
        "p99_ms": round(load_.percentile_ms(99), 2),
    }


if __name__ == "__main__":
    main()
