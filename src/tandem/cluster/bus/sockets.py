"""Work-arounds for sockets that zenoh leaves in a bad state. Both walk this process's own descriptors.

Lingering: zenoh closes TCP sockets with a linger time of ten seconds, on a thread that serves other links too. When a
machine vanishes with unsent bytes, close(2) sits in that time and the links between healthy machines stand still with
it. Links need no lingering, so it is switched off as soon as one is up.

Left listeners: a session that is closed while QUIC connections break or begin, as right after sleep, may leave its
listening socket open for as long as the process lives, and the port cannot be listened on again.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

_LINGER = struct.Struct("ii")
_FOLDERS = ("/proc/self/fd", "/dev/fd")


def switch_linger_off() -> int:
    """Switch SO_LINGER off on this process's TCP sockets. Those set to abort at once (time 0) are left as they are.

    Returns:
        How many were changed.
    """
    changed = 0
    for _, held in _sockets(socket.SOCK_STREAM):
        on, seconds = _LINGER.unpack(held.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size))
        if on and seconds:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(0, 0))
            changed += 1
    return changed


def release_udp_port(port: int) -> int:
    """Take `port` from this process's UDP sockets that are bound to it and connected to nobody.

    Only for a port whose owner is closed. The descriptors stay, with sockets behind them that are bound to nothing, as
    whoever forgot them may still close them.

    Returns:
        How many sockets had it.
    """
    taken = 0
    for descriptor, held in _sockets(socket.SOCK_DGRAM):
        if held.getsockname()[1] == port:
            with socket.socket(held.family, socket.SOCK_DGRAM) as empty:
                os.dup2(empty.fileno(), descriptor, inheritable=False)
            taken += 1
    return taken


def _sockets(kind: socket.SocketKind) -> Iterator[tuple[int, socket.socket]]:
    """Descriptors of internet sockets of a kind, each with a duplicate, as the original's owner may close it."""
    folder = next((folder for folder in _FOLDERS if os.path.isdir(folder)), None)
    for name in os.listdir(folder) if folder is not None else ():
        try:
            copy = os.dup(int(name))
        except (OSError, ValueError):
            continue
        try:
            held = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with held:
            if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == kind:
                yield int(name), held
