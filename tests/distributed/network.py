"""Two hosts on one machine: network namespaces with their own names and addresses, and a cable that can be cut.

Needs root and ``ip netns`` (Debian's iproute2); tests that use it are marked ``@needs_two_hosts``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

# Of each host; every pair of hosts has a network of its own, so the same addresses serve all.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"


class TwoHosts:
    """Context manager; on exit, every process on the hosts is killed and the hosts are removed.

    Processes on host 0 and 1 see the host names ``names[0]`` and ``names[1]``, which resolve to ``ADDRESSES``, one
    interface ``INTERFACE`` beside loopback, and the machine's own file system.
    """

    def __init__(self) -> None:
        self.names = tuple(f"host{host}-{os.getpid()}" for host in range(2))

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                self._write_hosts_file(name)
            first, second = self.names
            _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def popen(
        self, host: int, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a host; ``options`` are those of :class:`subprocess.Popen`.

        The environment is ours, with ``env`` on top and what gloo and NCCL need to find the host's interface.
        """
        # `ip netns exec` gives the network and /etc/hosts, `unshare --uts` a host name of its own.
        on_host = ["ip", "netns", "exec", self.names[host], "unshare", "--uts"]
        named = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', self.names[host]]
        interface = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
        return subprocess.Popen(
            [*on_host, *named, *map(str, command)],
            env={**os.environ, **interface, **(env or {})},
            text=True,
            **options,
        )

    def cut(self, host: int) -> None:
        """Pull the host's cable: packets in both directions are lost, without a word to anyone's connections."""
        _ip("-n", self.names[host], "link", "set", INTERFACE, "down")

    def restore(self, host: int) -> None:
        """Plug the cable in again."""
        _ip("-n", self.names[host], "link", "set", INTERFACE, "up")

    def kill(self, host: int) -> None:
        """End all processes of the host at once, as a power failure does."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _write_hosts_file(self, name: str) -> None:
        # `ip netns exec` shows it to the host's processes as /etc/hosts.
        folder = _etc(name)
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, self.names, strict=True))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _remove(self) -> None:
        for host, name in enumerate(self.names):
            self.kill(host)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(_etc(name), ignore_errors=True)


def _etc(name: str) -> Path:
    return Path("/etc/netns") / name


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _obstacle() -> str:
    """Why this machine cannot have two hosts; empty if it can."""
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no command {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with TwoHosts() as hosts:
            return "" if hosts.popen(0, ["true"]).wait() == 0 else "no commands in a network namespace"
    except (RuntimeError, OSError) as error:
        return str(error)


_found = _obstacle()
needs_two_hosts = pytest.mark.skipif(bool(_found), reason=_found)
