"""The command: its arguments, and what a rank says that loses the others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dlrm_fused.doctor.examine import follow, lead
from dlrm_fused.doctor.mailbox import Mailbox, OtherReleaseError
from dlrm_fused.doctor.report import as_json, as_text
from dlrm_fused.errors import ConfigError
from dlrm_fused.training.runtime import Rank, configure_logging

DESCRIPTION = """\
Say what this cluster is, what is wrong with it and what to do: python -m dlrm_fused.doctor, alone or under torchrun with -m.

Exit status: 0 all is well; 1 something is broken, so that training or comm=fused cannot run; 2 it works, but slower than it
could. torchrun makes 1 of both; "status" in the output of --json is that of the ranks. docs/many_nodes.md explains findings.
"""
_SECONDS = 60.0
_MOST_SECONDS = 86_400


class _Parser(argparse.ArgumentParser):
    """Ends with status 1 for wrong arguments: 2 has a meaning of its own here."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; {' '.join(self.format_usage().split())}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the cluster that this rank is part of; returns the exit status, the same on all ranks."""
    parser = _Parser("dlrm_fused.doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="limit of each step (default: 60)")
    options = parser.parse_args(arguments)
    if not 1 <= options.seconds <= _MOST_SECONDS:
        parser.error(f"argument --seconds: {options.seconds}: allowed: 1 to {_MOST_SECONDS}")
    try:
        rank = Rank.from_environment()
    except ConfigError as error:
        parser.error(str(error))
    configure_logging(rank)
    try:
        mailbox = Mailbox(rank, options.seconds)
        if rank.index == 0:
            return lead(rank, mailbox, options.seconds, as_json if options.json else as_text)
        return follow(rank, mailbox, options.seconds)
    except (RuntimeError, OSError, OtherReleaseError) as error:
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"dlrm_fused doctor: {rank} lost rank 0, or the store at {store}: {error}", file=sys.stderr)
        return 1
