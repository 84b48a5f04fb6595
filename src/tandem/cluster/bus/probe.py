"""Whether an endpoint answers, asked before a session is opened anew for its sake."""

from __future__ import annotations

import asyncio
import secrets

# A long header with a version that is reserved for making a server say which ones it knows: RFC 9000, 6.3 and 17.2.1.
_VERSION = b"\x1a\x2a\x3a\x4a"
_SMALLEST = 1200
"""Servers ignore shorter first datagrams: RFC 9000, 14.1."""


async def answers(endpoint: str, *, deadline: float) -> bool:
    """Whether something listens at `scheme/host:port`. `deadline` in seconds."""
    scheme, _, address = endpoint.partition("/")
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(deadline):
            if scheme == "tcp":
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return True
            return await _quic(host, int(port))
    except (OSError, ValueError):  # TimeoutError is an OSError
        return False


class _Answer(asyncio.DatagramProtocol):
    def __init__(self, arrived: asyncio.Future[bool]) -> None:
        self._arrived = arrived

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self._arrived.done():
            self._arrived.set_result(True)

    def error_received(self, exc: Exception) -> None:
        if not self._arrived.done():
            self._arrived.set_result(False)


async def _quic(host: str, port: int) -> bool:
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[bool] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Answer(arrived), remote_addr=(host, port))
    try:
        ids = b"".join(bytes([8]) + secrets.token_bytes(8) for _ in range(2))
        transport.sendto((b"\xc0" + _VERSION + ids).ljust(_SMALLEST, b"\0"))
        return await arrived
    finally:
        transport.close()
