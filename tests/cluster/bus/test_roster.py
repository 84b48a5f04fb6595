"""Who counts as alive, for every order in which tokens, heartbeats and time can come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.bus.roster import (
    FORGET,
    GRACE,
    LISTED,
    OWN_GRACE,
    RESTARTED,
    SILENT,
    Conflict,
    Heard,
    Heartbeat,
    Joined,
    Known,
    Left,
    MemberEvent,
    Roster,
    digest_of,
)


def beat(node_id: str, life: str, age: float = 10.0, **values: object) -> Heartbeat:
    return Heartbeat(node_id, life, age, "zid", **values)  # type: ignore[arg-type]


def joined(now: float = 100.0) -> Roster:
    """A roster of `me` in which `other` has joined."""
    roster = Roster("me", "m1", now - 50)
    roster.token("other", "o1", True, now)
    roster.beat(beat("other", "o1"), now)
    assert roster.step(now) == [Joined("other", "o1", b"")]
    return roster


def test_token_and_heartbeat_make_a_member() -> None:
    for first in ("token", "beat"):
        roster = Roster("me", "m1", 0.0)
        for what in (first, "beat" if first == "token" else "token"):
            assert roster.step(1.0) == []
            if what == "token":
                roster.token("other", "o1", True, 1.0)
            else:
                assert roster.beat(beat("other", "o1", payload=b"x"), 1.0) == []
        assert roster.step(1.0) == [Joined("other", "o1", b"x")]
        assert roster.beat(beat("other", "o1", payload=b"y"), 2.0) == [Heard("other", "o1", b"y")]


def test_a_lost_token_is_forgiven_for_a_moment() -> None:
    roster = joined()
    roster.token("other", "o1", False, 101.0)
    assert roster.step(101.0) == []
    assert roster.due(101.0) <= GRACE
    roster.token("other", "o1", True, 101.0 + GRACE / 2)
    assert roster.step(101.0 + 2 * GRACE) == []
    roster.token("other", "o1", False, 102.0)
    assert roster.step(102.0 + GRACE) == [Left("other", "o1", "unreachable")]


def test_silence_is_death_and_a_heartbeat_life() -> None:
    roster = joined()
    assert roster.due(100.0) == SILENT
    assert roster.step(100.0 + SILENT) == [Left("other", "o1", "silent")]
    roster.beat(beat("other", "o1"), 110.0)
    assert roster.step(110.0) == [Joined("other", "o1", b"")]


def test_silence_that_was_not_listened_to_says_nothing() -> None:
    roster = joined()
    roster.stalled(120.0)
    assert roster.step(120.0) == []
    assert roster.step(120.0 + SILENT) == [Left("other", "o1", "silent")]


def test_goodbye() -> None:
    roster = joined()
    assert roster.beat(beat("other", "o1", leaving=True), 101.0) == []
    assert roster.step(101.0) == [Left("other", "o1", "closed")]
    roster.token("other", "o1", False, 101.1)
    assert roster.step(101.0 + FORGET + 1) == []
    assert not roster._lives


def test_a_restart_is_seen_before_the_old_token_is_gone() -> None:
    roster = joined()
    roster.token("other", "o2", True, 101.0)
    roster.beat(beat("other", "o2", age=0.1), 101.0)
    assert roster.step(101.0) == []
    assert roster.due(101.0) == RESTARTED - 1.0
    roster.beat(beat("other", "o2", age=1.6), 102.5)
    assert roster.step(102.5) == [Left("other", "o1", "restarted"), Joined("other", "o2", b"")]


def test_a_restart_after_the_token_is_gone_needs_no_patience() -> None:
    roster = joined()
    roster.token("other", "o1", False, 101.0)
    roster.token("other", "o2", True, 101.05)
    roster.beat(beat("other", "o2", age=0.1), 101.1)
    assert roster.step(101.1) == [Left("other", "o1", "restarted"), Joined("other", "o2", b"")]


def test_of_two_lives_the_first_counts() -> None:
    roster = joined()
    roster.token("other", "o2", True, 101.0)
    for now in (101.0, 102.0, 103.0, 104.0, 105.0, 106.0):
        roster.beat(beat("other", "o1", age=now - 90), now)
        roster.beat(beat("other", "o2", age=now - 101), now)
        assert roster.step(now) == []
    assert roster.joined == {"other": "o1"}
    both = Roster("me", "m1", 0.0)
    for life, age in (("young", 1.0), ("old", 9.0)):
        both.token("other", life, True, 10.0)
        both.beat(beat("other", life, age=age), 10.0)
    assert both.step(10.0) == [Joined("other", "old", b"")]


def test_the_second_of_two_with_one_id_is_told_once() -> None:
    second = Roster("me", "m2", 100.0)
    second.token("me", "m1", True, 101.0)
    elder = beat("me", "m1", age=40.0, endpoints=("tcp/a:1",))
    assert second.beat(elder, 101.0) == [Conflict("me", "m1", ("tcp/a:1",))]
    assert second.beat(elder, 102.0) == []
    assert second.step(102.0) == []
    first = Roster("me", "m1", 60.0)
    first.token("me", "m2", True, 101.0)
    assert first.beat(beat("me", "m2", age=1.0), 101.0) == []
    assert first.step(101.0) == []


def test_opening_anew_gives_everybody_time_to_be_seen_again() -> None:
    roster = joined()
    roster.reopened(101.0)
    assert roster.step(102.0) == []
    roster.token("other", "o1", True, 102.5)
    roster.beat(beat("other", "o1"), 102.5)
    assert roster.step(102.5 + OWN_GRACE) == []
    gone = joined()
    gone.reopened(101.0)
    assert gone.step(101.0 + OWN_GRACE) == [Left("other", "o1", "unreachable")]


def test_those_whom_only_others_see() -> None:
    roster = joined()
    known = (Known("third", "t1", ("tcp/t:1",)), Known("me", "m1", ()), Known("other", "o1", ()))
    roster.beat(beat("other", "o1", known=known), 101.0)
    assert roster.unlinked(101.0) == {("third", "t1"): ("tcp/t:1",)}
    # Heartbeats without a list do not end it; agreement does, age does, and seeing them does.
    roster.beat(beat("other", "o1", digest=1), 102.0)
    assert roster.unlinked(102.0)
    assert roster.unlinked(101.0 + LISTED) == {}
    assert roster.disagrees()
    roster.beat(beat("other", "o1", digest=digest_of([("me", "m1"), ("other", "o1")])), 102.5)
    assert roster.unlinked(102.5) == {}
    assert not roster.disagrees()
    roster.beat(beat("other", "o1", known=known), 103.0)
    roster.token("third", "t1", True, 103.5)
    assert roster.unlinked(103.5) == {}


def test_equal_views_have_equal_digests() -> None:
    lives = [("a", "1"), ("b", "1"), ("c", "2")]
    assert digest_of(lives) == digest_of(reversed(lives))
    assert digest_of(lives) != digest_of(lives[1:])
    assert digest_of(lives) != digest_of([("a", "1"), ("b", "2"), ("c", "2")])


IDS = st.sampled_from(["me", "a", "b"])
LIVES = st.sampled_from(["1", "2"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), IDS, LIVES, st.booleans()),
        st.tuples(st.just("beat"), IDS, LIVES, st.booleans()),
        st.tuples(st.just("reopened"), st.just("me"), st.just("1"), st.booleans()),
        st.tuples(st.just("wait"), st.just("me"), st.just("1"), st.booleans()),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_joining_and_leaving_alternate_whatever_happens(actions: list[tuple[str, str, str, bool]]) -> None:
    roster, now, present = Roster("me", "1", 0.0), 1.0, dict[str, str]()
    events: list[MemberEvent] = []
    for what, node_id, life, flag in actions:
        if what == "token":
            roster.token(node_id, life, flag, now)
        elif what == "beat":
            events = roster.beat(beat(node_id, life, age=now, leaving=flag), now)
        elif what == "reopened":
            roster.reopened(now)
        else:
            now += SILENT if flag else 0.2
        for event in [*events, *roster.step(now)]:
            if isinstance(event, Joined):
                assert event.node_id not in present
                present[event.node_id] = event.life
            elif isinstance(event, Left):
                assert present.pop(event.node_id) == event.life
            elif isinstance(event, Heard):
                assert present[event.node_id] == event.life
        events = []
        assert roster.joined == present
        assert "me" not in present
        assert roster.due(now) > 0
    # Without another sign of life everybody is gone in the end.
    for node_id in ("a", "b", "me"):
        for life in ("1", "2"):
            roster.token(node_id, life, False, now)
    roster.step(now + SILENT + OWN_GRACE)
    assert roster.joined == {}
    roster.step(now + FORGET + SILENT + OWN_GRACE)
    assert not roster._lives
