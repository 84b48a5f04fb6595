"""Codecs: bounds on what they change, sizes, refusals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from tandem.errors import WireError
from tandem.kv.codec import CODECS, Codec, group_size, negotiate
from tandem.kv.codec_speed import measure
from tandem.kv.dtypes import Array, DTypeName
from tandem.kv.floats import bfloat16_nearest, to_float32
from tandem.kv.layout import Part
from tandem.kv.wire import as_bytes

FLOATS: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")


def stored(values: npt.NDArray[np.float32], dtype: DTypeName) -> Array:
    """Values as a cache holds them."""
    if dtype == "bfloat16":
        return bfloat16_nearest(values)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def there_and_back(codec: Codec, entries: Array, dtype: DTypeName) -> npt.NDArray[np.float32] | None:
    arrays = codec.encode(entries, dtype)
    if arrays is None:
        return None
    payload = b"".join(as_bytes(array) for array in arrays)
    heads, tokens, dim = entries.shape
    assert len(payload) == heads * tokens * codec.row_bytes(dim)
    out = np.zeros_like(entries)
    codec.decode(memoryview(payload), out, dtype)
    return to_float32(out, dtype)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 16, 17, 64, 80, 96, 128, 258]))


@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(FLOATS),
    name=st.sampled_from(sorted(CODECS)),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 60000.0]),
)
def test_errors_are_bounded(
    data: st.DataObject, shape: tuple[int, int, int], dtype: DTypeName, name: str, scale: float
) -> None:
    codec = CODECS[name]
    if not codec.applies_to(Part("keys", shape[0], shape[2], dtype)):
        return
    elements = st.floats(-1, 1, width=32)
    values = data.draw(hypothesis_numpy.arrays(np.float32, shape, elements=elements)) * np.float32(scale)
    entries = stored(values, dtype)
    exact = to_float32(entries, dtype)
    decoded = there_and_back(codec, entries, dtype)
    assert decoded is not None
    grouped = np.abs(exact)
    if name == "int4":
        outliers = max(1, shape[2] // 32)
        grouped = np.sort(grouped, axis=-1)
        # The largest are apart; of the rest, no group can have more than the largest of the rest.
        rest = grouped[..., : shape[2] - outliers]
        largest = rest.max(axis=-1, keepdims=True) if rest.size else np.zeros((*shape[:2], 1), np.float32)
        limit = largest * 0.0725
    else:
        limit = grouped.max(axis=-1, keepdims=True) * 0.004
    # What rounding to the stored dtype adds, and denormals.
    epsilon = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    rounding = np.abs(exact) * max(epsilon, 2**-7 if name == "int4" else 0) + limit * epsilon
    tiny = {"float32": 1e-38, "float16": 6e-8, "bfloat16": 1e-38}[dtype]
    assert (np.abs(decoded - exact) <= limit + rounding + tiny).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(CODECS))
def test_extremes_stay_finite(dtype: DTypeName, name: str) -> None:
    largest = 65504.0 if dtype == "float16" else 3.0e38
    values = np.full((1, 2, 64), largest, np.float32)
    values[0, 1] *= -1
    decoded = there_and_back(CODECS[name], stored(values, dtype), dtype)
    assert decoded is not None
    assert np.isfinite(decoded).all()
    assert np.abs(np.abs(decoded) / largest - 1).max() < 0.02


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zeros_are_exact(name: str) -> None:
    decoded = there_and_back(CODECS[name], np.zeros((2, 3, 64), np.float32), "float32")
    assert decoded is not None
    assert not decoded.any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_is_not_finite_is_sent_raw(bad: float, dtype: DTypeName, name: str) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    entries = stored(values, dtype)
    entries[1, 2, 5] = {"float32": bad, "float16": bad, "bfloat16": np.float32(bad).view(np.uint32) >> 16}[dtype]
    assert CODECS[name].encode(entries, dtype) is None


def test_stated_ratios() -> None:
    for dim in (64, 128):
        assert CODECS["int8"].ratio(Part("keys", 8, dim, "bfloat16")) == pytest.approx(1.94, abs=0.01)
        assert CODECS["int8"].ratio(Part("keys", 8, dim, "float32")) == pytest.approx(3.88, abs=0.01)
        assert CODECS["int4"].ratio(Part("keys", 8, dim, "bfloat16")) == pytest.approx(3.05, abs=0.01)
    assert CODECS["int8"].ratio(Part("packed", 8, 8, "uint32")) == 1.0


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (128, 64), (80, 40), (96, 48), (17, 17), (8, 8), (67, 67), (1, 1)])
def test_groups(dim: int, size: int) -> None:
    assert group_size(dim, 64) == size


@pytest.mark.parametrize("name", sorted(CODECS))
def test_infinite_scales_are_refused(name: str) -> None:
    codec = CODECS[name]
    payload = bytearray(codec.row_bytes(64))
    payload[0:2] = b"\x80\x7f"
    with pytest.raises(WireError, match="infinite"):
        codec.decode(memoryview(payload), np.zeros((1, 1, 64), np.float32), "float32")


def test_outliers_outside_their_row_are_refused() -> None:
    codec = CODECS["int4"]
    payload = bytearray(codec.row_bytes(64))
    payload[2 * 2 + 2 * 2] = 64
    with pytest.raises(WireError, match="outside its row"):
        codec.decode(memoryview(payload), np.zeros((1, 1, 64), np.float32), "float32")


def test_any_payload_of_the_right_length_decodes_or_is_refused() -> None:
    generator = np.random.default_rng(1)
    decoded = 0
    for codec in CODECS.values():
        for _ in range(200):
            payload = generator.integers(0, 256, 3 * codec.row_bytes(64), dtype=np.uint8)
            out = np.zeros((1, 3, 64), np.float32)
            try:
                codec.decode(payload.data, out, "float32")
            except WireError:
                continue
            decoded += 1
            assert np.isfinite(out).all()
    assert decoded


def test_negotiation() -> None:
    assert negotiate(("int4", "int8")) == "int4"
    assert negotiate(("zstd", "int8", "raw")) == "int8"
    assert negotiate(("int8",), ("raw",)) == "raw"
    assert negotiate(()) == "raw"


def test_speeds_are_measured() -> None:
    for name in CODECS:
        speed = measure(name, Part("keys", 2, 64, "float32"), tokens=64)
        assert speed.encode > 0
        assert speed.decode > 0
        assert speed.ratio > 3
