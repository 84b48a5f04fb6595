"""Real `tandem up` processes on machines of `tests.cluster.netns`, their HTTP surfaces and their doors."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import tandem
from tandem.cluster.identity import node_id
from tests.cluster.netns import TOOL_PATH, Machine

PROGRAM = Path(__file__).with_name("up_program.py")
SECRET = "a secret of the test's own"
START_SECONDS = 120.0
"""Of a machine that does much else, too."""
API_PORT = 8000


class Refused(Exception):
    """A node's answer was an error; `code` is its class."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class UpNode:
    """One machine's `tandem up`. It can be killed and started again with the same data folder, and so the same id."""

    def __init__(self, machine: Machine, folder: Path, settings: dict[str, str]) -> None:
        self.machine = machine
        self.name = machine.name
        self.home = folder / machine.name
        self.id = node_id(self.home)
        self.settings = settings
        self._door = folder / f"{machine.name}.door"
        self._log = folder / f"{machine.name}.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, clock: float = 0.0) -> None:
        """Start it; returns at once."""
        self._door.unlink(missing_ok=True)
        command = [*self.machine.prefix, sys.executable, str(PROGRAM), "up", "--json", "--port", str(API_PORT)]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *(arguments or ("--no-models",))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment | {"TANDEM_TEST_CLOCK": str(clock)},
                start_new_session=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of this node."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "HF_"))}
        values = {
            "TANDEM_HOME": str(self.home),
            "TANDEM_NODE_NAME": self.name,
            "TANDEM_CLUSTER_SECRET": SECRET,
            "TANDEM_CLUSTER_NAME": "machines",
            "TANDEM_TEST_DOOR": str(self._door),
            "PATH": TOOL_PATH,
            "PYTHONPATH": str(Path(tandem.__file__).parents[1]),
        }
        return kept | values | self.settings

    def command(self, *arguments: str, deadline: float) -> subprocess.CompletedProcess[str]:
        """What comes of `tandem` with these arguments, on this machine, beside the node."""
        return subprocess.run(
            [*self.machine.prefix, sys.executable, "-m", "tandem.cli", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline,
            env=self.environment,
            check=False,
        )

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> UpNode:
        """Wait until it says that it serves."""
        assert self._process is not None
        assert self._process.stdout is not None
        process, out, seen = self._process, self._process.stdout, threading.Event()

        def read() -> None:
            for line in out:
                if json.loads(line)["event"] == "ready":
                    seen.set()
            seen.set()

        threading.Thread(target=read, daemon=True).start()
        assert seen.wait(START_SECONDS), self.story()
        assert process.poll() is None, self.story()
        return self

    def kill(self) -> float:
        """End its process without a word; returns when. Its runners end by themselves."""
        assert self._process is not None
        at = time.monotonic()
        self._process.kill()
        self._process.wait(timeout=15)
        self._hang_up()
        return at

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; returns when."""
        assert self._process is not None
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    def stop(self) -> None:
        """Have it leave in order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)
        self._hang_up()

    def ask(self, do: str, *, within: float = 30.0, **values: Any) -> Any:
        """What comes of a question to its door."""
        return self.asked(do, within=within, **values)["answer"]

    def asked(self, do: str, *, within: float = 30.0, **values: Any) -> dict[str, Any]:
        """The same with the moment, `at`.

        Raises:
            Refused: the node said no, or had no answer in time.
        """
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(within + 10)
            line.connect(str(self._door))
            line.sendall(json.dumps({"do": do, **values}).encode() + b"\n")
            with line.makefile() as file:
                text = file.readline()
        if not text:
            raise Refused("gone", f"{self.name} died while it was asked to {do}")
        reply: dict[str, Any] = json.loads(text)
        if "error" in reply:
            raise Refused(reply["error"], reply["message"])
        return reply

    def chat(self, model: str, *, stream: bool = False, tokens: int = 4, deadline: float = 30.0) -> Answer:
        """Begin a chat completion over HTTP."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hello"}],
            "stream": stream,
            "max_tokens": tokens,
        }
        return self.request("POST", "/v1/chat/completions", body, deadline)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, deadline: float = 30.0) -> Answer:
        """Send a request to its HTTP surface."""
        connection = http.client.HTTPConnection("node", timeout=deadline)
        connection.sock = self.machine.connect(API_PORT, deadline)
        headers = {"Content-Type": "application/json", "Host": f"127.0.0.1:{API_PORT}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return Answer(connection)

    def story(self) -> str:
        """The end of its log, for a failed test."""
        return f"{self.name}: " + self._log.read_text()[-3000:]

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(timeout=15)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._hang_up()

    def _hang_up(self) -> None:
        self._door.unlink(missing_ok=True)


class Answer:
    """One HTTP answer."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """Its head; waits for it."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def whole(self) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        with contextlib.closing(self._connection):
            return self.response.status, json.loads(self.response.read())

    def events(self) -> Iterator[dict[str, Any]]:
        """What a stream says, up to `[DONE]` or its end."""
        with contextlib.closing(self._connection):
            for line in self.response:
                text = line.decode().strip()
                if text.startswith("data:") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data:"))


class UpNodes:
    """All nodes of a test. A context manager, which leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[UpNode] = []

    def node(self, machine: Machine, **settings: str) -> UpNode:
        """A node that is not started yet."""
        node = UpNode(machine, self.folder, settings)
        self.all.append(node)
        return node

    def __enter__(self) -> UpNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.all:
            node.end()


def meet(nodes: list[UpNode], deadline: float = 20.0) -> float:
    """Wait until each sees exactly these; when the last one did."""
    return each(nodes, "wait_nodes", nodes=[node.id for node in nodes], deadline=deadline)


def each(nodes: list[UpNode], do: str, /, *, deadline: float, **values: Any) -> float:
    """Ask all of them the same at once; the last one's answer, a time."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        asked = [pool.submit(node.ask, do, within=deadline, deadline=deadline, **values) for node in nodes]
        return float(max(one.result() for one in asked))
