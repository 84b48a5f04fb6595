"""A prefill node with a vLLM of its own: vLLM has one connector a process.

`python -m tests.engines.vllm.node FOLDER OPTIONS` prints the address of its KV port, and works until its input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tandem.engines.base import EngineOptions
from tandem.engines.registry import build_engine
from tandem.kv.server import PrefillServer

DEADLINE = 120.0


class Node:
    """Such a node in a process of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        command = [sys.executable, "-m", __name__, str(folder), json.dumps(options)]
        paths = json.dumps([str(path) for path in sys.path])
        starter = f"import sys, runpy; sys.path[:] = {paths}; sys.argv[:] = {command[2:]!r}; "
        starter += f"runpy.run_module({__name__!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        timer = threading.Timer(DEADLINE, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        found = next((line for line in lines if line.startswith("address ")), "")
        timer.cancel()
        assert found, "the node did not start"
        self.address = found.split()[1]

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=DEADLINE)


def main() -> None:
    """The node itself."""
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    changed, closing = threading.Event(), threading.Event()
    engine = build_engine(EngineOptions(engine="vllm", model_id="test", path=folder, **options))
    engine.wake = changed.set  # type: ignore[method-assign]
    engine.load(lambda progress: None)
    engine.warm_up()
    plane = engine.kv_plane()
    assert plane is not None

    def read() -> None:
        sys.stdin.read()
        closing.set()
        changed.set()

    with PrefillServer(plane.producer, plane.layout, plane.fingerprint, checkpoints=plane.checkpoints) as port:
        print(f"address 127.0.0.1:{port.address[1]}", flush=True)
        threading.Thread(target=read, daemon=True).start()
        while not closing.is_set():
            if engine.has_work:
                engine.step()
            else:
                changed.wait()
                changed.clear()
    engine.close()


if __name__ == "__main__":
    main()
