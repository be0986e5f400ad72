"""Clients that mean harm, in a process of their own: some stay connected and ask nothing, others send headers without end.

``python -m tests.inference.hostile PORT IDLE ENDLESS`` goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from contextlib import suppress

_AGAIN_SECONDS = 5.0  # after a connection has been closed
_CHUNK = b"a" * 2**16


async def stay(port: int) -> None:
    """Begin a request, and never end it."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\n")
            await reader.read()
            writer.close()
        await asyncio.sleep(_AGAIN_SECONDS)


async def send_headers(port: int) -> None:
    """Send one header that does not end."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nx: ")
            while True:
                writer.write(_CHUNK)
                await writer.drain()


async def main(port: int, idle: int, endless: int) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    await asyncio.gather(*(stay(port) for _ in range(idle)), *(send_headers(port) for _ in range(endless)))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
