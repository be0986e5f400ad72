"""The service in a process of its own, as users start it."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_START_SECONDS = 60


@dataclass(frozen=True)
class Service:
    """A running service."""

    port: int
    process: subprocess.Popen[bytes]

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def running_command(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Start a service by a command, to which ``--port`` and a free one are added; at the end it must end as if by SIGTERM.

    Args:
        folder: where it is started.
        environment: its variables; default: those of this process.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([*command, "--port", str(port)], cwd=folder, env=environment)
    service = Service(port, process)
    try:
        _wait_until_healthy(service)
        yield service
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
        if status not in (0, -signal.SIGTERM):
            raise RuntimeError(f"the service ended with status {status}")
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(service: Service) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and service.process.poll() is None:
        try:
            if service.request("GET", "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the service is not healthy after {_START_SECONDS} s; status {service.process.poll()}")
