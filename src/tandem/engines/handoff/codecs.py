"""Which codecs a hand-off may use, and what they cost on this machine."""

from __future__ import annotations

from tandem.kv.codec import CODECS
from tandem.kv.codec_speed import measure
from tandem.kv.layout import Layout
from tandem.placement.handoff import RAW, CodecCost

AUTO = "auto"


def codec_costs(choice: str, layout: Layout) -> tuple[CodecCost, ...]:
    """The codecs that `choice` (a codec's name, or `auto`) allows for caches of this layout.

    Speeds are measured here, on the layout's largest part; the peer that encodes is taken to be as fast.
    """
    if choice == RAW.name:
        return (RAW,)
    names = tuple(CODECS) if choice == AUTO else (choice,)
    parts = [part for layer in layout.layers for part in layer.parts]
    largest = max(parts, key=lambda part: part.bytes_per_token, default=None)
    total = sum(part.bytes_per_token for part in parts)
    costs = [RAW] if choice == AUTO else []
    for name in names:
        codec = CODECS[name]
        if largest is None or not codec.applies_to(largest):
            continue
        speed = measure(name, largest)
        sent = sum(part.bytes_per_token / codec.ratio(part) for part in parts)
        costs.append(CodecCost(name, sent / total, speed.encode, speed.decode))
    return tuple(costs) or (RAW,)
