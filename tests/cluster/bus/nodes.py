"""Nodes as subprocesses, on this machine or on one of `tests.cluster.netns`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import tandem
from tandem.cluster.bus.config import free_port
from tests.cluster.netns import TOOL_PATH, Machine

PROGRAM = Path(__file__).with_name("program.py")
SECRET = "a secret of the test's own"
Line = dict[str, Any]


class NodeProcess:
    """One node; everything that it has written can be waited for."""

    def __init__(self, name: str, machine: Machine | None, options: dict[str, Any], folder: Path) -> None:
        self.name = name
        self.life = uuid.uuid4().hex[:8]
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        port = options.pop("port", None) or free_port("quic")
        values = {"node_id": name, "life": self.life, "port": port, "secret": SECRET, **options}
        command = [*(machine.prefix if machine else ()), sys.executable, str(PROGRAM), json.dumps(values)]
        paths = [str(Path(tandem.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.errors = folder / f"{name}-{self.life}.log"
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, "PATH": TOOL_PATH, "PYTHONPATH": os.pathsep.join(paths)},
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._changed:
                self.lines.append(json.loads(text))
                self._changed.notify_all()
        with self._changed:
            self.lines.append({"event": "gone", "at": time.monotonic()})
            self._changed.notify_all()

    def wait(self, event: str, deadline: float = 10.0, *, after: float = 0.0, **values: Any) -> Line:
        """The first line of that kind with those values that was written after `after`."""

        def found() -> Line | None:
            for line in self.lines:
                if line["event"] == event and line["at"] >= after and values.items() <= line.items():
                    return line
            return None

        with self._changed:
            self._changed.wait_for(lambda: found() is not None, deadline)
            line = found()
        assert line is not None, f"{self.name}: no {event} {values} within {deadline} s\n{self.story()}"
        return line

    def wait_until(self, good: Callable[[list[Line]], bool], deadline: float) -> None:
        """Until the lines are as they should be."""
        with self._changed:
            assert self._changed.wait_for(lambda: good(self.lines), deadline), self.story()

    def seen(self, event: str, *, after: float = 0.0, **values: Any) -> list[Line]:
        """Such lines so far."""
        with self._changed:
            return [
                line
                for line in self.lines
                if line["event"] == event and line["at"] >= after and values.items() <= line.items()
            ]

    def story(self) -> str:
        """Everything that it wrote, for a failed test."""
        lines = [json.dumps(line) for line in self.lines if line["event"] != "report"][-40:]
        return "\n".join([*lines, self.errors.read_text()[-3000:]])

    def do(self, what: str, **values: Any) -> float:
        """Give a command; returns when."""
        assert self.process.stdin is not None
        now = time.monotonic()
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()
        return now

    def ask(self, node: str, topic: str, payload: str = "", deadline: float = 2.0, repeat: int = 1) -> Line:
        """Ask another node and wait for what comes of it."""
        now = self.do("ask", node=node, topic=topic, payload=payload, deadline=deadline, repeat=repeat)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._outcome(now)), deadline + 5)
            outcome = self._outcome(now)
        assert outcome, self.story()
        return outcome[0]

    def _outcome(self, after: float) -> list[Line]:
        return [line for line in self.lines if line["event"] in ("answer", "failed") and line["at"] >= after]

    def report(self) -> Line:
        """Its counters now."""
        return self.wait("report", after=self.do("report"))

    def signal(self, number: int) -> float:
        """Send a signal; returns when."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def quit(self) -> float:
        """Have it leave in order."""
        now = self.do("quit")
        self.process.wait(timeout=15)
        return now

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(timeout=15)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Nodes:
    """All nodes of a test, in one cluster of its own unless they say otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = f"test {uuid.uuid4()}"
        self.all: list[NodeProcess] = []

    def start(self, name: str, machine: Machine | None = None, **options: Any) -> NodeProcess:
        """A new node, which may not be ready yet."""
        options.setdefault("cluster_name", self.cluster)
        node = NodeProcess(name, machine, options, self.folder)
        self.all.append(node)
        return node

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.all:
            node.end()


def meet(nodes: Iterable[NodeProcess], deadline: float = 20.0) -> float:
    """Wait until all see all; returns the seconds from the last one's readiness."""
    every = list(nodes)
    ready = max(node.wait("ready", 20.0)["at"] for node in every)
    met = [
        node.wait("joined", deadline, node_id=other.name, life=other.life)["at"]
        for node in every
        for other in every
        if other is not node
    ]
    return float(max(met) - ready)
