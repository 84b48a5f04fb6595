"""Caches of one model in two element types: what a peer's cache is made of, and entries of ours as it wants them.

Two engines, or one engine on two machines, may keep the same model's entries as float32, bfloat16 or float16. The
server converts: a client gets frames of its own types, and needs to know nothing of the server's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tandem.kv.dtypes import DTYPES, Array, DTypeName
from tandem.kv.floats import bfloat16_rounded, float16_rounded, to_float32
from tandem.kv.layout import MAX_LAYERS, MAX_PARTS, Layout

FLOAT: DTypeName = "float32"
"""What stands for every float type where the type does not matter."""
LONGEST_TEXT = 4096
MOST_ELEMENTS = MAX_LAYERS * MAX_PARTS
_COUNT = re.compile(r"[1-9][0-9]{0,6}")


def dtypes_of(layout: Layout) -> tuple[DTypeName, ...]:
    """Element types of every part of every layer, then of every state, in order."""
    parts = [part.dtype for layer in layout.layers for part in layer.parts]
    return (*parts, *(state.dtype for layer in layout.layers for state in layer.states))


def with_dtypes(layout: Layout, dtypes: Sequence[DTypeName]) -> Layout:
    """The same layout with other element types, in the order of `dtypes_of`."""
    parts = iter(dtypes[: sum(len(layer.parts) for layer in layout.layers)])
    states = iter(dtypes[sum(len(layer.parts) for layer in layout.layers) :])
    return Layout(
        tuple(
            msgspec.structs.replace(
                layer,
                parts=tuple(msgspec.structs.replace(part, dtype=next(parts)) for part in layer.parts),
                states=tuple(msgspec.structs.replace(state, dtype=next(states)) for state in layer.states),
            )
            for layer in layout.layers
        )
    )


def any_float(layout: Layout) -> Layout:
    """The layout with one name for all float types: equal where entries can be converted into one another."""
    return with_dtypes(layout, [FLOAT if DTYPES[name].is_float else name for name in dtypes_of(layout)])


def converted(layout: Layout, wanted: str) -> Layout | None:
    """The layout of a peer whose fingerprint's `dtype` is `wanted`; None if our entries cannot become its.

    A fingerprint's text is cut where it is too long. Then it has to be the same as ours.
    """
    ours = runs(dtypes_of(layout))
    if wanted == ours:
        return layout
    if not convertible(ours, wanted):
        return None
    theirs = expand(wanted)
    assert theirs is not None
    return with_dtypes(layout, theirs)


def convertible(ours: str, theirs: str) -> bool:
    """Whether the `dtype`s of two fingerprints differ in their float types at most."""
    if ours == theirs:
        return True
    one, other = expand(ours), expand(theirs)
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        mine == their or (DTYPES[mine].is_float and DTYPES[their].is_float)
        for mine, their in zip(one, other, strict=True)
    )


def convert(array: Array, source: DTypeName, target: DTypeName) -> Array:
    """Values of one float type as another: exact where the other is wider, else rounded to nearest, halves to even, and
    finite values to the largest finite number at most. Not copied if the types are the same."""
    if source == target:
        return array
    if target == "bfloat16":
        return bfloat16_rounded(to_float32(array, source))
    if target == "float16":
        return float16_rounded(to_float32(array, source))
    widened: Array = to_float32(array, source)
    return widened


def runs(values: Sequence[str], limit: int = LONGEST_TEXT) -> str:
    """`["5", "5", "8"]` as `5x2 8`, cut at `limit` characters."""
    counted = ((value, len(list(same))) for value, same in groupby(values))
    return " ".join(value if count == 1 else f"{value}x{count}" for value, count in counted)[:limit]


def expand(text: str) -> tuple[DTypeName, ...] | None:
    """The element types that `runs` wrote; None if the text is no such thing, was cut, or names too many."""
    if len(text) >= LONGEST_TEXT:
        return None
    found: list[DTypeName] = []
    for run in text.split():
        name, _, count = run.partition("x")
        times = int(count) if _COUNT.fullmatch(count) else 0 if count else 1
        if name not in DTYPES or not times or len(found) + times > MOST_ELEMENTS:
            return None
        found.extend([DTYPES[name].name] * times)
    return tuple(found)
