"""Facts about the network of a host: its interfaces, which of them ranks talk over, InfiniBand and RoCE adapters."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dlrm_fused.doctor.facts import Interface, Network, RdmaPort

_ADAPTERS = Path("/sys/class/infiniband")
_PEERMEM = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
_NAMESPACE = Path("/proc/self/ns/net")
_SETTINGS = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
)


def network_of_host() -> Network:
    interfaces = list_interfaces()
    settings = {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    return Network(
        interfaces=interfaces,
        settings=settings,
        uses={
            "gloo": gloo_uses(settings.get("GLOO_SOCKET_IFNAME"), interfaces, _address_of_host_name()),
            "nccl": nccl_uses(settings.get("NCCL_SOCKET_IFNAME"), interfaces),
        },
        rdma=list_rdma_ports(_ADAPTERS),
        peermem=any(module.exists() for module in _PEERMEM),
        namespace=_NAMESPACE.readlink().name if _NAMESPACE.is_symlink() else None,
    )


def list_interfaces() -> list[Interface]:
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return [
        Interface(
            name=name,
            addresses=[a.address.split("%")[0] for a in found if a.family in (socket.AF_INET, socket.AF_INET6)],
            is_up=name in states and states[name].isup,
            is_loopback=name in states and "loopback" in states[name].flags,
            megabits=states[name].speed if name in states else 0,
        )
        for name, found in addresses.items()
    ]


def gloo_uses(setting: str | None, interfaces: Sequence[Interface], host_address: str) -> list[str]:
    """Interfaces that gloo connects ranks over: those that GLOO_SOCKET_IFNAME lists, else the one of the host's name."""
    if setting is not None:
        there = {interface.name for interface in interfaces}
        return [name for name in setting.split(",") if name in there]
    # Debian gives a host's name the address 127.0.1.1, which no interface lists.
    is_loopback = host_address.startswith("127.")
    return [i.name for i in interfaces if host_address in i.addresses or (is_loopback and i.is_loopback)]


def nccl_uses(setting: str | None, interfaces: Sequence[Interface]) -> list[str]:
    """Interfaces that NCCL connects ranks over, by the rules of NCCL_SOCKET_IFNAME.

    A list of prefixes; ``=`` before it asks for whole names, ``^`` for all but these. Without the setting: names that begin
    with ib, else those that are neither docker nor loopback, else any.

    Source: NCCL's user guide, environment variables.
    """
    usable = [interface for interface in interfaces if interface.is_up and interface.addresses]
    if setting is None:
        candidates = [
            [i for i in usable if i.name.startswith("ib")],
            [i for i in usable if not i.is_loopback and not i.name.startswith(("docker", "virbr"))],
            usable,
        ]
        return [interface.name for interface in next((found for found in candidates if found), [])]
    given = setting.lstrip("^=")
    is_exact, is_excluded = "=" in setting[:2], setting.startswith("^")

    def is_named(name: str) -> bool:
        return any(name == part if is_exact else name.startswith(part) for part in given.split(","))

    return [interface.name for interface in usable if is_named(interface.name) != is_excluded]


def _address_of_host_name() -> str:
    """Return the address gloo takes without a setting: the first of the host's name that can be bound, else loopback."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0]).split("%")[0]
    return "127.0.0.1"


def list_rdma_ports(folder: Path) -> list[RdmaPort]:
    """Ports of InfiniBand and RoCE adapters; none where the kernel knows of no such adapter."""
    return [
        RdmaPort(
            adapter=port.parent.parent.name,
            port=port.name,
            link_layer=_line(port / "link_layer"),
            state=re.sub(r"^\d+: ", "", _line(port / "state")),
            rate=_line(port / "rate"),
        )
        for port in sorted(folder.glob("*/ports/*"))
    ]


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
