"""Several hosts on one machine: network namespaces with their own names and addresses, on a switch with cables that can be cut.

Needs root, ``ip netns`` and ``tc`` (Debian's iproute2); :func:`obstacle` says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "eth0"
_BRIDGE = "bridge"
# A packet that TCP leaves to the interface to divide is up to 64 KiB; what is sent at once is no more at a low rate, and at a
# high one what goes out while a timer is late.
_LEAST_BURST_BYTES = 65_536
_BURST_SECONDS = 0.0002
_LONGEST_QUEUE_SECONDS = 0.05


class Hosts:
    """Context manager; on exit, every process on the hosts is killed and the hosts are removed.

    Processes on a host see the host names ``names``, which resolve to ``addresses``, one interface ``INTERFACE`` beside
    loopback, and the machine's own file system. A switch joins the hosts.
    """

    def __init__(self, count: int) -> None:
        self.names = tuple(f"host{host}-{os.getpid()}" for host in range(count))
        # All hosts have a switch of their own, so the same addresses serve any of them.
        self.addresses = tuple(f"10.77.0.{1 + host}" for host in range(count))
        self._switch = f"switch-{os.getpid()}"

    def __enter__(self) -> Hosts:
        try:
            self._add_switch()
            for host in range(len(self.names)):
                self._add_host(host)
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

    def shape(self, rate: float) -> None:
        """Let every host send at most ``rate`` bits/s, headers included; ``sent_bytes`` begins at 0 again."""
        burst = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
        limit = ["rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", f"{_LONGEST_QUEUE_SECONDS * 1e3:.0f}ms"]
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit)

    def sent_bytes(self, host: int) -> int:
        """Bytes of all frames that the host has sent, headers included, since the start or the last :meth:`shape`."""
        return _bytes_through(self.names[host], INTERFACE)

    def received_bytes(self, host: int) -> int:
        """Bytes of all frames that the switch has passed on to the host since the start, headers included."""
        return _bytes_through(self._switch, _port(host))

    def _add_switch(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", self._switch, "link", "set", _BRIDGE, "up")

    def _add_host(self, host: int) -> None:
        name, port = self.names[host], _port(host)
        _ip("netns", "add", name)
        self._write_hosts_file(name)
        _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        for namespace, interface in ((name, INTERFACE), (self._switch, port)):
            # Without a queue, which such an interface does not have by itself, nothing counts bytes.
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "pfifo")
        _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", self._switch, "link", "set", port, "master", _BRIDGE, "up")

    def _write_hosts_file(self, name: str) -> None:
        # `ip netns exec` shows it to the host's processes as /etc/hosts.
        folder = _etc(name)
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names, strict=True))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _remove(self) -> None:
        for host, name in enumerate(self.names):
            self.kill(host)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(_etc(name), ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self._switch], capture_output=True, check=False)


def obstacle() -> str:
    """Why this machine cannot have several hosts; empty if it can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no command {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(2) as hosts:
            return "" if hosts.popen(0, ["true"]).wait() == 0 else "no commands in a network namespace"
    except (RuntimeError, OSError) as error:
        return str(error)


def _port(host: int) -> str:
    return f"port{host}"


def _bytes_through(namespace: str, interface: str) -> int:
    # Not the interface's own count: it takes what TCP leaves undivided for one packet with one header.
    queues = json.loads(_run("tc", "-n", namespace, "-s", "-json", "qdisc", "show", "dev", interface))
    return int(queues[0]["bytes"])


def _etc(name: str) -> Path:
    return Path("/etc/netns") / name


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
