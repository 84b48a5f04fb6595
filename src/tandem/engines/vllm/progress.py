"""How far loading is, told layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from tandem.engines.base import LoadProgress

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class Meter:
    """Counts layers as their weights pass by.

    Args:
        layers: of the model.
        report: is told of each layer once.
    """

    def __init__(self, layers: int, report: Callable[[LoadProgress], None]) -> None:
        self._layers = layers
        self._report = report
        self._seen: set[int] = set()
        self._done = 0

    def see(self, name: str) -> None:
        """A tensor of this name is about to be loaded. A layer counts when the next one begins."""
        match = _LAYER.search(name)
        if match is not None and int(match.group(1)) not in self._seen:
            self._advance(min(len(self._seen), self._layers - 1))
            self._seen.add(int(match.group(1)))

    def end(self) -> None:
        """All is loaded."""
        self._advance(self._layers)

    def _advance(self, done: int) -> None:
        while self._done < done:
            self._done += 1
            self._report(LoadProgress(self._done, self._layers))


_meter: Meter | None = None


@contextmanager
def reporting(meter: Meter) -> Iterator[None]:
    """While this lasts, `seen` counts. One at a time."""
    global _meter
    assert _meter is None, "one model is loaded at a time"
    _meter = meter
    try:
        yield
        meter.end()
    finally:
        _meter = None


def seen(name: str) -> None:
    """A loader read the tensor of this name."""
    if _meter is not None:
        _meter.see(name)


def missing_siblings(wanted: Iterable[str], loaded: Collection[str]) -> list[str]:
    """Parameters that did not come, though the same one of another layer did.

    vLLM itself leaves out of its check whatever its kernels repack, which is nearly everything. A parameter without
    siblings may have been made up by the model, so that its absence proves nothing.
    """
    came = {_LAYER.sub(".", name) for name in loaded if _LAYER.search(name)}
    return [name for name in wanted if name not in loaded and _LAYER.sub(".", name) in came]
