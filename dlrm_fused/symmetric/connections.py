"""TCP connections of this process, whoever has made them."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from dlrm_fused.errors import CommunicationError

_CONNECT_SECONDS = 60.0
# Seconds after which an address that does not answer is given up; the next may answer.
_ADDRESS_SECONDS = 10.0
_STRANGER_SECONDS = 5.0
_TOKEN_BYTES = 16
_RANK = struct.Struct("!i")


@dataclass(frozen=True)
class Address:
    """The addresses at which a rank can be reached, and its identity.

    Attributes:
        addresses: of IPv4, the likeliest first.
        port: at which it awaits connections; 0 if it does not.
        token: a stranger that finds the port does not know it.
        interfaces: addresses of all interfaces, through which other libraries may connect.
    """

    host: str
    process: int
    addresses: tuple[str, ...] = ()
    port: int = 0
    token: bytes = b""
    interfaces: frozenset[str] = frozenset()

    @classmethod
    def of_this_process(cls, port: int = 0, token: bytes = b"") -> Address:
        addresses = _own_addresses() if port else ()
        return cls(socket.gethostname(), os.getpid(), addresses, port, token, interface_addresses())

    def describe(self, rank: int) -> str:
        """Return the peer's name, such as ``rank 3 on host (pid 123)``."""
        return f"rank {rank} on {self.host} (pid {self.process})"


def connect_ranks(
    rank: int, peers: Collection[int], gather: Callable[[Callable[[], Any]], list[Any]]
) -> tuple[list[Address], dict[int, socket.socket]]:
    """Connect this rank with others by TCP. Collective; peers are so mutually.

    Args:
        gather: as :meth:`~dlrm_fused.symmetric.memory.SymmetricGroup.gather`.

    Returns:
        The addresses of all ranks, and the connections to the peers.

    Raises:
        CommunicationError: on all ranks, if two of them cannot connect.
    """
    with socket.create_server(("", 0), backlog=max(1, len(peers))) as listener:
        token, port = secrets.token_bytes(_TOKEN_BYTES), listener.getsockname()[1]
        addresses = gather(lambda: Address.of_this_process(port, token))
        connections: dict[int, socket.socket] = {}
        try:
            gather(lambda: _connect(rank, peers, addresses, listener, connections))
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
    return addresses, connections


def _connect(
    rank: int,
    peers: Collection[int],
    addresses: Sequence[Address],
    listener: socket.socket,
    connections: dict[int, socket.socket],
) -> None:
    """Connect to every lower peer, and be connected to by every higher one."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    for peer in sorted(peers):
        if peer < rank:
            connections[peer] = _connect_to(rank, peer, addresses, deadline)
            connections[peer].sendall(addresses[peer].token + _RANK.pack(rank))
    while missing := set(peers) - connections.keys():
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            listed = ", ".join(addresses[peer].describe(peer) for peer in sorted(missing))
            raise CommunicationError(
                f"{addresses[rank].describe(rank)}: no connection from {listed} within {_CONNECT_SECONDS:.0f} s"
            ) from None
        introduced = _introduced(connection, addresses[rank].token)
        if introduced is None:
            connection.close()
        else:
            connections[introduced] = connection


def _connect_to(rank: int, peer: int, addresses: Sequence[Address], deadline: float) -> socket.socket:
    own, target = addresses[rank], addresses[peer]
    failures = []
    for address in (*(("127.0.0.1",) if target.host == own.host else ()), *target.addresses):
        seconds = min(_ADDRESS_SECONDS, max(0.001, deadline - time.monotonic()))
        try:
            return socket.create_connection((address, target.port), timeout=seconds)
        except OSError as error:
            failures.append(f"{address}: {error}")
    raise CommunicationError(
        f"{own.describe(rank)} cannot connect to {target.describe(peer)} ({'; '.join(failures)}); "
        "ranks must reach each other by TCP, on any port"
    )


def _introduced(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank that has connected; None if it is a stranger."""
    connection.settimeout(_STRANGER_SECONDS)
    received = b""
    try:
        while len(received) < _TOKEN_BYTES + _RANK.size:
            chunk = connection.recv(_TOKEN_BYTES + _RANK.size - len(received))
            if not chunk:
                return None
            received += chunk
    except OSError:
        return None
    if not secrets.compare_digest(received[:_TOKEN_BYTES], token):
        return None
    (rank,) = _RANK.unpack(received[_TOKEN_BYTES:])
    return int(rank)


def _own_addresses() -> tuple[str, ...]:
    """Addresses at which other hosts may reach this one, the likeliest first."""
    of_interfaces = _ipv4_addresses()
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    found = [address for interface in named for address in of_interfaces.get(interface, ())]
    # The interface on which this host reaches rank 0's.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        found.append(probe.getsockname()[0])
    # On rank 0's host that may be loopback, as may be what the host's name stands for.
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    found += [address for addresses in of_interfaces.values() for address in addresses]
    return tuple(dict.fromkeys(address for address in found if not address.startswith("127.")))


def _ipv4_addresses() -> Mapping[str, list[str]]:
    """Return the IPv4 addresses of each interface that is up."""
    states = psutil.net_if_stats()
    return {
        name: [address.address for address in addresses if address.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def interface_addresses() -> frozenset[str]:
    """Return the IP addresses of all interfaces of this host."""
    return frozenset(
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    )


def hang_up(addresses: Collection[str]) -> None:
    """End all connections to these addresses: who waits on one gets an error.

    A connection to a host that has vanished stays open until TCP gives up, after a quarter of an hour, or never if nothing is
    sent on it; and gloo waits as long, since it has no keepalive, and nothing else ends its waits.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        # OSError: it is closed by now, or no connection. A copy cannot become another one's while we look.
        with suppress(OSError):
            copy = os.dup(int(descriptor))
            try:
                with socket.socket(fileno=copy) as connection:
                    copy = -1
                    peer = connection.getpeername()
                    if isinstance(peer, tuple) and peer[0].removeprefix("::ffff:").partition("%")[0] in addresses:
                        connection.shutdown(socket.SHUT_RDWR)
            finally:
                if copy >= 0:
                    os.close(copy)
