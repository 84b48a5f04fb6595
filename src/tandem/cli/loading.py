"""From a model's name to a running instance, with everything on the way shown."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from tandem.cli.failure import INTERRUPTED
from tandem.cli.output import note
from tandem.cli.progress import Step, View, callback_for
from tandem.cluster.instances import InstanceStatus
from tandem.engines.sim.profile import is_sim_reference, parse_sim_reference
from tandem.errors import CancelledError
from tandem.models.progress import Progress
from tandem.models.store import LocalModel, ModelStore

POLL_SECONDS = 0.1


def obtain(
    store: ModelStore, reference: str, view: View, cancelled: Callable[[], bool] = lambda: False
) -> LocalModel | str:
    """Find, fetch or convert a model. A reference to the simulated engine is only checked.

    Args:
        cancelled: asked at every step of the work; True ends it.

    Raises:
        CancelledError: `cancelled` said so.
        TandemError: there is no such model, or it could not be fetched or converted.
    """
    if is_sim_reference(reference):
        parse_sim_reference(reference)
        return reference
    report = callback_for(view, reference)

    def report_unless_cancelled(progress: Progress) -> None:
        if cancelled():
            raise CancelledError("Interrupted. What has arrived is kept; the next try goes on from there.")
        report(progress)

    return store.obtain(reference, report_unless_cancelled)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a question, `was Ctrl-C pressed?`, for `obtain`. A second Ctrl-C ends the process at once."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            sys.exit(INTERRUPTED)
        pressed = True
        note("Stopping ... (Ctrl-C again to stop at once)")

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Loading(Protocol):
    """A node, or the instances of this machine alone."""

    def instances(self) -> list[InstanceStatus]:
        """Every instance as it is now."""

    async def wait_ready(self, instance_id: str, deadline: float | None = None) -> None:
        """Wait until an instance is ready."""


async def show_loading(node: Loading, instances: Sequence[str], view: View) -> None:
    """Wait until all `instances` are ready, showing how far they are.

    Raises:
        TandemError: one of them failed.
    """
    waiting = asyncio.gather(*(node.wait_ready(instance) for instance in instances))
    while not waiting.done():
        for status in node.instances():
            if status.instance_id not in instances:
                continue
            step = _step(status)
            if step is not None:
                view.show(step)
        await asyncio.wait({waiting}, timeout=POLL_SECONDS)
    await waiting


def _step(status: InstanceStatus) -> Step | None:
    if status.state == "restarting":
        return Step(status.model_id, "restart", reason=status.error or "")
    if status.state in ("starting", "loading"):
        done, total = status.progress or (0, 0)
        return Step(status.model_id, "load", done, total, "layers")
    return Step(status.model_id, "warm") if status.state == "warming" else None
