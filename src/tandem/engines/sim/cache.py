"""What the simulated model's cache looks like, whose it is, and what every entry of it must be."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct

import numpy as np
import numpy.typing as npt

from tandem.engines.sim.profile import SimProfile
from tandem.engines.sim.text import WORDS
from tandem.kv.codec import RAW
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layer, Layout, Part
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticCache

LONGEST_NAME = 200
LOSSY_TOLERANCE = 0.1
"""Entries are within ±1, and no lossy codec moves one by more than 7.3 % of that."""
_PAIR = Struct("<QI")


def chain(state: int, tokens: Iterable[int]) -> int:
    """The 64-bit hash of a sequence, continued by `tokens`."""
    for token in tokens:
        state = int.from_bytes(blake2b(_PAIR.pack(state, token), digest_size=8).digest(), "little")
    return state


def layout_of(profile: SimProfile) -> Layout:
    """Full attention in float32, in the profile's shape."""
    parts = tuple(Part(name, profile.kv_heads, profile.head_dim, "float32") for name in ("keys", "values"))
    return Layout((Layer("tokens", parts=parts),) * profile.layers)


def fingerprint_of(model_id: str, layout: Layout, quantisation: str = "") -> Fingerprint:
    """Simulated models are the same if they have the same name, shape and quantisation, whatever their speeds and
    answers."""
    name = model_id if len(model_id) <= LONGEST_NAME else _digest(model_id)
    return Fingerprint.of(
        layout,
        architecture="sim",
        tokenizer=_digest("".join(WORDS)),
        rope="",
        quantisation=quantisation or "none",
        weights=f"simulated {name} {quantisation}".rstrip(),
    )


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def first_wrong(
    cache: SyntheticCache, tokens: npt.NDArray[np.uint32], staging: Staging, codec: str, start: int, end: int
) -> int | None:
    """The first of the tokens `[start, end)` of which a received entry is not what it must be; None if all are right.

    Args:
        tokens: the prompt, at least up to `end`.
        codec: that the entries travelled in; a lossy one moves them a little.

    Raises:
        HandoffError: some of them are not in the staging.
    """
    tolerance = 0.0 if codec == RAW else LOSSY_TOLERANCE
    wrong = np.zeros(end - start, np.bool_)
    for index, layer in enumerate(cache.layout.layers):
        for part in range(len(layer.parts)):
            received = staging.entries(index, part, start, end)
            expected = cache.entries(tokens, index, part, start, end)
            # Written so that NaN is wrong.
            wrong |= ~(np.abs(received - expected) <= tolerance).all(axis=(0, 2))
    return start + int(wrong.argmax()) if wrong.any() else None
