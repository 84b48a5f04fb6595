"""What came of a verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.verify.compare import Difference, LayerDifference


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the hand-off's result first leaves what this machine computed.

    Attributes:
        where: `handoff` (nothing usable came), `cache`, `logits` or `answer`.
        layer, part: of a difference in the cache.
        token: position in the prompt, or in the answer.
    """

    where: str
    layer: int | None = None
    part: str | None = None
    token: int | None = None

    def __str__(self) -> str:
        if self.where == "cache":
            return f"layer {self.layer}, {self.part}, token {self.token}"
        return {"answer": f"token {self.token} of the answer", "logits": "the logits of the last prompt token"}.get(
            self.where, "the hand-off itself"
        )


@dataclass(frozen=True, slots=True)
class Transferred:
    """The hand-off's figures. `cached`: tokens that the prefill side knew already."""

    bytes: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    transferring: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Logits:
    """Those of the last prompt token. `allowed`: the largest difference that passes."""

    max_abs: float
    bit_equal: bool
    allowed: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """The two greedy answers.

    Attributes:
        first_divergence: the first position where they differ.
        tie: they part where both tokens are equally likely, within what logits may differ by.
    """

    local: tuple[int, ...]
    handed: tuple[int, ...]
    first_divergence: int | None
    tie: bool

    @property
    def equal(self) -> bool:
        """Whether the answers are the same."""
        return self.first_divergence is None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case.

    Attributes:
        prompt_tokens: of the prompt that was compared; of the second turn where there are two.
        start: leading tokens that the decode side knew already.
        exact: both sides cut the prompt into the same chunks, so that every bit has to be equal.
        reason: why it failed, or what else there is to say.
    """

    name: str
    prompt_tokens: int
    start: int
    exact: bool
    handoff: Transferred
    layers: tuple[LayerDifference, ...]
    logits: Logits | None
    tokens: Tokens | None
    first_divergence: Divergence | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.first_divergence is None

    @property
    def worst(self) -> tuple[int, Difference] | None:
        """The layer with the largest difference, and that difference; None where no bit differs."""
        differing = [layer for layer in self.layers if not layer.bit_equal]
        if not differing:
            return None
        layer = max(differing, key=lambda one: one.worst.max_abs)
        return layer.layer, layer.worst

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "start": self.start,
            "exact": self.exact,
            "layers": [_layer(layer) for layer in self.layers],
            "logits": asdict(self.logits) if self.logits else None,
            "tokens": (asdict(self.tokens) | {"equal": self.tokens.equal}) if self.tokens else None,
            "first_divergence": asdict(self.first_divergence) if self.first_divergence else None,
            "passed": self.passed,
            "reason": self.reason,
            "handoff": asdict(self.handoff),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All cases, and what they were run with.

    Attributes:
        peer: the prefill side's address, or what it is.
    """

    model: str
    peer: str
    dtype: str
    chunk: int
    seed: int
    fingerprint: str
    cases: tuple[CaseResult, ...]

    @property
    def failed(self) -> list[CaseResult]:
        """Cases that did not pass."""
        return [case for case in self.cases if not case.passed]

    @property
    def passed(self) -> bool:
        """Whether all did."""
        return bool(self.cases) and not self.failed

    def worst_layers(self) -> list[tuple[int, Difference, str]]:
        """For every layer that differs anywhere: its largest difference, and in which case that is."""
        found: dict[int, tuple[Difference, str]] = {}
        for case in self.cases:
            for layer in case.layers:
                if not layer.bit_equal and (
                    layer.layer not in found or layer.worst.max_abs > found[layer.layer][0].max_abs
                ):
                    found[layer.layer] = (layer.worst, case.name)
        return [(layer, *found[layer]) for layer in sorted(found)]

    def to_json(self) -> dict[str, Any]:
        """As plain data; figures that are not finite become null."""
        first = next(iter(self.failed), None)
        divergence = asdict(first.first_divergence) if first and first.first_divergence else None
        content = {
            "passed": self.passed,
            "model": self.model,
            "peer": self.peer,
            "dtype": self.dtype,
            "chunk": self.chunk,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "first_divergence": {"case": first.name, **divergence} if first and divergence else None,
            "cases": [case.to_json() for case in self.cases],
        }
        plain: dict[str, Any] = _finite(content)
        return plain


def first_wrong(layers: Iterable[LayerDifference]) -> Divergence | None:
    """The earliest token that is wrong in any layer; of several layers the lowest."""
    wrong = [(part.first or 0, layer.layer, part.part) for layer in layers if (part := layer.wrong) is not None]
    if not wrong:
        return None
    token, layer, name = min(wrong, key=lambda one: one[:2])
    return Divergence("cache", layer, name, token)


def compare_answers(local: Sequence[int], handed: Sequence[int]) -> int | None:
    """The first position where two answers differ."""
    pairs = enumerate(zip(local, handed, strict=True))
    return next((position for position, (ours, theirs) in pairs if ours != theirs), None)


def _layer(layer: LayerDifference) -> dict[str, Any]:
    parts = [asdict(part) for part in layer.parts]
    return {"layer": layer.layer, "kind": layer.kind, "bit_equal": layer.bit_equal, "parts": parts}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
