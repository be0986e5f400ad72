"""Counting the lines of an input that cannot be used, and stopping when there are too many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dlrm_fused.errors import DataError

SHOWN = 10
# While reading, the share is taken of at least this many lines, so that a few bad ones at the beginning stop nothing.
EARLY_LINES = 100_000


class MalformedLines:
    """Counts malformed lines and keeps the first ones.

    Args:
        max_share: the largest share of malformed lines that is accepted, 0 to 1.
    """

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.lines = 0
        self.count = 0
        self.first: list[str] = []

    def add(self, path: Path, line: int, reason: str) -> None:
        """Record that ``line`` (the first is 1) of ``path`` is left out."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{path}:{line}: {reason}")

    def seen(self, lines: int) -> None:
        """Record that ``lines`` more lines were read, malformed ones included.

        Raises:
            DataError: if too many of the lines read so far are malformed.
        """
        self.lines += lines
        self._check(max(self.lines, EARLY_LINES))

    def finish(self) -> None:
        """Check the share over all lines.

        Raises:
            DataError: if too many lines are malformed.
        """
        self._check(self.lines)

    def _check(self, lines: int) -> None:
        if self.count > self.max_share * lines:
            raise DataError(
                f"{self.count} of {self.lines} lines are malformed, --max-malformed={self.max_share:g} allows fewer:"
                + "".join(f"\n  {line}" for line in self.first)
            )

    def print_report(self) -> None:
        """Tell people, on standard error, of the lines left out, if there are any."""
        if not self.count:
            return
        shown = "".join(f"\n  {line}" for line in self.first)
        more = f"\n  ... and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        print(f"{self.count} of {self.lines} lines are malformed and left out:{shown}{more}", file=sys.stderr)

    def summary(self) -> dict[str, Any]:
        """Return the counts, for ``dataset.json``."""
        return {"lines": self.lines, "malformed_lines": self.count, "first_malformed_lines": self.first}
