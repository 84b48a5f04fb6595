"""How far two arrays, two caches or two answers are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.kv.dtypes import Array


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is allowed.

    Attributes:
        exact: every bit has to be equal.
        entries: largest difference of an entry or state, as a share of the largest value of its part in that layer, or
            absolute where that is less than 1. Whole numbers (packed entries) are compared only where `exact`.
        logits: largest difference of a logit.
    """

    exact: bool
    entries: float
    logits: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Two arrays of one part (keys, values, a state) of one layer.

    Attributes:
        first: the first token whose entries differ by more than is allowed; None where none does. For a state, the
            number of tokens it stands for.
    """

    part: str
    max_abs: float
    mean_abs: float
    cosine: float
    bit_equal: bool
    first: int | None


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """One layer, all of its parts."""

    layer: int
    kind: str
    parts: tuple[Difference, ...]

    @property
    def worst(self) -> Difference:
        """The part with the largest difference."""
        return max(self.parts, key=lambda part: part.max_abs)

    @property
    def bit_equal(self) -> bool:
        """Whether nothing differs."""
        return all(part.bit_equal for part in self.parts)

    @property
    def wrong(self) -> Difference | None:
        """The part that goes wrong first, if any does."""
        wrong = [part for part in self.parts if part.first is not None]
        return min(wrong, key=lambda part: part.first or 0) if wrong else None


def compare_arrays(
    part: str, ours: Array, theirs: Array, bounds: Bounds, *, start: int, axis: int | None, bits: int = 0
) -> Difference:
    """Compare what was computed here with what was handed over.

    Args:
        start: the first token, or the number of tokens that a state stands for.
        axis: of the tokens; None for a state.
        bits: of the steps that whole numbers are packed from; differences are counted in steps then.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Difference(part, math.inf, math.inf, 0.0, False, start)
    if _same_bits(ours, theirs):
        return Difference(part, 0.0, 0.0, 1.0, True, None)
    is_float = ours.dtype.kind == "f"
    if not is_float and bits in (2, 4, 8):
        ours, theirs = _steps(ours, bits), _steps(theirs, bits)
    with np.errstate(all="ignore"):
        left, right = ours.astype(np.float64), theirs.astype(np.float64)
        apart = np.nan_to_num(np.abs(left - right), nan=math.inf, posinf=math.inf)
        limit = bounds.entries * max(1.0, float(np.nanmax(np.abs(left))))
    if bounds.exact and not bounds.entries:
        wrong = (_bytes_of(ours) != _bytes_of(theirs)).any(axis=-1)
    else:
        wrong = (apart > limit) & (is_float or bounds.exact)
    return Difference(
        part,
        float(apart.max()),
        float(apart.mean()),
        _cosine(left, right),
        False,
        _first(wrong, start, axis),
    )


def compare_logits(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> tuple[float, bool]:
    """(largest difference, whether every bit is equal)."""
    if _same_bits(ours, theirs):
        return 0.0, True
    with np.errstate(all="ignore"):
        apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    return float(np.nan_to_num(apart, nan=math.inf, posinf=math.inf).max()), False


def _steps(packed: Array, bits: int) -> Array:
    """The steps in whole numbers that hold several of them, along the last axis."""
    shifts = np.arange(0, packed.itemsize * 8, bits, dtype=packed.dtype)
    steps: Array = (packed[..., None] >> shifts) & packed.dtype.type((1 << bits) - 1)
    return steps.reshape(*packed.shape[:-1], -1)


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.itemsize)


def _same_bits(ours: Array, theirs: Array) -> bool:
    return np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()


def _first(wrong: npt.NDArray[np.bool_], start: int, axis: int | None) -> int | None:
    if not wrong.any():
        return None
    if axis is None:
        return start
    others = tuple(number for number in range(wrong.ndim) if number != axis)
    return start + int(np.argmax(wrong.any(axis=others)))


def _cosine(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    with np.errstate(all="ignore"):
        product = float(np.linalg.norm(left.ravel()) * np.linalg.norm(right.ravel()))
        dot = float(np.dot(left.ravel(), right.ravel()))
    if not product or not math.isfinite(product) or not math.isfinite(dot):
        return 0.0
    return max(-1.0, min(1.0, dot / product))
