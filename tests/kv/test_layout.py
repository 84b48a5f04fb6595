"""Layouts and plans: which entries, how many bytes; fingerprints."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequestError
from tandem.kv.intervals import Span
from tandem.kv.layout import Layer, Layout, Part, StateArray
from tandem.kv.plan import Plan, Wanted
from tests.kv.layouts import ATTENTION, LAYOUTS, QUANTISED, RECURRENT, SINKS, WINDOW, fingerprint


def test_bytes_per_token_of_known_models() -> None:
    # SmolLM2-135M: 30 layers, 3 heads of 64; Llama 3.1 8B: 32 layers, 8 heads of 128, 128 KiB a token in 2 bytes.
    def dense(layers: int, heads: int, dim: int, dtype: str) -> Layout:
        parts = tuple(Part(name, heads, dim, dtype) for name in ("keys", "values"))  # type: ignore[arg-type]
        return Layout((Layer("tokens", parts),) * layers)

    assert dense(30, 3, 64, "float32").bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert dense(32, 8, 128, "bfloat16").bytes_per_token == 128 << 10
    # DeepSeek V3: a latent of 512 and 64 rotated dimensions in 61 layers, 68.6 KiB.
    latent = Layer("tokens", (Part("keys", 1, 512, "bfloat16"), Part("values", 1, 64, "bfloat16")))
    assert Layout((latent,) * 61).bytes_per_token == 70272


def test_windows_are_cut() -> None:
    layout = Layout((WINDOW, ATTENTION))
    per_token = WINDOW.bytes_per_token
    assert layout.bytes_between(0, 1000) == 40 * per_token + 1000 * ATTENTION.bytes_per_token
    assert layout.bytes_between(0, 39) == 39 * per_token + 39 * ATTENTION.bytes_per_token
    assert layout.bytes_between(990, 1000) == 10 * per_token + 10 * ATTENTION.bytes_per_token
    assert layout.window_bytes_per_token == per_token


def test_sinks_stay() -> None:
    assert SINKS.held(1000) == (Span(0, 4), Span(980, 1000))
    assert SINKS.held(24) == (Span(0, 24),)
    assert SINKS.held(25) == (Span(0, 4), Span(5, 25))
    assert SINKS.needed(2, 1000) == (Span(2, 4), Span(980, 1000))
    assert SINKS.needed(990, 1000) == (Span(990, 1000),)


def test_states_have_constant_size() -> None:
    layout = Layout((RECURRENT,))
    assert layout.bytes_per_token == 0
    assert layout.state_bytes == layout.bytes_between(0, 5) == layout.bytes_between(0, 5000) == 4 * (24 + 32)


def test_quantised_entries_count_as_packed() -> None:
    assert QUANTISED.bytes_per_token == 2 * 2 * (8 * 4 + 2 + 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_survive_encoding(name: str) -> None:
    layout = LAYOUTS[name]
    again = Layout.decode(layout.encode())
    assert again == layout
    assert again.digest() == layout.digest()


def test_digests_differ() -> None:
    assert len({layout.digest() for layout in LAYOUTS.values()}) == len(LAYOUTS)


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": []},
        {"layers": [{"kind": "tokens"}]},
        {"layers": [{"kind": "state", "parts": [{"name": "k", "heads": 1, "dim": 1, "dtype": "float32"}]}]},
        {"layers": [{"kind": "window", "parts": [{"name": "k", "heads": 1, "dim": 1, "dtype": "float32"}]}]},
        {"layers": [{"kind": "tokens", "parts": [{"name": "k", "heads": 0, "dim": 1, "dtype": "float32"}]}]},
        {"layers": [{"kind": "tokens", "parts": [{"name": "k", "heads": 1, "dim": 1, "dtype": "complex64"}]}]},
        {"layers": [{"kind": "tokens", "parts": [{"name": "k", "heads": 1, "dim": -1, "dtype": "float32"}]}]},
        {"layers": "x"},
    ],
)
def test_nonsense_is_no_layout(bad: object) -> None:
    with pytest.raises(InvalidRequestError, match="not a cache layout"):
        Layout.decode(msgspec.msgpack.encode(bad))


def test_sinks_must_leave_a_window() -> None:
    with pytest.raises(ValueError, match="leave nothing"):
        Layer("window", ATTENTION.parts, window=4, sinks=4)


# ------------------------------------------------------------------------------------------------------------- plans


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    ends=st.tuples(st.integers(0, 300), st.integers(1, 300)),
    checkpoint=st.sampled_from([0, 1, 7, 32, 1000]),
)
def test_a_plan_lists_what_is_held_at_its_checkpoints(name: str, ends: tuple[int, int], checkpoint: int) -> None:
    start, end = ends[0], ends[0] + ends[1]
    plan = Plan(LAYOUTS[name], Wanted(start, end, checkpoint=checkpoint))
    assert plan.checkpoints[-1] == end
    assert all(start < point <= end for point in plan.checkpoints)
    for index, layer in enumerate(LAYOUTS[name].layers):
        sent = {token for span in plan.spans(index) for token in range(*span)}
        if layer.kind == "tokens":
            assert sent == set(range(start, end))
        elif layer.kind == "window":
            kept = layer.window - layer.sinks
            expected = {
                token
                for point in plan.checkpoints
                for token in range(start, point)
                if token < layer.sinks or token >= point - kept or point <= layer.window
            }
            assert sent == expected
        else:
            assert not sent
            assert plan.count(index) == len(plan.checkpoints)


def test_a_plan_without_checkpoints_has_the_bytes_of_its_layout() -> None:
    for layout in LAYOUTS.values():
        assert Plan(layout, Wanted(3, 333)).nbytes == layout.bytes_between(3, 333)


def test_parts_of_a_cache() -> None:
    layout = LAYOUTS["composite"]
    half = Plan(layout, Wanted(0, 10, layers=Span(0, 1), heads=Span(1, 3)))
    assert half.nbytes == 10 * 2 * (2 * 16 * 4)
    # The single head of a latent is everybody's.
    latent = Plan(LAYOUTS["latent"], Wanted(0, 10, heads=Span(1, 3)))
    assert latent.nbytes == LAYOUTS["latent"].bytes_between(0, 10)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(5, 5),
        Wanted(-1, 5),
        Wanted(6, 5),
        Wanted(0, 1 << 24),
        Wanted(0, 5, layers=Span(0, 7)),
        Wanted(0, 5, layers=Span(3, 3)),
        Wanted(0, 5, heads=Span(0, 3)),
        Wanted(0, 5, heads=Span(1, 1)),
        Wanted(0, 1 << 20, checkpoint=1),
        Wanted(0, 5, checkpoint=-1),
    ],
)
def test_impossible_ranges_are_refused(wanted: Wanted) -> None:
    with pytest.raises(InvalidRequestError):
        Plan(LAYOUTS["composite"], wanted)


# ------------------------------------------------------------------------------------------------------ fingerprints


def test_equal_models_do_not_differ() -> None:
    one, other = fingerprint(LAYOUTS["composite"]), fingerprint(LAYOUTS["composite"])
    assert one.differences(other) == []
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("field", "layout", "changes"),
    [
        (
            "heads",
            Layout((Layer("tokens", (Part("keys", 4, 16, "float32"), Part("values", 3, 16, "float32"))),) * 2),
            {},
        ),
        ("dims", Layout((Layer("tokens", (Part("keys", 3, 8, "float32"), Part("values", 3, 16, "float32"))),) * 2), {}),
        (
            "dtype",
            Layout((Layer("tokens", (Part("keys", 3, 16, "int16"), Part("values", 3, 16, "float32"))),) * 2),
            {},
        ),
        ("layers", Layout((ATTENTION,)), {}),
        ("window", Layout((ATTENTION, Layer("window", ATTENTION.parts, window=8))), {}),
        ("rope", LAYOUTS["attention"], {"rope": '{"theta":1}'}),
        ("layout", Layout((Layer("tokens", (Part("k", 3, 16, "float32"), Part("values", 3, 16, "float32"))),) * 2), {}),
    ],
)
def test_differences_are_named(field: str, layout: Layout, changes: dict[str, str]) -> None:
    ours, theirs = fingerprint(LAYOUTS["attention"]), fingerprint(layout, **changes)
    found = {difference.field: difference for difference in ours.differences(theirs, allow_quantisation=True)}
    assert found[field].ours == str(getattr(ours, field))
    assert found[field].theirs == str(getattr(theirs, field))
    assert ours.digest() != theirs.digest()


def test_only_the_quantisation_may_be_allowed_to_differ() -> None:
    ours = fingerprint(LAYOUTS["attention"])
    quantised = fingerprint(LAYOUTS["attention"], weights="x", quantisation="4-bit")
    retrained = fingerprint(LAYOUTS["attention"], weights="x")
    assert {one.field for one in ours.differences(quantised)} == {"quantisation", "weights"}
    assert ours.differences(quantised, allow_quantisation=True) == []
    assert [one.field for one in ours.differences(retrained, allow_quantisation=True)] == ["weights"]
    assert ours.digest() == quantised.digest()


def test_shapes_of_states_are_in_the_fingerprint() -> None:
    one = fingerprint(Layout((Layer("state", states=(StateArray("s", (1, 2), "float32"),)),)))
    other = fingerprint(Layout((Layer("state", states=(StateArray("s", (2, 1), "float32"),)),)))
    assert "dims" in {difference.field for difference in one.differences(other)}
