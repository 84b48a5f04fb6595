"""Add up what several download threads have fetched, and report it."""

from __future__ import annotations

import threading
from typing import Any

from tandem.errors import CancelledError
from tandem.models.progress import Progress, ProgressCallback


class Meter:
    """Counts bytes over threads.

    Args:
        phase: reported with every count.
        total: bytes expected.
        report: called with each new count; what it raises stops the job.

    Attributes:
        cause: what `report` raised.
    """

    def __init__(self, phase: Any, total: int, report: ProgressCallback) -> None:
        self._phase = phase
        self._total = total
        self._report = report
        self._done = 0
        self._stopped = False
        self.cause: BaseException | None = None
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` more bytes; fewer if negative.

        Raises:
            CancelledError: the job was stopped.
        """
        with self._lock:
            if self._stopped:
                raise CancelledError("The download was stopped.")
            self._done += count
            try:
                self._report(Progress(self._phase, min(self._done, self._total), self._total, "bytes"))
            except BaseException as error:
                self._stopped = True
                self.cause = error
                raise

    def stop(self) -> None:
        """Make the other threads' next count raise."""
        with self._lock:
            self._stopped = True

    def bar_class(self) -> Any:
        """What `huggingface_hub` takes for a progress bar's class; it draws nothing and counts here."""
        meter = self

        class Bar:
            def __init__(self, *args: Any, **options: Any) -> None:
                pass

            def update(self, count: int) -> None:
                meter.add(count)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *error: object) -> None:
                pass

        return Bar
