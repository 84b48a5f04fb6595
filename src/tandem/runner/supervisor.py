"""Keeps one runner subprocess alive and its requests honest.

Whatever happens to the process, every stream ends: with `Finished`, or with an error. A runner that dies is started
again with growing pauses; one that dies too often without ever becoming ready is given up, and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tandem.config import Settings
from tandem.engines.base import EngineOptions, LoadProgress, PrefillPort
from tandem.engines.installed import interpreter_of
from tandem.errors import InstanceNotReadyError, QueueFullError, RunnerDiedError, TandemError
from tandem.runner.launcher import RunnerProcess, launch
from tandem.runner.messages import (
    Broken,
    CacheIdentity,
    Cancel,
    FromRunner,
    Heartbeat,
    Loaded,
    Loading,
    NamePeers,
    Outputs,
    Ready,
    Start,
    Stop,
    Submit,
)
from tandem.runner.stream import Stream
from tandem.types import EngineLoad, GenerationRequest, ModelInfo

logger = logging.getLogger("tandem.supervisor")

RunnerState: TypeAlias = Literal["starting", "loading", "warming", "ready", "restarting", "failed", "stopped"]

BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_LAST_SECONDS = 10.0
HEARTBEAT_DEADLINE_SECONDS = 30.0
WATCH_SECONDS = 0.5
SOUND_SECONDS = 30.0
"""A runner that lived as long is sound: its death starts a new count."""


class Supervisor:
    """One instance's runner.

    Args:
        instance_id: names the log file.
        options: what the runner is told at each start.
        settings: deadlines and limits.
        on_change: called after every change of `state`.
    """

    def __init__(
        self, instance_id: str, options: EngineOptions, settings: Settings, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.instance_id = instance_id
        self.options = options
        self.state: RunnerState = "stopped"
        self.error: TandemError | None = None
        self.info: ModelInfo | None = None
        self.load: EngineLoad | None = None
        self.progress: LoadProgress | None = None
        self.restarts = 0
        self.kv_address: tuple[str, int] | None = None
        self.identity = CacheIdentity()
        self._settings = settings
        self._on_change = on_change
        self._runner: RunnerProcess | None = None
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._kill_reason: str | None = None
        self._moved = time.monotonic()
        self._beaten = time.monotonic()
        self._service_seconds = 1.0

    @property
    def pid(self) -> int | None:
        """Process id of the runner, if one runs."""
        return self._runner.pid if self._runner else None

    @property
    def log_file(self) -> Path:
        """Where the runner's standard error is kept."""
        return self._settings.logs_dir / f"{self.instance_id}.log"

    @property
    def running(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    def start(self) -> None:
        """Begin to run; returns at once. Watch `state`."""
        self._stopping.clear()
        self._set_state("starting")
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End the runner and every stream."""
        self._stopping.set()
        if self._runner is not None:
            self._runner.send(Stop())
            try:
                await asyncio.wait_for(self._runner.process.wait(), 2.0)
            except TimeoutError:
                self._runner.kill()
        if self._task is not None:
            await self._task
        self._fail_streams(RunnerDiedError("The instance was stopped while it worked on this request."))
        self._set_state("stopped")

    def submit(self, request: GenerationRequest) -> Stream:
        """Send a request to the runner.

        Raises:
            InstanceNotReadyError: the runner is not ready; the message says in which state it is.
            QueueFullError: `max_batch + max_queue` requests are in it already.
        """
        if self.state != "ready" or self._runner is None:
            raise self._not_ready()
        limit = self._settings.max_batch + self._settings.max_queue
        if len(self._streams) >= limit:
            waiting = len(self._streams) - self._settings.max_batch + 1
            raise QueueFullError(
                f"{len(self._streams)} requests are running or waiting for {self.options.model_id}; the limit is "
                f"{limit}. Try again later, or raise TANDEM_MAX_QUEUE.",
                retry_after=max(1.0, self._service_seconds * waiting / self._settings.max_batch),
            )
        request_id = f"{self.instance_id[:8]}-{next(self._ids)}"
        begun = time.monotonic()

        def closed(still_running: bool) -> None:
            del self._streams[request_id]
            self._on_change()
            if still_running and self._runner is not None:
                self._runner.send(Cancel(request_id))
            else:
                self._service_seconds += 0.1 * (time.monotonic() - begun - self._service_seconds)

        stream = Stream(request_id, closed)
        if not self._streams:
            self._moved = time.monotonic()
        self._streams[request_id] = stream
        self._runner.send(Submit(request_id, request))
        self._on_change()
        return stream

    def name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        """Replace the KV ports that may prefill for this instance, in this runner and in those to come."""
        self.options = msgspec.structs.replace(self.options, prefill_peers=peers)
        if self._runner is not None:
            self._runner.send(NamePeers(peers))

    def _not_ready(self) -> TandemError:
        name = self.options.model_id
        if self.state == "failed" and self.error is not None:
            return InstanceNotReadyError(f"{name} cannot be served: {self.error.message}")
        if self.state == "restarting":
            reason = f" ({self.error.message})" if self.error else ""
            return InstanceNotReadyError(f"The runner of {name} is being restarted{reason}.", retry_after=2.0)
        return InstanceNotReadyError(f"{name} is {self.state}; it will answer when it is ready.", retry_after=2.0)

    # ------------------------------------------------------------------------------------------------- supervision

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        except Exception as error:
            # Nobody waits for this task: what it cannot handle must end the streams all the same.
            logger.exception("the supervisor of %s failed", self.options.model_id)
            self.error = RunnerDiedError(f"The supervisor failed: {error}. Report this: it is our fault.")
            if self._runner is not None:
                self._runner.kill()
                self._runner = None
            self._fail_streams(self.error)
            self._set_state("failed")

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            was_ready = await self._run_once()
            if self._stopping.is_set():
                return
            lasted = was_ready and time.monotonic() - begun > SOUND_SECONDS
            failures = 0 if lasted else failures + 1
            if failures > self._settings.max_restarts or (not was_ready and not self._worth_retrying()):
                self._set_state("failed")
                return
            self.restarts += 1
            self._set_state("restarting")
            # A first death may be anything; one that repeats is given growing pauses.
            repeated = failures - 1 if was_ready else failures
            pause = min(BACKOFF_LAST_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** (repeated - 1)) if repeated > 0 else 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _worth_retrying(self) -> bool:
        return self.error is None or not self.error.permanent

    async def _run_once(self) -> bool:
        """One life of a runner. Returns whether it ever became ready."""
        was_ready = False
        self._kill_reason = None
        failure: TandemError | None = None
        try:
            runner = await launch(self.log_file, interpreter_of(self.options.engine, self._settings.home))
        except OSError as error:
            self.error = RunnerDiedError(f"The runner process could not be started: {error}")
            return False
        if self._stopping.is_set():
            runner.kill()
            await runner.wait()
            return False
        self._runner = runner
        self._moved = self._beaten = time.monotonic()
        runner.send(Start(self.options))
        self._set_state("loading" if self.restarts == 0 else "restarting")
        watcher = asyncio.create_task(self._watch(runner))
        try:
            while (message := await runner.receive()) is not None:
                if isinstance(message, Broken):
                    failure = message.failure.error()
                was_ready |= isinstance(message, Ready)
                self._handle(message)
        finally:
            watcher.cancel()
            status = await runner.wait()
            self._runner = None
            self.load = None
            died = failure or RunnerDiedError(self._explain(status, list(runner.stderr_tail)))
            if not self._stopping.is_set():
                self.error = died
                logger.error("runner of %s: %s", self.options.model_id, died.message)
                self._set_state("restarting")
            self._fail_streams(
                RunnerDiedError(f"The runner ended while it worked on this request: {died.message}", retry_after=2.0)
            )
        return was_ready

    def _explain(self, status: int, tail: list[str]) -> str:
        how = self._kill_reason or (f"killed by signal {-status}" if status < 0 else f"exit status {status}")
        last = next((line for line in reversed(tail) if line.strip()), "")
        return f"{how}{': ' + last if last and not self._kill_reason else ''} (log: {self.log_file})"

    def _handle(self, message: FromRunner) -> None:
        self._beaten = time.monotonic()
        if isinstance(message, Outputs):
            self._moved = self._beaten
            for request_id, events in message.outputs:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.push(events)
        elif isinstance(message, Heartbeat):
            # Requests that another node works on have deadlines of their own.
            idle = len(self._streams) <= message.load.elsewhere
            if self.load is None or self.load.steps != message.load.steps or idle:
                self._moved = self._beaten
            self.load = message.load
            self._on_change()
        elif isinstance(message, Loading):
            self._moved = self._beaten
            self.progress = LoadProgress(message.done, message.total)
            self._on_change()
        elif isinstance(message, Loaded):
            self._moved = self._beaten
            self.info = message.info
            self._set_state("warming")
        elif isinstance(message, Ready):
            self._moved = self._beaten
            self.error = None
            self.kv_address, self.identity = message.kv_address, message.identity
            self._set_state("ready")

    async def _watch(self, runner: RunnerProcess) -> None:
        """Kill a runner that stopped moving: no loading progress, no warm-up, no step, no sign of life."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            stuck = now - self._moved
            limits = self._settings
            if now - self._beaten > HEARTBEAT_DEADLINE_SECONDS:
                self._kill_reason = f"no sign of life for {now - self._beaten:.0f} s"
            elif self.state == "warming" and stuck > limits.warm_up_deadline:
                self._kill_reason = f"warm-up took longer than {limits.warm_up_deadline:.0f} s"
            elif self.state == "ready" and self._streams and stuck > limits.step_deadline:
                self._kill_reason = f"no step for {stuck:.0f} s with {len(self._streams)} requests to work on"
            elif self.state in ("loading", "restarting") and stuck > limits.load_deadline:
                self._kill_reason = f"loading made no progress for {stuck:.0f} s"
            if self._kill_reason is not None:
                runner.kill()
                return

    def _fail_streams(self, error: TandemError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)

    def _set_state(self, state: RunnerState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()
