"""Staging: what it refuses before it is received, and what it calls complete."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import HandoffError, InvalidRequestError, WireError
from tandem.kv.codec import CODECS
from tandem.kv.control import Done
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.intake import Intake
from tandem.kv.intervals import Span
from tandem.kv.job import Outgoing
from tandem.kv.layout import Layer, Layout, Part
from tandem.kv.outgoing import Frame, frames_of
from tandem.kv.plan import Plan, Wanted
from tandem.kv.staging import Staging
from tandem.kv.synthetic import SyntheticCache
from tandem.kv.wire import FrameType
from tests.kv.layouts import LAYOUTS

NONCE = 77
TOKENS = np.random.default_rng(3).integers(0, 50000, 600).astype(np.uint32)


def frames(plan: Plan, *, step: int = 13, codec: str = "raw", frame_bytes: int = 2048) -> list[Frame]:
    """What a server sends for a plan, chunk by chunk."""
    cache, found = SyntheticCache(plan.layout), []
    points = sorted({*range(0, plan.wanted.end, step), *plan.checkpoints})
    for first, last in zip([0, *points], points, strict=False):
        for index in plan.layers:
            layer = plan.layer(index)
            for number, part in enumerate(layer.parts):
                for span in plan.spans(index):
                    start, end = max(first, span.start), min(last, span.end)
                    if start < end:
                        heads = plan.heads(part)
                        array = cache.entries(TOKENS, index, number, start, end)[heads.start : heads.end]
                        item = Outgoing(index, number, heads.start, start, array, False)
                        found.extend(frames_of(item, plan.layout, NONCE, codec, frame_bytes))
            if last in plan.checkpoints:
                for number in range(len(layer.states)):
                    item = Outgoing(index, number, 0, last, cache.state(TOKENS, index, number, last), True)
                    found.extend(frames_of(item, plan.layout, NONCE, codec, frame_bytes))
    return [Frame(one.header._replace(length=sum(len(view) for view in one.views)), one.views) for one in found]


def put(intake: Intake, frame: Frame) -> None:
    """Receive a frame."""
    views = intake.destinations(frame.header)
    payload = b"".join(frame.views)
    assert sum(len(view) for view in views) == len(payload)
    position = 0
    for view in views:
        view[:] = payload[position : position + len(view)]
        position += len(view)
    intake.commit(frame.header)


def done(plan: Plan) -> Done:
    return Done(tuple(plan.count(index) for index in plan.layers), plan.wanted.end, 0)


def check_contents(staging: Staging, upto: int, *, start: int | None = None) -> None:
    """Everything that a cache of `upto` tokens needs is there, and right."""
    cache, plan = SyntheticCache(staging.plan.layout), staging.plan
    first = plan.wanted.start if start is None else start
    for index in plan.layers:
        layer = plan.layer(index)
        for span in layer.needed(first, upto):
            for number, part in enumerate(layer.parts):
                heads = plan.heads(part)
                expected = cache.entries(TOKENS, index, number, *span)[heads.start : heads.end]
                np.testing.assert_array_equal(staging.entries(index, number, *span), expected)
        for number in range(len(layer.states)):
            np.testing.assert_array_equal(staging.state(index, number, upto), cache.state(TOKENS, index, number, upto))


@pytest.mark.parametrize(
    "wanted", [Wanted(0, 1), Wanted(0, 100), Wanted(37, 150), Wanted(99, 100), Wanted(5, 90, checkpoint=16)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_everything_arrives(name: str, wanted: Wanted) -> None:
    staging = Staging(LAYOUTS[name], wanted)
    intake = staging.open(NONCE)
    assert staging.complete_through() == wanted.start
    for frame in frames(intake.plan):
        put(intake, frame)
    intake.finish(done(intake.plan))
    assert intake.finished
    assert staging.complete_through() == wanted.end
    check_contents(staging, wanted.end)
    with pytest.raises(HandoffError, match="nothing left"):
        staging.rest()


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    wanted=st.builds(
        lambda start, length, checkpoint: Wanted(start, start + length, checkpoint=checkpoint),
        st.integers(0, 120),
        st.integers(1, 120),
        st.sampled_from([0, 8, 30]),
    ),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    codec=st.sampled_from(["raw", "raw", "int8"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_peers_that_break_off_leave_what_is_complete(
    name: str, wanted: Wanted, cuts: list[float], order: object, codec: str
) -> None:
    """Any number of peers break off at any frame, each sends in any order; the last one finishes the rest."""
    staging = Staging(LAYOUTS[name], wanted)
    shuffle: Callable[[list[Frame]], None] = order.shuffle  # type: ignore[attr-defined]
    for cut in [*cuts, 1.0]:
        if staging.complete_through() == wanted.end:
            break
        intake = staging.open(NONCE)
        intake.codec = codec
        sent = frames(intake.plan, codec=codec)
        if cut < 1.0:
            shuffle(sent)
        before = staging.complete_through()
        for frame in sent[: int(cut * len(sent))]:
            put(intake, frame)
            assert staging.complete_through() >= before
        if cut == 1.0:
            intake.finish(done(intake.plan))
        intake.close()
        if codec == "raw":
            check_contents(staging, staging.complete_through()) if staging.complete_through() > wanted.start else None
    assert staging.complete_through() == wanted.end


def test_attention_is_usable_up_to_any_token() -> None:
    staging = Staging(LAYOUTS["attention"], Wanted(10, 100))
    intake = staging.open(NONCE)
    for frame in frames(intake.plan, step=13):
        if frame.header.token_end > 52 and frame.header.layer == 1:
            break
        put(intake, frame)
    assert staging.complete_through() == 52
    check_contents(staging, 52)
    assert staging.rest() == Wanted(52, 100)


def test_windows_and_states_are_usable_at_checkpoints_only() -> None:
    staging = Staging(LAYOUTS["composite"], Wanted(0, 200, checkpoint=50))
    intake = staging.open(NONCE)
    seen = set()
    for frame in frames(intake.plan):
        put(intake, frame)
        seen.add(staging.complete_through())
    assert seen == {0, 50, 100, 150, 200}
    # States of checkpoints that a later complete one replaced are gone.
    assert {key[2] for key in staging.states} <= {150, 200}


def test_several_peers_at_once() -> None:
    """Two prefill ranks with half the layers each, and their heads from two more."""
    layout, wanted = LAYOUTS["attention"], Wanted(0, 60)
    staging = Staging(layout, wanted)
    shares = [
        wanted._replace(layers=Span(layer, layer + 1), heads=heads)
        for layer in (0, 1)
        for heads in (Span(0, 1), Span(1, 3))
    ]
    intakes = [staging.open(NONCE, share) for share in shares]
    for batch in zip(*(frames(intake.plan) for intake in intakes), strict=True):
        for intake, frame in zip(intakes, batch, strict=True):
            put(intake, frame)
    for intake in intakes:
        intake.finish(done(intake.plan))
    assert staging.complete_through() == 60
    check_contents(staging, 60)


def test_one_rank_of_several_stages_its_own_heads_and_layers() -> None:
    wanted = Wanted(0, 60, layers=Span(1, 2), heads=Span(1, 3))
    staging = Staging(LAYOUTS["attention"], wanted)
    intake = staging.open(NONCE)
    for frame in frames(intake.plan):
        put(intake, frame)
    intake.finish(done(intake.plan))
    check_contents(staging, 60)
    assert staging.nbytes == 60 * 2 * 2 * 16 * 4


# ----------------------------------------------------------------------------------------------------------- refusals


def opened(name: str = "composite", wanted: Wanted | None = None) -> tuple[Staging, Intake, list[Frame]]:
    staging = Staging(LAYOUTS[name], wanted or Wanted(20, 120))
    intake = staging.open(NONCE)
    return staging, intake, frames(intake.plan)


def of_layer(sent: list[Frame], layer: int) -> Frame:
    return next(frame for frame in sent if frame.header.layer == layer)


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (0, {"nonce": 78}, "stale or foreign"),
        (0, {"nonce": 0}, "stale or foreign"),
        (0, {"layer": 6}, "not asked for"),
        (0, {"layer": 4095}, "not asked for"),
        (0, {"part": 2}, "not asked for"),
        (0, {"token_start": 19}, "not asked for"),
        (0, {"token_start": 119, "token_count": 2}, "not asked for"),
        (0, {"token_count": 2**23}, "not asked for"),
        (0, {"head_start": 3}, "not asked for"),
        (0, {"head_count": 4}, "not asked for"),
        (0, {"head_count": 65535, "head_start": 65535}, "not asked for"),
        (0, {"dtype": 3}, "dtype 3 came for dtype 1"),
        (0, {"codec": 1}, "where raw was agreed"),
        (0, {"length": 4}, "bytes came for"),
        (0, {"length": 64 << 20}, "bytes came for"),
        (2, {"token_start": 79}, "not asked for"),
        (1, {"token_count": 119}, "not asked for"),
        (1, {"part": 2}, "not asked for"),
        (1, {"layer": 0}, "not asked for"),
        (1, {"dtype": 3}, "dtype 3 came for dtype 1"),
        (1, {"length": 4}, "for one of"),
    ],
)
def test_frames_that_were_not_asked_for(layer: int, changes: dict[str, int], message: str) -> None:
    staging, intake, sent = opened()
    frame = of_layer(sent, layer)
    header = frame.header._replace(**changes)
    with pytest.raises(WireError, match=message):
        intake.destinations(header)
    # Nothing was changed: the right frame still fits.
    put(intake, frame)
    assert staging.complete_through() == 20


def test_duplicates_are_refused_before_they_are_received() -> None:
    _, intake, sent = opened()
    for frame in (of_layer(sent, 0), of_layer(sent, 1)):
        put(intake, frame)
        with pytest.raises(WireError, match="came twice"):
            intake.destinations(frame.header)


def test_overlaps_are_refused() -> None:
    _, intake, sent = opened("attention")
    frame = of_layer(sent, 0)
    put(intake, frame)
    row = frame.header.length // (frame.header.head_count * frame.header.token_count)
    one = frame.header._replace(head_start=1, head_count=1, token_start=frame.header.token_end - 1, token_count=2)
    with pytest.raises(WireError, match="came twice"):
        intake.destinations(one._replace(length=2 * row))


def test_what_was_announced_and_not_verified_does_not_count() -> None:
    staging, intake, sent = opened("attention", Wanted(0, 10))
    for frame in sent[:-1]:
        put(intake, frame)
    intake.destinations(sent[-1].header)
    assert staging.complete_through() == 0
    with pytest.raises(WireError, match="or not all arrived"):
        intake.finish(done(intake.plan))
    with pytest.raises(WireError, match="while none is expected"):
        intake.destinations(sent[-1].header)
    # A second peer may send it again.
    again = staging.open(NONCE + 1)
    for frame in frames(again.plan):
        put(again, Frame(frame.header._replace(nonce=NONCE + 1), frame.views))
    assert staging.complete_through() == 10
    with pytest.raises(WireError, match="not announced"):
        again.commit(sent[0].header)


def test_a_short_count_with_everything_there_is_refused() -> None:
    staging, intake, sent = opened()
    for frame in sent:
        put(intake, frame)
    right = done(intake.plan)
    for index in range(len(right.counts)):
        counts = tuple(count - (number == index) for number, count in enumerate(right.counts))
        with pytest.raises(WireError, match="finished with"):
            intake.finish(Done(counts, right.end, 0))
    for wrong in (Done(right.counts[1:], right.end, 0), Done(right.counts, right.end - 1, 0), Done((), 0, 0)):
        with pytest.raises(WireError, match="asked for were"):
            intake.finish(wrong)
    assert not intake.finished
    intake.finish(right)
    assert staging.complete_through() == 120


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_count_with_something_missing_is_refused(name: str) -> None:
    plan = Plan(LAYOUTS[name], Wanted(20, 120, checkpoint=50))
    total = len(frames(plan))
    for missing in {0, total // 2, total - 1}:
        staging = Staging(LAYOUTS[name], Wanted(20, 120, checkpoint=50))
        intake = staging.open(NONCE)
        for number, frame in enumerate(frames(intake.plan)):
            if number != missing:
                put(intake, frame)
        if staging.complete_through() < 120:
            with pytest.raises(WireError, match="not all arrived"):
                intake.finish(done(intake.plan))


def test_nothing_follows_the_end() -> None:
    _, intake, sent = opened("attention")
    intake.close()
    with pytest.raises(WireError, match="none is expected"):
        intake.destinations(sent[0].header)


def test_unverified_entries_cannot_be_read() -> None:
    staging, intake, sent = opened("hybrid")
    with pytest.raises(HandoffError, match="not here"):
        staging.entries(1, 0, 20, 21)
    with pytest.raises(HandoffError, match="not here"):
        staging.state(0, 0, 120)
    for frame in sent:
        put(intake, frame)
    entries = staging.entries(1, 0, 20, 120)
    assert not entries.flags.writeable
    assert not staging.state(0, 0, 120).flags.writeable
    for outside in ((19, 21), (119, 121)):
        with pytest.raises(HandoffError, match="not here"):
            staging.entries(1, 0, *outside)
    staging.release(1)
    with pytest.raises(HandoffError, match="not here"):
        staging.entries(1, 0, 20, 21)


def test_released_memory_goes_back() -> None:
    """Present pages, as the kernel counts them for the process."""
    layout = Layout((Layer("tokens", (Part("keys", 8, 256, "float32"), Part("values", 8, 256, "float32"))),) * 4)
    staging = Staging(layout, Wanted(0, 1024))
    for buffer in staging.parts.values():
        buffer.segments[0].array[:] = 1
    resident = psutil.Process().memory_info().rss
    for layer in range(3):
        staging.release(layer)
    assert resident - psutil.Process().memory_info().rss > 0.6 * staging.nbytes
    assert staging.parts[3, 0].segments[0].array.all()
    assert staging.parts[3, 1].segments[0].array.all()


def test_a_frame_for_a_released_layer_is_refused() -> None:
    staging, intake, sent = opened("attention")
    staging.release(0)
    with pytest.raises(WireError, match="no longer received"):
        intake.destinations(of_layer(sent, 0).header)


def test_an_intake_stays_within_its_staging() -> None:
    staging = Staging(LAYOUTS["attention"], Wanted(10, 100, layers=Span(0, 1)))
    for outside in (Wanted(9, 100, layers=Span(0, 1)), Wanted(10, 101, layers=Span(0, 1)), Wanted(10, 100)):
        with pytest.raises(InvalidRequestError, match="not within"):
            staging.open(NONCE, outside)


class Cache:
    """An engine's arrays: room for 128 tokens, for all parts of layer 0."""

    def __init__(self, layout: Layout) -> None:
        self.arrays = [
            np.full((part.heads, 128, part.dim), 7, DTYPES[part.dtype].array) for part in layout.layers[0].parts
        ]

    def view(self, layer: int, part: int) -> Array | None:
        return self.arrays[part] if layer == 0 else None


