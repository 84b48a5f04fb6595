"""The repetition penalty over a window of recent tokens. vLLM's own one looks at all of them, in one strength."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

REPETITION = "tandem_repetition"
"""Key in a request's `extra_args`: `[penalty, window in tokens, [[token, bias], ...]]`."""


class _Row(NamedTuple):
    penalty: float
    window: int
    bias: dict[int, float]
    prompt: list[int]
    written: list[int]

    def recent(self) -> list[int]:
        missing = self.window - len(self.written)
        earlier = self.prompt[-missing:] if missing > 0 else []
        return [*earlier, *self.written[-self.window :]]


class Repetition(LogitsProcessor):
    """Divides positive and multiplies negative logits of the tokens in the window; then adds the request's bias."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, prompt, written in batch_update.added:
            rows.pop(index, None)
            setting = (params.extra_args or {}).get(REPETITION)
            if setting is not None:
                penalty, window, bias = setting
                rows[index] = _Row(penalty, window, dict(bias), prompt or [], written)
        for source, target, direction in batch_update.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if direction is MoveDirectionality.SWAP and replaced is not None:
                rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, row in self._rows.items():
            tokens = torch.tensor(sorted(set(row.recent())), device=logits.device, dtype=torch.long)
            chosen = logits[index, tokens]
            logits[index, tokens] = torch.where(chosen < 0, chosen * row.penalty, chosen / row.penalty)
            if row.bias:
                biased = torch.tensor(list(row.bias), device=logits.device, dtype=torch.long)
                logits[index, biased] += torch.tensor(list(row.bias.values()), device=logits.device, dtype=logits.dtype)
        return logits
