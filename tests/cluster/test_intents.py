"""Copies that saw the same entries are equal, and equal copies have equal digests."""

from __future__ import annotations

import random
from functools import reduce

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.clock import HybridClock
from tandem.cluster.exchange import Compare, Differs, Trade, decode, encode, fill, messages_of, pack, unpack
from tandem.cluster.intents import (
    BUCKETS,
    LARGEST_ENTRY,
    IntentMap,
    decode_entry,
    effective_links,
    encode_entry,
)
from tandem.cluster.state import ClusterState, IntentChanged, apply
from tandem.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError, WireError
from tandem.types.intents import CardIntent, Entry, Intent, Stamp, key_of
from tests.cluster.intent_network import DAY, instance, link

NOW = 1_800_000_000_000
VALUES: st.SearchStrategy[Intent] = st.one_of(
    st.builds(instance, st.sampled_from("abc"), st.sampled_from(["sim:", "other"])),
    st.builds(link, st.sampled_from("xy"), st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc"))),
    st.builds(
        CardIntent,
        st.sampled_from("mn"),
        st.dictionaries(st.text(max_size=3), st.one_of(st.booleans(), st.integers(0, 2), st.floats(), st.text())),
    ),
)
STAMPS = st.builds(Stamp, st.integers(NOW - 3, NOW + 3), st.integers(0, 1), st.sampled_from(["p", "q"]))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Any entry; many share keys, and some even stamps, as a faulty node might make them."""
    value = draw(VALUES)
    return Entry(key_of(value), value if draw(st.booleans()) else None, draw(STAMPS))


def copy_of(some: list[Entry]) -> IntentMap:
    return IntentMap(HybridClock("here", wall=lambda: NOW), some)


def content(held: IntentMap) -> set[bytes]:
    return {encode_entry(entry) for entry in held}


def exchange(one: IntentMap, other: IntentMap) -> int:
    """What `Replica.reconcile` does, without a network; how many entries travelled."""
    pending, sent = one.differing(other.bucket_digests()), 0
    while pending:
        offer = decode(encode(fill(one, pending)))
        assert isinstance(offer, Trade)
        other.merge(unpack(offer.entries)[0])
        reply = fill(other, offer.buckets, frozenset(map(bytes, offer.entries)))
        one.merge(unpack(reply.entries)[0])
        sent += len(offer.entries) + len(reply.entries)
        pending = [index for index in pending if index not in reply.buckets]
    return sent


@given(st.lists(entries(), max_size=30), st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(some: list[Entry], chance: random.Random) -> None:
    first, second = copy_of(some), copy_of([])
    shuffled = some + chance.choices(some, k=len(some)) if some else []
    chance.shuffle(shuffled)
    for entry in shuffled:
        second.merge([entry])
    assert content(first) == content(second)
    assert first.digest() == second.digest()
    assert first.bucket_digests() == second.bucket_digests()
    assert second.merge(some) == []


@given(st.lists(entries(), max_size=20), st.lists(entries(), max_size=20))
def test_digests_are_equal_exactly_if_maps_are(ours: list[Entry], theirs: list[Entry]) -> None:
    one, other = copy_of(ours), copy_of(theirs)
    assert (one.digest() == other.digest()) == (content(one) == content(other))
    for index in range(BUCKETS):
        same = {*map(encode_entry, one.bucket(index))} == {*map(encode_entry, other.bucket(index))}
        assert same == (index not in one.differing(other.bucket_digests()))


@given(st.lists(entries(), max_size=20), st.lists(entries(), max_size=20), st.lists(entries(), max_size=20))
def test_after_any_loss_an_exchange_makes_both_equal(both: list[Entry], ours: list[Entry], theirs: list[Entry]) -> None:
    one, other = copy_of(both + ours), copy_of(theirs + both)
    exchange(one, other)
    assert content(one) == content(other) == content(copy_of(both + ours + theirs))
    assert exchange(one, other) == 0


@given(st.lists(st.tuples(st.integers(0, 2), VALUES, st.booleans(), st.integers(-DAY, DAY)), max_size=30), st.data())
def test_three_nodes_with_wrong_clocks_agree_and_lose_nothing(
    steps: list[tuple[int, Intent, bool, int]], data: st.DataObject
) -> None:
    """Clocks jump by up to a day at every step. What was done with knowledge of something wins over it."""
    wall = NOW
    nodes = [IntentMap(HybridClock(name, wall=lambda: wall)) for name in "abc"]
    made: list[Entry] = []
    for number, value, removes, jump in steps:
        wall = NOW + jump
        node = nodes[number]
        known = node.get(key_of(value))
        if removes and known is not None and known.value is not None:
            made.append(node.remove(known.key))
        else:
            made.append(node.put(value))
        assert node.get(made[-1].key) == made[-1]
        assert known is None or made[-1].stamp > known.stamp
        if data.draw(st.booleans()):
            exchange(node, nodes[data.draw(st.integers(0, 2))])
    for one, other in ((0, 1), (1, 2), (0, 1)):
        exchange(nodes[one], nodes[other])
    newest = {entry.key: entry for entry in sorted(made, key=lambda entry: entry.stamp)}
    for node in nodes:
        assert content(node) == {encode_entry(entry) for entry in newest.values()}


@pytest.mark.parametrize("error", [-DAY, DAY])
def test_a_clock_wrong_by_a_day_neither_loses_nor_resurrects(error: int) -> None:
    right = IntentMap(HybridClock("right", wall=lambda: NOW))
    wrong = IntentMap(HybridClock("wrong", wall=lambda: NOW + error))
    exchange(right, wrong)
    for ours, theirs in ((right, wrong), (wrong, right)):
        ours.put(instance("a"))
        exchange(ours, theirs)
        theirs.remove("instance/a")
        exchange(ours, theirs)
        assert ours.get("instance/a") == theirs.get("instance/a")
        assert theirs.entries["instance/a"].value is None
        ours.put(instance("a", "again"))
        exchange(ours, theirs)
        assert theirs.entries["instance/a"].value == instance("a", "again")


def test_a_machine_that_slept_for_ten_years_resurrects_nothing_and_loses_nothing_of_its_own() -> None:
    wall = NOW
    awake, asleep = (IntentMap(HybridClock(name, wall=lambda: wall)) for name in ("awake", "asleep"))
    for number in range(50):
        awake.put(instance(f"old-{number}"))
    exchange(awake, asleep)
    asleep.put(instance("made alone"))
    for number in range(50):
        awake.remove(f"instance/old-{number}")
    wall += 3650 * DAY
    exchange(asleep, awake)
    for node in (awake, asleep):
        assert [entry.key for entry in node if entry.value is not None] == ["instance/made alone"]
        assert len(node) == 51


def test_equal_maps_exchange_nothing_and_others_only_buckets_that_differ() -> None:
    base = copy_of([])
    for number in range(2000):
        base.put(instance(f"i{number}"))
    one, other = copy_of(list(base)), copy_of(list(base))
    assert one.differing(other.bucket_digests()) == []
    assert exchange(one, other) == 0
    one.put(instance("new"))
    other.remove("instance/i7")
    assert len(one.differing(other.bucket_digests())) <= 2
    assert exchange(one, other) <= 40
    assert one.digest() == other.digest()


def test_long_differences_take_several_bounded_messages() -> None:
    one, other = copy_of([]), copy_of([])
    for number in range(60):
        one.put(CardIntent(f"m{number}", {"text": "x" * 20_000}))
        other.put(CardIntent(f"n{number}", {"text": "y" * 20_000}))
    assert max(len(encode(message)) for message in messages_of(one)) < 300_000
    assert len(messages_of(one)) > 3
    assert len(encode(fill(one, range(BUCKETS)))) < 300_000
    exchange(one, other)
    assert len(one) == len(other) == 120


def test_what_no_clock_or_map_made_is_left_out_everywhere() -> None:
    good = Entry("instance/a", instance("a"), Stamp(NOW, 0, "n"))
    bad = [
        Entry("instance/b", instance("a"), Stamp(NOW, 0, "n")),
        Entry("instance/a", instance("a"), Stamp(2**60, 0, "n")),
        Entry("instance/a", instance("a"), Stamp(NOW, 0, "")),
        Entry("card/m", CardIntent("m", {"text": "x" * LARGEST_ENTRY}), Stamp(NOW, 0, "n")),
    ]
    held = copy_of([])
    assert held.merge([*bad, good]) == [good]
    assert held.refused == len(bad)
    assert held.clock.last == good.stamp


def test_entries_of_a_newer_version_do_not_stop_the_others() -> None:
    good = Entry("instance/a", instance("a"), Stamp(NOW, 0, "n"))
    strange = msgspec.Raw(msgspec.msgpack.encode(["never", "seen"]))
    assert unpack([strange, *pack([good])]) == ([good], 1)


@pytest.mark.parametrize("value", [object(), {1: 2}, 2**70, {"deep": {2: "x"}}])
def test_what_cannot_travel_is_refused_and_changes_nothing(value: object) -> None:
    held = copy_of([])
    with pytest.raises(InvalidRequestError, match="card/m"):
        held.put(CardIntent("m", {"value": value}))
    with pytest.raises(PayloadTooLargeError):
        held.put(CardIntent("m", {"value": "x" * LARGEST_ENTRY}))
    assert len(held) == 0


def test_the_caller_keeps_its_card_and_the_map_its_own() -> None:
    card = {"tags": ("a", "b")}
    held = copy_of([])
    entry = held.put(CardIntent("m", card))
    card["tags"] = ("c",)
    assert held.get("card/m") == entry == decode_entry(encode_entry(entry))
    assert entry.value == CardIntent("m", {"tags": ["a", "b"]})


def test_the_order_of_a_cards_keys_does_not_count() -> None:
    stamp = Stamp(NOW, 0, "n")
    one = copy_of([Entry("card/m", CardIntent("m", {"a": 1, "b": 2}), stamp)])
    other = copy_of([Entry("card/m", CardIntent("m", {"b": 2, "a": 1}), stamp)])
    assert one.digest() == other.digest()


def test_removing_what_is_not_there_says_so() -> None:
    held = copy_of([])
    with pytest.raises(NotFoundError, match="instance 'a'"):
        held.remove("instance/a")
    held.put(instance("a"))
    held.remove("instance/a")
    with pytest.raises(NotFoundError):
        held.remove("instance/a")


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(Compare(bytes(16)))[:-1], b"\x81\xa4type\xa4what"])
def test_garbage_is_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_messages_have_their_bounds() -> None:
    for message in (Compare(bytes(15)), Differs((bytes(16),) * 255), Trade((), ()), Trade((256,), ())):
        with pytest.raises(WireError):
            decode(encode(message))


def state_of(*values: Intent | str) -> ClusterState:
    """A state in which these were put or, by key, removed, in this order."""
    held = copy_of([])
    events = [held.remove(value) if isinstance(value, str) else held.put(value) for value in values]
    return reduce(apply, map(IntentChanged, events), ClusterState())


def test_a_removed_instance_is_stripped_from_links() -> None:
    pair = link("l", ["a", "b"], ["c"])
    state = state_of(instance("a"), instance("b"), instance("c"), pair)
    assert effective_links(state) == {"l": pair}
    state = state_of(instance("a"), instance("b"), instance("c"), pair, "instance/a")
    assert effective_links(state) == {"l": link("l", ["b"], ["c"])}


@pytest.mark.parametrize("removed", ["instance/a", "instance/c", "link/l"])
def test_a_link_without_a_side_is_gone(removed: str) -> None:
    assert effective_links(state_of(instance("a"), instance("c"), link("l", ["a"], ["c"]), removed)) == {}


def test_a_link_may_come_before_its_instances() -> None:
    pair = link("l", ["a"], ["c"])
    assert effective_links(state_of(pair, instance("a"))) == {}
    assert effective_links(state_of(pair, instance("a"), instance("c"))) == {"l": pair}


@settings(max_examples=50)
@given(st.lists(entries(), max_size=25, unique_by=lambda entry: entry.stamp), st.randoms(use_true_random=False))
def test_effective_links_do_not_depend_on_the_order(some: list[Entry], chance: random.Random) -> None:
    shuffled = list(some)
    chance.shuffle(shuffled)
    one, other = (reduce(apply, map(IntentChanged, part), ClusterState()) for part in (some, shuffled))
    assert effective_links(one) == effective_links(other)
    for shown in effective_links(one).values():
        assert shown.prefill_instances
        assert {*shown.prefill_instances, *shown.decode_instances} <= set(one.instances)
