"""The real command in real subprocesses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TANDEM = [str(Path(sys.executable).with_name("tandem"))]
UNUSED_PORT = "1"
"""Nobody listens there, and nobody but root could."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment without its own Tandem settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "HF_"))}
    cluster = {name: value for name, value in os.environ.items() if name.startswith("TANDEM_CLUSTER_")}
    return kept | cluster | {"TANDEM_HOME": str(home), "TANDEM_PORT": UNUSED_PORT, "COLUMNS": "200"} | more


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data folder of this test's own."""
    return tmp_path / "home"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tandem(home: Path) -> Run:
    """Runs `tandem` with the given arguments and returns what came of it."""

    def run(*arguments: str, input: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TANDEM, *arguments],
            env=environment(home, **more),
            input=input,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


class Up:
    """A running `tandem up --json`."""

    def __init__(self, home: Path, *arguments: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [*TANDEM, "up", "--json", "--port", "0", *arguments],
            env=environment(home, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.children: list[psutil.Process] = []

    def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind; those before it are skipped."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            seen.append(event)
            if event["event"] == kind:
                return event
        raise AssertionError(f"no {kind!r} in {seen}; {self.errors()}")

    def ready(self) -> dict[str, Any]:
        """Wait for the server and remember its runners."""
        event = self.event("ready")
        self.children = [psutil.Process(model["pid"]) for model in event["models"]]
        return event

    def errors(self) -> str:
        """Everything it wrote to standard error. It must have ended, or be about to."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def signal(self, number: signal.Signals) -> None:
        """As the terminal or an init system would."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(60)

    def runners_left(self) -> list[psutil.Process]:
        """Runners that are still there after they had time to notice."""
        return psutil.wait_procs(self.children, timeout=10)[1]

    def close(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for child in self.runners_left():
            child.kill()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def up(home: Path) -> Iterator[Callable[..., Up]]:
    """Starts `tandem up` with the given models and flags."""
    started: list[Up] = []

    def start(*arguments: str, **more: str) -> Up:
        started.append(Up(home, *arguments, **more))
        return started[-1]

    yield start
    for server in started:
        server.close()
