"""Limits beyond which the service refuses requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dlrm_fused.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Holds the limits.

    Attributes:
        max_body_bytes: most bytes of a request's body.
        max_rows: most rows of a request, and of the batch that several requests become.
        max_waiting_rows: most rows of all requests that wait for their batch.
    """

    max_body_bytes: int = 2**20
    max_rows: int = 1024
    max_waiting_rows: int = 16_384

    def check(self) -> None:
        """Raise ConfigError if a limit would let nothing pass."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: allowed: 1 or more")
        if self.max_waiting_rows < self.max_rows:
            raise ConfigError(f"--max-waiting-rows {self.max_waiting_rows}: allowed: --max-rows {self.max_rows} or more")
