"""Apple's GPU figures from `macmon pipe`, which prints one JSON object a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger("tandem.facts")

SILENCE_SECONDS = 10.0
"""Without a usable line for this long, the tool is ended, and what it said before counts no longer."""
STOP_SECONDS = 2.0
MAX_STARTS = 5
MAX_GARBAGE = 50
"""Lines in a row that are no samples."""
FIRST_PAUSE = 2.0
HIGHEST_POWER = 1000.0
"""Watts. No Mac takes as much, but single samples of the tool do."""


class MacmonSample(NamedTuple):
    """Usage from 0 to 1, degrees Celsius, watts; None where the tool does not tell."""

    gpu_usage: float | None
    gpu_temperature: float | None
    gpu_power: float | None
    cpu_temperature: float | None
    system_power: float | None


def parse_sample(line: str | bytes) -> MacmonSample | None:
    """One line of `macmon pipe`; None when it is something else. Pure.

    The fields are those of its README: `gpu_active_ratio` (0.8), or the second number of `gpu_usage` (0.7 and older).
    """
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or "gpu_power" not in fields:
        return None
    usage = _number(fields.get("gpu_active_ratio"), 1.0)
    pair = fields.get("gpu_usage")
    if usage is None and isinstance(pair, list) and len(pair) == 2:
        usage = _number(pair[1], 1.0)
    temperatures = fields.get("temp")
    temperatures = temperatures if isinstance(temperatures, dict) else {}
    return MacmonSample(
        gpu_usage=usage,
        gpu_temperature=_number(temperatures.get("gpu_temp_avg"), 200.0) or None,
        gpu_power=_number(fields["gpu_power"], HIGHEST_POWER),
        cpu_temperature=_number(temperatures.get("cpu_temp_avg"), 200.0) or None,
        system_power=_number(fields.get("sys_power"), HIGHEST_POWER) or None,
    )


def _number(value: Any, highest: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= highest else None


class Macmon:
    """The tool as a subprocess that is kept running: starting it for each sample would cost more than the sample.

    Args:
        command: what to run.
        silence: seconds without a usable line after which the tool is started again.
        pause: seconds before the second start; doubled each time. After some failed starts in a row it is given up.
        clock: seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        silence: float = SILENCE_SECONDS,
        pause: float = FIRST_PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = tuple(command)
        self._silence = silence
        self._pause = pause
        self._clock = clock
        self._sample: MacmonSample | None = None
        self._sampled = 0.0
        self._task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        """Set by every sample, and when the tool is given up; whoever waits for it clears it."""

    async def start(self) -> None:
        """Run the tool until `stop`."""
        self._task = asyncio.create_task(self._keep_running())
        self._task.add_done_callback(lambda _: self.changed.set())

    async def stop(self) -> None:
        """End the tool."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=2 * STOP_SECONDS)

    def latest(self) -> MacmonSample | None:
        """The last sample, unless it is old."""
        return self._sample if self._clock() - self._sampled < self._silence else None

    @property
    def given_up(self) -> bool:
        """Whether it failed too often to be started again."""
        return self._task is not None and self._task.done()

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            try:
                useful = await self._run()
            except OSError as error:
                logger.warning("%s cannot be started: %s. GPU figures are left out.", self._command[0], error)
                return
            failures = 0 if useful else failures + 1
            if failures >= MAX_STARTS:
                logger.warning("%s gives nothing usable. GPU figures are left out.", " ".join(self._command))
                return
            await asyncio.sleep(self._pause * 2 ** min(failures, MAX_STARTS))

    async def _run(self) -> bool:
        """Read one run of the tool to its end; whether it gave a usable line."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdout is not None
        useful = False
        try:
            while True:
                # The deadline is for a usable line: a tool that prints garbage for ever is silent too.
                async with asyncio.timeout(self._silence):
                    sample = await _next_sample(process.stdout)
                if sample is None:
                    break
                self._sample, self._sampled, useful = sample, self._clock(), True
                self.changed.set()
        except (TimeoutError, ValueError):
            pass  # silent, or printing what is not its own: lines too long, or nothing but garbage
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            # Otherwise the garbage collector closes its pipes, perhaps after the event loop is gone.
            process._transport.close()  # type: ignore[attr-defined]
        return useful


async def _next_sample(stream: asyncio.StreamReader) -> MacmonSample | None:
    for _ in range(MAX_GARBAGE):
        line = await stream.readline()
        if not line:
            return None
        # Lines that are already here do not make `readline` wait: a flood would keep the event loop to itself.
        await asyncio.sleep(0)
        sample = parse_sample(line)
        if sample is not None:
            return sample
    raise ValueError("not macmon's output")
