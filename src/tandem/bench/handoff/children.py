"""Programs of the bench that run as processes of their own: one JSON object a line, in and out.

The parent's questions come over standard input; its end is the program's end, so nothing outlives a killed bench.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.errors import DeadlineError, EngineError, TandemError

START_SECONDS = 180.0
STOP_SECONDS = 10.0
LINE_LIMIT = 16 << 20
LOG_TAIL_BYTES = 1000

Answerer = Callable[[dict[str, Any]], dict[str, Any]]


class Child:
    """Async context manager around one program.

    Args:
        name: for messages.
        module: is run with `python -m`; calls `answer_questions`.
        settings: handed over as its only argument, as JSON.
        log_file: gets its standard error.
        environment: added to our own.
        prefix: put before the command.

    Attributes:
        ready: what the program said first.
    """

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._command = [*prefix, sys.executable, "-m", module, json.dumps(settings)]
        self._environment = os.environ | dict(environment or {})
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Child:
        with self._log_file.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                limit=LINE_LIMIT,
                # Ctrl-C reaches the bench alone, which then ends its programs in order.
                start_new_session=True,
            )
        try:
            self.ready = await self._hear(START_SECONDS)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def ask(self, question: Mapping[str, Any], deadline: float = 120.0) -> dict[str, Any]:
        """Send a question and wait for its answer.

        Raises:
            EngineError: the program failed, or ended.
            DeadlineError: no answer came within `deadline` seconds.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self._hear(deadline)

    async def _hear(self, deadline: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise DeadlineError(f"{self.name} said nothing for {deadline:.0f} s. {self._last_words()}") from error
        if not line:
            raise EngineError(f"{self.name} ended before it answered. {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        """End the program: its input ends, and what does not heed that is killed. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.shield(asyncio.wait_for(process.wait(), STOP_SECONDS))
        except BaseException as error:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if not isinstance(error, TimeoutError):
                raise

    def _last_words(self) -> str:
        tail = self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return f"It wrote: {tail}" if tail else "It wrote nothing."


def answer_questions(ready: dict[str, Any], answer: Answerer) -> None:
    """A program's main loop: say `ready`, then answer question after question. The process ends with its parent."""
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    _say(ready)
    while True:
        try:
            reply = answer(json.loads(questions.get()))
        except TandemError as error:
            reply = {"error": error.message}
        _say(reply)


def _read(questions: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        questions.put(line)
    # At once, even in the middle of an answer: there is nobody to hear it.
    sys.stderr.flush()
    os._exit(0)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
