"""Reads that hang keep nobody waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from tandem.cluster.facts.blocking import BlockingRead, run_tool
from tests.cluster.facts.conftest import join_readers

pytestmark = pytest.mark.anyio
DEADLINE = 20.0


async def test_a_read_that_hangs_is_given_up_and_not_repeated() -> None:
    release, calls = threading.Event(), list[int]()

    def hang() -> int:
        calls.append(1)
        release.wait(DEADLINE)
        return len(calls)

    read = BlockingRead(hang, 0.05)
    assert await read() is None
    for _ in range(3):
        assert await read() is None
    assert len(calls) == 1, "one thread at most"
    release.set()
    join_readers()
    assert await BlockingRead(hang, DEADLINE)() == 2
    read_again = await read()
    assert read_again in (3, None), "it may be slow, but is asked"
    assert len(calls) == 3


async def test_the_loop_goes_on_meanwhile() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await BlockingRead(lambda: time.sleep(0.2) or 5, 5.0)() == 5
    ticking.cancel()
    assert ticks > 10


async def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise OSError("gone")

    read = BlockingRead(fail, 5.0)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await read()


def test_a_hanging_read_does_not_hold_up_the_exit() -> None:
    script = (
        "import asyncio, threading\n"
        "from tandem.cluster.facts.blocking import BlockingRead\n"
        "print(asyncio.run(BlockingRead(threading.Event().wait, 0.05)()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('hello')", "hello\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("print('partial'); raise SystemExit(3)", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
    ],
)
def test_tools(script: str, expected: str | None) -> None:
    assert run_tool((sys.executable, "-c", script), DEADLINE) == expected


def test_no_such_tool() -> None:
    assert run_tool(("/no/such/tool",), DEADLINE) is None


def test_a_tool_that_hangs_is_ended_with_its_children() -> None:
    # The child keeps the pipe: waiting for its end would take a minute.
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    assert run_tool((sys.executable, "-c", script), 0.5) is None
    assert time.monotonic() - began < 10
