"""A real engine behind a real KV port that hands over something wrong: `python tampering.py FOLDER FAULT`.

Prints its port. Ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

from tandem.engines.base import EngineOptions
from tandem.engines.registry import build_engine
from tandem.kv.job import PrefillJob
from tandem.kv.server import PrefillServer

LAYER, PART, TOKEN = 1, 1, 70


def one_entry(change: Any) -> None:
    """Change one number of one entry, wherever it is in the batch that is sent."""
    emit = PrefillJob.emit

    def tampered(self: PrefillJob, layer: int, part: int, start: int, entries: Any, **more: Any) -> None:
        if (layer, part) == (LAYER, PART) and start <= TOKEN < start + entries.shape[1]:
            entries = np.array(entries)
            place = (0, TOKEN - start, 3)
            entries[place] = change(entries[place])
        emit(self, layer, part, start, entries, **more)

    PrefillJob.emit = tampered  # type: ignore[method-assign]


def shifted() -> None:
    """Every entry of one layer is that of the token before."""
    emit = PrefillJob.emit

    def tampered(self: PrefillJob, layer: int, part: int, start: int, entries: Any, **more: Any) -> None:
        emit(self, layer, part, start, np.roll(entries, 1, axis=1) if layer == LAYER else entries, **more)

    PrefillJob.emit = tampered  # type: ignore[method-assign]


def state() -> None:
    """A state is a little too large."""
    emit = PrefillJob.emit_state

    def tampered(self: PrefillJob, layer: int, number: int, tokens: int, array: Any) -> None:
        emit(self, layer, number, tokens, array * np.float32(1.01) if (layer, number) == (LAYER, PART) else array)

    PrefillJob.emit_state = tampered  # type: ignore[method-assign]


def other_prompt() -> None:
    """The prompt is misread at one token."""
    init = PrefillJob.__init__

    def tampered(self: PrefillJob, plan: Any, tokens: Any, **more: Any) -> None:
        tokens = np.array(tokens)
        tokens[TOKEN : TOKEN + 1] ^= 1
        init(self, plan, tokens, **more)

    PrefillJob.__init__ = tampered  # type: ignore[method-assign]


FAULTS = {
    "none": lambda: None,
    "entry": lambda: one_entry(lambda value: value + 0.5),
    "last bit": lambda: one_entry(lambda value: np.nextafter(value, np.float32(np.inf))),
    "not a number": lambda: one_entry(lambda value: np.nan),
    "shifted": shifted,
    "state": state,
    "other prompt": other_prompt,
}


def main() -> None:
    folder, fault = sys.argv[1:]
    FAULTS[fault]()
    engine = build_engine(EngineOptions(engine="mlx", model_id="tampering", path=folder, prefix_cache_bytes=64 << 20))
    engine.load(lambda progress: None)
    wanted = threading.Event()
    engine.wake = wanted.set  # type: ignore[method-assign]
    plane = engine.kv_plane()
    assert plane is not None
    port = PrefillServer(plane.producer, plane.layout, plane.fingerprint)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(port.address[1], flush=True)
    while wanted.wait():
        wanted.clear()
        while engine.has_work:
            engine.step()


if __name__ == "__main__":
    main()
