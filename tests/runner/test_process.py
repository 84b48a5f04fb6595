"""The runner subprocess on its own, seen from the other end of its socket."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tandem.engines.base import EngineOptions
from tandem.runner.messages import HEADER, FromRunner, Loaded, Ready, Start, frame, from_runner_decoder

DEADLINE = 30


def spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE)
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem.runner.process", "--fd", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    return process, ours


def receive(channel: socket.socket) -> FromRunner:
    stream = channel.makefile("rb", buffering=0)

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = stream.read(count - len(data))
            assert more, "the runner closed its end"
            data += more
        return data

    (length,) = HEADER.unpack(exactly(HEADER.size))
    return from_runner_decoder.decode(exactly(length))


def test_it_dies_with_its_server() -> None:
    process, channel = spawn()
    channel.sendall(frame(Start(EngineOptions(engine="sim", model_id="sim"))))
    while not isinstance(receive(channel), Ready):
        pass
    channel.close()
    assert process.wait(DEADLINE) == 3


def test_it_dies_with_its_server_before_anything_was_said() -> None:
    process, channel = spawn()
    channel.close()
    assert process.wait(DEADLINE) == 2


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1", b"\xff\xff\xff\xff"])
def test_garbage_ends_it(garbage: bytes) -> None:
    process, channel = spawn()
    channel.sendall(frame(Start(EngineOptions(engine="sim", model_id="sim"))))
    while not isinstance(receive(channel), Loaded):
        pass
    while not isinstance(receive(channel), Ready):
        pass
    channel.sendall(garbage)
    assert process.wait(DEADLINE) == 4
    channel.close()
