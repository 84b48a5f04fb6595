"""A real `tandem up` in a process of its own, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

_TANDEM = Path(sys.executable).with_name("tandem")


class Server:
    """A running `tandem up --json`; the constructor returns when it answers.

    Args:
        home: its data folder.
        models: what to serve.
        variables: further environment variables, such as `TANDEM_API_KEY`.

    Attributes:
        may_complain: what it writes to standard error is no fault: the test provokes it.
    """

    def __init__(self, home: Path, *models: str, **variables: str) -> None:
        cluster = {name: value for name, value in os.environ.items() if name.startswith("TANDEM_CLUSTER_")}
        kept = cluster | {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "HF_"))}
        self.may_complain = False
        self._log = home.with_name(home.name + ".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [_TANDEM, "up", "--json", "--port", "0", *models],
                env=kept | {"TANDEM_HOME": str(home), "TANDEM_OFFLINE": "1"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._runners: list[psutil.Process] = []
        self.api_key = variables.get("TANDEM_API_KEY", "unused")
        try:
            self.url: str = self._ready()["url"]
        except BaseException:
            self.close()
            raise

    @property
    def v1(self) -> str:
        """What clients of OpenAI's API take for a base URL."""
        return self.url + "/v1"

    def _ready(self) -> dict[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._runners = [psutil.Process(model["pid"]) for model in event["models"]]
                return dict(event)
        raise AssertionError(f"`tandem up` ended with status {self._process.wait()}: {self.log()}")

    def log(self) -> str:
        """Everything it wrote to standard error so far."""
        return self._log.read_text()

    def busy(self, model: str) -> int:
        """Requests for `model` that are in its engine: waiting, reading or answering."""
        text = httpx.get(self.url + "/metrics", headers={"Authorization": f"Bearer {self.api_key}"}, timeout=30).text
        gauges = ("tandem_requests_waiting{", "tandem_requests_prefilling{", "tandem_requests_decoding{")
        lines = [line for line in text.splitlines() if line.startswith(gauges) and f'model="{model}"' in line]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Ask until `condition` holds: what happens in another process can only be asked for."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} seconds; log: {self.log()}"
            time.sleep(0.02)

    def wait_busy(self, model: str) -> None:
        """Return when the engine says that it works on something. What it says lags behind a little."""
        self.wait_until(lambda: self.busy(model) > 0)

    def wait_idle(self, model: str) -> None:
        """Return when the engine has nothing left to do. Call `wait_busy` before what should make it idle."""
        self.wait_until(lambda: self.busy(model) == 0)

    def close(self) -> None:
        """End it, and fail if it complained of anything."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for runner in psutil.wait_procs(self._runners, timeout=10)[1]:
                runner.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
        assert self.may_complain or not self.log(), self.log()
