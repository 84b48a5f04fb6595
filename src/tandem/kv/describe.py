"""A layout in figures for people: equal layers grouped, bytes, and what they take on a wire."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from tandem.kv.layout import Layer, Layout


class Link(NamedTuple):
    """A network, and the bytes a second that an application gets through it."""

    name: str
    rate: float


LINKS = (Link("1 GbE", 0.118e9), Link("10 GbE", 1.19e9), Link("Thunderbolt", 3.5e9))
"""Ethernet: the line's rate less headers, at 1500 bytes a packet. Thunderbolt 5 with RDMA, as others measured it; over
IP it is slower."""
TOKENS = (1024, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that look the same.

    Attributes:
        layers: their numbers.
    """

    layers: tuple[int, ...]
    layer: Layer

    @property
    def numbers(self) -> str:
        """As people write them: `0-4, 6-10`."""
        runs = []
        for _, run in groupby(enumerate(self.layers), lambda pair: pair[1] - pair[0]):
            found = [number for _, number in run]
            runs.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
        return ", ".join(runs)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self.layer)
        return {"layers": list(self.layers), **plain}


class Volume(NamedTuple):
    """What a cold prompt of so many tokens moves. `seconds`: by link, in the order of `LINKS`."""

    tokens: int
    bytes: int
    seconds: tuple[float, ...]


def groups(layout: Layout) -> list[Group]:
    """Equal layers together, in the order in which each kind first comes."""
    found: dict[Layer, list[int]] = {}
    for number, layer in enumerate(layout.layers):
        found.setdefault(layer, []).append(number)
    return [Group(tuple(numbers), layer) for layer, numbers in found.items()]


def window_bytes(layout: Layout) -> int:
    """Bytes of all windows once they are full."""
    return sum(layer.bytes_per_token * layer.window for layer in layout.layers if layer.kind == "window")


def volumes(layout: Layout) -> list[Volume]:
    """What prompts of `TOKENS` move, uncompressed, and how long that takes."""
    sizes = [(tokens, layout.bytes_between(0, tokens)) for tokens in TOKENS]
    return [Volume(tokens, size, tuple(size / link.rate for link in LINKS)) for tokens, size in sizes]
