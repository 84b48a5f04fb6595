"""A work-around: zenoh closes TCP sockets with a linger time of ten seconds, on a thread that serves other links too.

When a machine vanishes with unsent bytes, close(2) sits in that time and the links between healthy machines stand
still with it. Links need no lingering, so it is switched off as soon as one is up.
"""

from __future__ import annotations

import os
import socket
import struct

_LINGER = struct.Struct("ii")
_FOLDERS = ("/proc/self/fd", "/dev/fd")


def switch_linger_off() -> int:
    """Switch SO_LINGER off on this process's TCP sockets. Those set to abort at once (time 0) are left as they are.

    Returns:
        How many were changed.
    """
    folder = next((folder for folder in _FOLDERS if os.path.isdir(folder)), None)
    if folder is None:
        return 0
    return sum(_off(int(name)) for name in os.listdir(folder) if name.isdecimal())


def _off(descriptor: int) -> bool:
    try:
        # On a duplicate, as the descriptor belongs to somebody else who may close it meanwhile.
        copy = os.dup(descriptor)
    except OSError:
        return False
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with held:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return False
        try:
            on, seconds = _LINGER.unpack(held.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size))
            if on and seconds:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(0, 0))
                return True
        except OSError:
            return False
    return False
