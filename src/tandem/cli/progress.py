"""Showing how far a download, a conversion or a load has come: bars, lines or JSON events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.cli.output import human_bytes, note, print_event, stderr

if TYPE_CHECKING:
    from tandem.models.progress import Progress, ProgressCallback

LINE_SECONDS = 10.0
EVENT_SECONDS = 0.1
_DOING = {
    "resolve": "looking up",
    "download": "downloading",
    "verify": "verifying",
    "compare": "comparing",
    "convert": "converting",
    "copy": "copying",
    "load": "loading",
    "warm": "warming up",
    "restart": "starting again",
}


@dataclass(frozen=True, slots=True)
class Step:
    """How far one phase of one model has come. `total` is 0 where nobody knows.

    Attributes:
        reason: why it has come to this phase, where that is worth a word.
    """

    model: str
    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""
    reason: str = ""

    @property
    def title(self) -> str:
        """What is being done to what."""
        return f"{_DOING[self.phase]} {self.model}{f' ({self.reason})' if self.reason else ''}"

    @property
    def amount(self) -> str:
        """`3 of 30 layers`, `1.2 MB of 3.4 MB`, or nothing."""
        if not self.total:
            return ""
        if self.unit == "bytes":
            return f"{human_bytes(self.done)} of {human_bytes(self.total)}"
        return f"{self.done} of {self.total} {self.unit}"


class View(Protocol):
    """Shows steps. `show` may be called from any thread."""

    def show(self, step: Step) -> None:
        """Show `step` in place of the last one of its model."""


def callback_for(view: View, model: str) -> ProgressCallback:
    """What the model store calls, shown in `view` under the name `model`."""

    def report(progress: Progress) -> None:
        view.show(Step(model, progress.phase, progress.done, progress.total, progress.unit))

    return report


@contextmanager
def progress_view(*, events: bool = False) -> Iterator[View]:
    """Bars where standard error is a terminal, a line now and then where it is not; with `events` JSON lines."""
    if events:
        yield EventView()
    elif stderr().is_terminal:
        with BarView() as bars:
            yield bars
    else:
        yield LineView()


class BarView:
    """One bar per model and phase."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=stderr(),
        )
        self._lock = threading.Lock()
        self._tasks: dict[tuple[str, str], int] = {}
        self._current: dict[str, int] = {}

    def __enter__(self) -> BarView:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            for task in self._current.values():
                self._finish(task)
        self._progress.stop()

    def show(self, step: Step) -> None:
        """Move the bar, or begin a new one below the finished ones."""
        from rich.markup import escape
        from rich.progress import TaskID

        with self._lock:
            key = (step.model, step.phase)
            task = self._tasks.get(key)
            if task is None:
                if step.model in self._current:
                    self._finish(self._current[step.model])
                task = self._tasks[key] = self._progress.add_task("", total=None, amount="")
            self._current[step.model] = task
            self._progress.update(
                TaskID(task),
                description=escape(step.title),
                completed=step.done,
                total=step.total or None,
                amount=step.amount,
            )

    def _finish(self, number: int) -> None:
        from rich.progress import TaskID

        task = self._progress.tasks[number]
        total = task.total or 1
        self._progress.update(TaskID(number), total=total, completed=total)


class LineView:
    """A line when a phase begins, and one every ten seconds while it lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str, str]] = {}
        self._printed = 0.0

    def show(self, step: Step) -> None:
        """Print `step` if it is news."""
        with self._lock:
            now = time.monotonic()
            known = self._phases.get(step.model) == (step.phase, step.reason)
            if known and now - self._printed < LINE_SECONDS:
                return
            self._phases[step.model] = (step.phase, step.reason)
            self._printed = now
            note(f"{step.title}: {step.amount}" if known and step.amount else f"{step.title} ...")


class EventView:
    """One JSON object a line on standard output, at most ten a second and model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, float]] = {}

    def show(self, step: Step) -> None:
        """Print `step` if the phase is new, complete, or enough time has passed."""
        with self._lock:
            now = time.monotonic()
            phase, printed = self._last.get(step.model, ("", 0.0))
            complete = step.total > 0 and step.done == step.total
            if phase == step.phase and not complete and now - printed < EVENT_SECONDS:
                return
            self._last[step.model] = (step.phase, now)
            print_event(
                {
                    "event": "progress",
                    "model": step.model,
                    "phase": step.phase,
                    "done": step.done,
                    "total": step.total,
                    "unit": step.unit,
                    "reason": step.reason,
                }
            )