def test_entries_arrive_in_the_engines_own_memory() -> None:
    layout = LAYOUTS["attention"]
    cache, plain = Cache(layout), Staging(layout, Wanted(0, 100))
    landed = Staging(layout, Wanted(0, 100), landing=cache)
    for staging in (landed, plain):
        intake = staging.open(NONCE)
        for sent in frames(intake.plan):
            put(intake, sent)
    for layer, spec in enumerate(layout.layers):
        for part in range(len(spec.parts)):
            np.testing.assert_array_equal(landed.entries(layer, part, 0, 100), plain.entries(layer, part, 0, 100))
    for part, array in enumerate(cache.arrays):
        np.testing.assert_array_equal(array[:, :100], plain.entries(0, part, 0, 100))
        assert (array[:, 100:] == 7).all()


def test_some_heads_do_not_land() -> None:
    layout = LAYOUTS["attention"]
    staging = Staging(layout, Wanted(0, 100, heads=Span(0, 1)), landing=Cache(layout))
    assert staging.parts[0, 0].segments[0].array.shape == (1, 100, layout.layers[0].parts[0].dim)


def test_encoded_frames_must_be_in_the_agreed_codec() -> None:
    _, intake, _ = opened("attention")
    encoded = frames(intake.plan, codec="int4")
    intake.codec = "int8"
    with pytest.raises(WireError, match="codec int4 came where int8"):
        intake.destinations(encoded[0].header)
    intake.codec = "int4"
    put(intake, encoded[0])
    assert CODECS["int4"].name == "int4"


def test_packed_entries_are_never_encoded() -> None:
    staging = Staging(LAYOUTS["quantised"], Wanted(0, 20))
    intake = staging.open(NONCE)
    intake.codec = "int8"
    sent = frames(intake.plan, codec="int8")
    packed = next(frame for frame in sent if frame.header.part == 0)
    assert packed.header.codec == 0
    with pytest.raises(WireError, match="cannot be in codec"):
        intake.destinations(packed.header._replace(codec=1))
    assert {frame.header.type for frame in sent} == {FrameType.DATA}
