"""Loading in vLLM's own way, with reports of how far it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tandem.engines.base import LoadProgress

LOAD_FORMAT = "tandem"
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
    """While this lasts, models loaded with `LOAD_FORMAT` are counted. One at a time."""
    global _meter
    assert _meter is None, "one model is loaded at a time"
    _meter = meter
    try:
        yield
        meter.end()
    finally:
        _meter = None


class _Loader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        plain = copy.copy(load_config)
        plain.load_format = "auto"
        super().__init__(plain)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        for name, tensor in super().get_all_weights(model_config, model):
            if _meter is not None:
                _meter.see(name)
            yield name, tensor


register_model_loader(LOAD_FORMAT)(_Loader)
