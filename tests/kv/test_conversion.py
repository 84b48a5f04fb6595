"""What two sides may differ in, field by field, and entries of one float type as another."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from tandem.errors import IncompatiblePeerError, PeerRefusedError
from tandem.kv.conversion import convert, converted, convertible, dtypes_of, expand, runs, with_dtypes
from tandem.kv.dtypes import DTYPES, Array, DTypeName
from tandem.kv.floats import to_float32
from tandem.kv.layout import Layout
from tandem.kv.plan import Wanted
from tandem.kv.synthetic import SyntheticCache
from tests.kv.layouts import ATTENTION, LAYOUTS, WINDOW, fingerprint
from tests.kv.plane.support import PROMPT, handoff, serving, staged, wrong_entries

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
TABLE = dict(re.findall(r"^\| `([a-z]+)` \| .* \| ([^|]+) \|$", DOCUMENT, re.MULTILINE))
FLOATS: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")


def as_floats(layout: Layout, name: DTypeName) -> Layout:
    """The layout with `name` for every float type."""
    return with_dtypes(layout, [name if DTYPES[one].is_float else one for one in dtypes_of(layout)])


# ------------------------------------------------------------------------------------------------- the table's rows


@pytest.mark.parametrize("field", sorted(name for name, rule in TABLE.items() if rule == "equal"))
@pytest.mark.parametrize("lenient", [False, True])
def test_what_has_to_be_equal(field: str, lenient: bool) -> None:
    ours = fingerprint(LAYOUTS["composite"])
    value = getattr(ours, field)
    theirs = msgspec.structs.replace(ours, **{field: value + 1 if isinstance(value, int) else value + "?"})
    assert [one.field for one in ours.differences(theirs, allow_quantisation=lenient)] == [field]
    assert ours.digest() != theirs.digest()


def test_every_row_is_tested() -> None:
    assert {name for name, rule in TABLE.items() if rule != "equal"} == {"dtype", "quantisation", "weights"}
    assert len(TABLE) == len(fingerprint(ATTENTION_LAYOUT).__struct_fields__)


ATTENTION_LAYOUT = Layout((ATTENTION,) * 2)


@pytest.mark.parametrize("name", FLOATS)
def test_float_types_may_differ(name: DTypeName) -> None:
    ours, theirs = fingerprint(LAYOUTS["composite"]), fingerprint(as_floats(LAYOUTS["composite"], name))
    assert ours.differences(theirs) == []
    assert ours.digest() == theirs.digest()
    assert ours.same_weights(theirs)


def test_other_types_may_not() -> None:
    layout = LAYOUTS["attention"]
    ours = fingerprint(layout)
    theirs = fingerprint(with_dtypes(layout, ["int8"] * len(dtypes_of(layout))))
    assert {one.field for one in ours.differences(theirs, allow_quantisation=True)} == {"dtype", "layout"}
    assert ours.digest() != theirs.digest()


@pytest.mark.parametrize("text", ["", "float32", "float32x0", "float32x-1", "floatx4", "float32x9999999", "float32x٤"])
def test_a_type_that_is_none_differs(text: str) -> None:
    ours = fingerprint(ATTENTION_LAYOUT)
    theirs = msgspec.structs.replace(ours, dtype=text)
    assert [one.field for one in ours.differences(theirs)] == ["dtype"]
    assert converted(ATTENTION_LAYOUT, text) is None


def test_a_text_that_was_cut_has_to_be_equal() -> None:
    names = cast("list[DTypeName]", ["float32", "float16"] * 400)
    text = runs(names)
    assert len(text) == 4096
    assert expand(text) is None
    assert convertible(text, text)
    assert not convertible(text, runs(names[::-1]))


def test_types_are_written_and_read() -> None:
    names = dtypes_of(LAYOUTS["composite"])
    assert expand(runs(names)) == names
    assert with_dtypes(LAYOUTS["composite"], names) == LAYOUTS["composite"]
    assert converted(as_floats(LAYOUTS["composite"], "float16"), runs(names)) == LAYOUTS["composite"]


def test_weights_in_another_quantisation_only_where_allowed() -> None:
    ours = fingerprint(ATTENTION_LAYOUT)
    theirs = fingerprint(as_floats(ATTENTION_LAYOUT, "bfloat16"), weights="x", quantisation="4-bit")
    assert {one.field for one in ours.differences(theirs)} == {"quantisation", "weights"}
    assert ours.differences(theirs, allow_quantisation=True) == []
    assert not ours.same_weights(theirs)


# ----------------------------------------------------------------------------------------------------------- values


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 65504, 65519, 65520, 1e-8, 1e-45, 6e-8],
    np.float32,
)


def samples() -> Array:
    bits = np.random.default_rng(5).integers(0, 1 << 32, 4000, np.uint32)
    return np.concatenate([SPECIAL, bits.view(np.float32)])


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_widening_and_back_changes_nothing(source: DTypeName) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    narrow = every if source == "bfloat16" else every.view(np.float16)
    wide = convert(narrow, source, "float32")
    assert wide.dtype == np.float32
    back = convert(wide, "float32", source)
    numbers = ~np.isnan(wide)
    assert np.array_equal(back.view(np.uint16)[numbers], every[numbers])
    assert np.isnan(to_float32(back, source)[~numbers]).all()


@pytest.mark.parametrize(("target", "largest"), [("bfloat16", 3.3895313892515355e38), ("float16", 65504.0)])
def test_narrowing_takes_the_nearest(target: DTypeName, largest: float) -> None:
    values = samples()
    before = values.copy()
    rounded = convert(values, "float32", target)
    assert np.array_equal(values, before, equal_nan=True)
    with np.errstate(invalid="ignore"):
        wide = to_float32(rounded, target).astype(np.float64)
    finite = np.isfinite(values)
    assert np.isfinite(wide[finite]).all()
    assert np.array_equal(np.isnan(wide), np.isnan(values))
    assert np.array_equal(wide[np.isinf(values)], values[np.isinf(values)])
    # No neighbour is nearer, and of two that are as near the even one was taken.
    exact = np.clip(values[finite].astype(np.float64), -largest, largest)
    patterns = rounded.view(np.uint16)[finite]
    error = np.abs(wide[finite] - exact)
    for step in (-1, 1):
        neighbours = (patterns.astype(np.int64) + step).clip(0, 0xFFFF).astype(np.uint16)
        pattern = neighbours if target == "bfloat16" else neighbours.view(np.float16)
        other = to_float32(pattern, target).astype(np.float64)
        with np.errstate(invalid="ignore"):
            distance = np.abs(other - exact)
        usable = np.isfinite(other) & (np.signbit(other) == np.signbit(wide[finite]))
        assert (error[usable] <= distance[usable]).all()
        ties = usable & (error == distance) & (error > 0)
        assert (patterns[ties] % 2 == 0).all()


def test_the_same_type_is_not_copied() -> None:
    values = samples()
    assert convert(values, "float32", "float32") is values


def test_between_the_narrow_types() -> None:
    halves = np.array([1.0, 0.333, 65504], np.float16)
    there = convert(halves, "float16", "bfloat16")
    assert there.tolist() == [0x3F80, 0x3EAA, 0x4780]
    assert convert(there, "bfloat16", "float16").tolist() == [1.0, 0.33203125, 65504.0]


# --------------------------------------------------------------------------------------------------- over a socket


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("theirs", FLOATS)
@pytest.mark.parametrize("ours", FLOATS)
@pytest.mark.parametrize("kind", ["composite", "attention"])
def test_a_client_gets_its_own_types(kind: str, ours: DTypeName, theirs: DTypeName, codec: str) -> None:
    mine, server_layout = as_floats(LAYOUTS[kind], ours), as_floats(LAYOUTS[kind], theirs)
    wanted = Wanted(0, 150, checkpoint=64)
    with serving(server_layout) as server:
        client = handoff(server.address, mine)
        staging = staged(wanted, mine)
        outcome = client.transfer(PROMPT, staging, codecs=(codec,)).run()
        client.close()
    assert outcome.error is None
    assert not outcome.mixed
    assert outcome.complete == 150
    cache = SyntheticCache(server_layout)
    for index, layer in enumerate(mine.layers):
        for number, part in enumerate(layer.parts):
            source = server_layout.layers[index].parts[number].dtype
            for span in layer.needed(0, 150):
                expected = convert(cache.entries(PROMPT, index, number, *span), source, part.dtype)
                received = staging.entries(index, number, *span)
                assert received.dtype == expected.dtype
                if codec == "raw" or not DTYPES[part.dtype].is_float:
                    assert np.array_equal(received, expected)
                else:
                    assert np.allclose(to_float32(received, part.dtype), to_float32(expected, part.dtype), atol=0.02)
        for number, state in enumerate(layer.states):
            source = server_layout.layers[index].states[number].dtype
            made = convert(cache.state(PROMPT, index, number, 150), source, state.dtype)
            assert np.array_equal(staging.state(index, number, 150), made)


def test_a_model_of_other_types_that_no_conversion_helps_is_refused() -> None:
    with serving(LAYOUTS["quantised"]) as server:
        names = dtypes_of(LAYOUTS["quantised"])
        other = with_dtypes(LAYOUTS["quantised"], ["uint8" if name == "uint32" else name for name in names])
        client = handoff(server.address, other)
        with pytest.raises(IncompatiblePeerError, match="dtype"):
            client.connect()
        client.close()


# ----------------------------------------------------------------------------------- servers without checkpoints


MIXED = Layout((ATTENTION, WINDOW, *(layer for layer in LAYOUTS["composite"].layers if layer.kind == "state")))


def test_a_server_may_have_windows_and_states_for_the_end_alone() -> None:
    with serving(MIXED, checkpoints=False) as server:
        client = handoff(server.address, MIXED)
        staging = staged(Wanted(0, 300, checkpoint=64), MIXED)
        outcome = client.transfer(PROMPT, staging).run()
        assert outcome.error is None
        assert outcome.complete == 300
        assert wrong_entries(staging, 300) == ""
        client.close()


def test_the_rest_from_such_a_server() -> None:
    """A hand-off that broke off at one server goes on at another that has no checkpoints."""
    staging, cache = staged(Wanted(0, 300, checkpoint=64), MIXED), SyntheticCache(MIXED)
    with serving(MIXED, checkpoints=False) as server:
        client = handoff(server.address, MIXED)
        outcome = client.transfer(PROMPT, staging, wanted=Wanted(100, 300, checkpoint=64)).run()
        client.close()
    assert outcome.error is None
    assert np.array_equal(staging.entries(0, 0, 100, 300), cache.entries(PROMPT, 0, 0, 100, 300))


def test_such_a_server_refuses_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(MIXED, checkpoints=False) as server:
        client = handoff(server.address, MIXED)
        link = client.peer.take()
        monkeypatch.setattr(link, "welcome", msgspec.structs.replace(link.welcome, checkpoints=True))
        client.peer.give_back(link)
        outcome = client.transfer(PROMPT, staged(Wanted(0, 300, checkpoint=64), MIXED)).run()
        assert isinstance(outcome.error, PeerRefusedError)
        assert "checkpoint" in outcome.error.message
        client.close()
