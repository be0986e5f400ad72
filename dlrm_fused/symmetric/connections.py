"""TCP connections of this process, whoever has made them."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

import psutil


def interface_addresses() -> frozenset[str]:
    """The IP addresses of all interfaces of this host."""
    return frozenset(
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    )


def ipv4_addresses() -> dict[str, list[str]]:
    """By interface that is up: its IPv4 addresses."""
    states = psutil.net_if_stats()
    return {
        name: [address.address for address in addresses if address.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


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
