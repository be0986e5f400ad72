"""Connections to a host that has vanished are ended, others are left alone."""

from __future__ import annotations

import socket

import pytest

from dlrm_fused.symmetric.connections import hang_up, interface_addresses


@pytest.mark.parametrize(("family", "prefix"), [(socket.AF_INET, ""), (socket.AF_INET6, "::ffff:")])
def test_only_connections_to_the_given_addresses_are_ended(family: socket.AddressFamily, prefix: str) -> None:
    with (
        socket.create_server(("127.0.0.2", 0)) as vanished,
        socket.create_server(("127.0.0.3", 0)) as other,
        socket.socket(family) as to_vanished,
        socket.socket(family) as to_other,
    ):
        for connection, server in ((to_vanished, vanished), (to_other, other)):
            address, port = server.getsockname()
            connection.connect((prefix + address, port))
            connection.settimeout(0.1)
        hang_up({"127.0.0.2"})
        assert to_vanished.recv(1) == b""
        with pytest.raises(TimeoutError):
            to_other.recv(1)


def test_the_addresses_of_this_host_are_those_that_a_server_can_have() -> None:
    assert "127.0.0.1" in interface_addresses()
    for address in interface_addresses():
        if ":" not in address:
            with socket.create_server((address, 0)):
                pass
