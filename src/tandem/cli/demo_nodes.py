"""Nodes of a demonstration: `tandem up` in processes of their own, with folders and a cluster of their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tandem.cli.progress import Step, View
from tandem.cluster.bus.config import free_port
from tandem.errors import DeadlineError, EngineError
from tandem.models.store import LocalModel

SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_SECONDS = 300.0
"""From the start of both processes until both answer. A busy machine with a slow disk needs one of them."""
STOP_SECONDS = 5.0
"""How long a node may take to stop in order; its answers get less."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A node that answers.

    Attributes:
        port: of its HTTP server.
        instance_id, model_id: of the one instance that it runs.
    """

    name: str
    url: str
    port: int
    instance_id: str
    model_id: str


class DemoNode:
    """One `tandem up`.

    Args:
        folder: for its data and its log.
        environment: all of its settings but the data folder.
        events: gets what it announces, and None when it has ended.
    """

    def __init__(
        self, name: str, folder: Path, reference: str, environment: dict[str, str], events: queue.SimpleQueue[News]
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._events = events
        command = [sys.executable, "-m", "tandem.cli", "up", reference, "--host", "127.0.0.1", "--port", "0"]
        with self._log.open("wb") as log:
            # In a session of its own, so that every signal it gets is one that we sent: Ctrl-C in a terminal reaches
            # the demonstration alone, which stops its nodes in order.
            self.process = subprocess.Popen(
                [*command, "--name", name, "--json", "--until-eof"],
                env=environment | {"TANDEM_HOME": str(folder / name), "TANDEM_STOP_DEADLINE": str(STOP_SECONDS / 2)},
                # Its end closes with this process, even if that is killed: then the node ends by itself.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self._read, name=f"events of {name}", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._events.put((self, json.loads(line)))
        self._events.put((self, None))

    def ended(self) -> EngineError:
        """Why it ended before it was ready."""
        return EngineError(f"The node '{self.name}' ended before it was ready: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return said[-1].removeprefix("Error: ") if said else "it said nothing. Run `tandem doctor`."

    def ask_to_stop(self) -> None:
        """Have it stop in order."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """Wait until it has stopped; end it when that takes too long."""
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Runners end by themselves when the socket to their node closes.
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


News: TypeAlias = tuple[DemoNode, dict[str, Any] | None]
"""What a node announced; None when it has ended."""


@contextlib.contextmanager
def two_nodes(names: tuple[str, str], model: LocalModel | str) -> Iterator[queue.SimpleQueue[News]]:
    """Two nodes that know each other, each with one instance of `model`; both end with the context, in every case.

    Args:
        model: a local model, which both only read, or a reference to the simulated engine.

    Returns:
        What they announce.
    """
    events: queue.SimpleQueue[News] = queue.SimpleQueue()
    nodes: list[DemoNode] = []
    with tempfile.TemporaryDirectory(prefix="tandem-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        reference = model if isinstance(model, str) else _shared(folder, model)
        ports = free_port("tcp"), free_port("tcp")
        try:
            for own, node in enumerate(names):
                environment = _environment(folder, ports[own], f"127.0.0.1:{ports[1 - own]}")
                with _undisturbed():
                    nodes.append(DemoNode(node, folder, reference, environment, events))
            yield events
        finally:
            with _undisturbed():
                # All at the same time.
                for one in nodes:
                    one.ask_to_stop()
                for one in nodes:
                    one.stop()


def wait_ready(names: tuple[str, str], events: queue.SimpleQueue[News], view: View) -> tuple[Ready, Ready]:
    """Wait until both nodes answer, showing how far they are.

    Raises:
        EngineError: one of them ended; the message has its last words.
        DeadlineError: they are not ready in time.
    """
    ready: dict[str, Ready] = {}
    deadline = time.monotonic() + START_SECONDS
    while len(ready) < len(names):
        try:
            node, event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty as error:
            late = " and ".join(name for name in names if name not in ready)
            raise DeadlineError(f"Not ready in time: {late}. Try again when this machine is less busy.") from error
        if event is None:
            raise node.ended()
        kind = event.pop("event")
        if kind == "progress":
            view.show(Step(**event | {"model": f"{event['model']} on {node.name}"}))
        elif kind == "ready":
            ready[node.name] = _ready(node.name, event)
    return ready[names[0]], ready[names[1]]


def _ready(name: str, event: dict[str, Any]) -> Ready:
    (model,) = event["models"]
    return Ready(name, event["url"], int(event["url"].rpartition(":")[2]), model["instance_id"], model["id"])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C and requests to end wait until something short is done, so that no process is left behind."""
    waiting: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: waiting.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in waiting[:1]:
        signal.raise_signal(number)


def _shared(folder: Path, model: LocalModel) -> str:
    """Make the model's files known to both nodes, which only read them."""
    link = folder / "models" / model.model_id
    link.parent.mkdir(parents=True)
    link.symlink_to(model.path.absolute(), target_is_directory=True)
    return model.model_id


def _environment(folder: Path, port: int, peer: str) -> dict[str, str]:
    """This process's environment without its Tandem settings: a person's own cluster, keys and ports are none of the
    demonstration's business."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {
        "TANDEM_OFFLINE": "true",
        "TANDEM_MODELS_DIRS": str(folder / "models"),
        "TANDEM_CLUSTER_NAME": folder.name,
        "TANDEM_CLUSTER_PORT": str(port),
        "TANDEM_CLUSTER_PEERS": peer,
        # They know each other's address: no network card and no multicast is needed.
        "TANDEM_CLUSTER_DISCOVERY": "false",
        # The link that is shown is the one that is asked for.
        "TANDEM_AUTOMATIC_LINKS": "false",
    }
