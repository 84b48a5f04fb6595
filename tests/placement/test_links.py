"""Links: which are sound, what they come to, which the cluster makes."""

from __future__ import annotations

import msgspec
import pytest

from tandem.errors import InvalidRequestError, NotFoundError
from tandem.placement.links import automatic_links, check_link, link_fault, prefill_peers
from tandem.placement.routing import Asked, Route, choose
from tandem.placement.world import World
from tandem.types.facts import Interface, RunnerFact
from tandem.types.intents import LinkIntent, Shard

from .worlds import card, ethernet, instance, node, rate, runner, world

EIGHT_BIT = card(model_id="org/Llama-8B-8bit", quantization="8bit")
LINK = LinkIntent("l", ("a",), ("b",))


def pair(one: RunnerFact | None = None, other: RunnerFact | None = None, model=None, links=(LINK,)) -> World:
    """Instance `a` on one node, `b` (of `model`) on another."""
    nodes = (
        node(0, runners=(one or runner("a", kv_port=7000),)),
        node(1, runners=(other or runner("b", kv_port=7001),), links=(rate(0, "10.0.0.1", 1e9),)),
    )
    return world(*nodes, instances=(instance("a", "n00"), instance("b", "n01", model)), links=tuple(links))


def test_a_sound_link() -> None:
    assert link_fault(LINK, pair()) is None
    check_link(LINK, pair())


@pytest.mark.parametrize(
    ("link", "kind", "words"),
    [
        (LinkIntent("l", (), ("b",)), "empty", "no prefill instance"),
        (LinkIntent("l", ("a",), ()), "empty", "no decode instance"),
        (LinkIntent("l", ("a", "b"), ("b",)), "itself", "b is on both sides"),
        (LinkIntent("l", ("a",), ("x",)), "unknown", "no instance x"),
    ],
)
def test_shapes(link: LinkIntent, kind: str, words: str) -> None:
    """exo's fault: links were not checked at all."""
    fault = link_fault(link, pair())
    assert fault is not None
    assert fault.kind == kind
    assert words in fault.message
    with pytest.raises(NotFoundError if kind == "unknown" else InvalidRequestError, match=words):
        check_link(link, pair())


def test_models_and_quantisations() -> None:
    mixed = msgspec.structs.replace(LINK, allow_quantisation=True)
    for model, strict, permissive in (
        (card(base_model="Other", model_id="org/other"), "model", "model"),
        (card(base_model="", model_id="org/other"), "model", "model"),
        (EIGHT_BIT, "quantisation", None),
        (card(model_id="org/Llama-8B", quantization=""), "quantisation", None),
        (card(model_id="other/Llama-8B-4bit"), None, None),
    ):
        faults = [link_fault(link, pair(model=model)) for link in (LINK, mixed)]
        assert [fault and fault.kind for fault in faults] == [strict, permissive], model.model_id


@pytest.mark.parametrize("field", ["tokenizer", "layout", "fingerprint"])
def test_digests_that_differ_where_both_are_known(field: str) -> None:
    mine = runner("a", kv_port=7000, **{field: "11aa"})
    for theirs, kind in (("11aa", None), ("", None), ("22bb", "cache")):
        fault = link_fault(LINK, pair(mine, runner("b", **{field: theirs})))
        assert (fault and fault.kind) == kind
        if fault is not None:
            assert "11aa, 22bb" in fault.message


def test_instances_on_several_nodes_are_not_linked() -> None:
    """exo's fault P12: such a link hung the whole instance."""
    there = pair()
    shards = (Shard("n00", "r-a", 0, 2), Shard("n01", "r-x", 1, 2))
    wide = msgspec.structs.replace(there.instances["a"], shards=shards)
    fault = link_fault(LINK, World(there.nodes, {**there.instances, "a": wide}))
    assert fault is not None
    assert fault.kind == "sharded"


def test_peers_of_a_link() -> None:
    found = prefill_peers("b", pair())
    assert [(peer.instance_id, peer.node_id, peer.runner_id, peer.addresses) for peer in found.peers] == [
        ("a", "n00", "r-a", ("10.0.0.1:7000",))
    ]
    assert found.addresses == ("10.0.0.1:7000",)
    assert prefill_peers("a", pair()).peers == ()
    assert prefill_peers("x", pair()).peers == ()


def test_whether_a_link_allows_another_quantisation_goes_along() -> None:
    strict, lenient = LINK, LinkIntent("m", ("a",), ("b",), allow_quantisation=True)
    for links, expected in (((strict,), False), ((lenient,), True), ((strict, lenient), True)):
        [peer] = prefill_peers("b", pair(links=links)).peers
        assert peer.allow_quantisation is expected


def test_the_same_machine_prefills_through_loopback() -> None:
    nodes = [node(0, runners=(runner("a", kv_port=7000), runner("b")))]
    there = world(*nodes, instances=(instance("a", "n00"), instance("b", "n00")), links=(LINK,))
    assert prefill_peers("b", there).addresses == ("127.0.0.1:7000",)


def test_ipv6_has_brackets_and_measurements_count() -> None:
    far = node(
        0,
        runners=(runner("a", kv_port=7000),),
        interfaces=(
            ethernet(1),
            Interface("en0", "fd00::1", "ethernet"),
            Interface("docker0", "172.17.0.1", "virtual"),
        ),
    )
    near = node(1, runners=(runner("b"),), links=(rate(0, "fd00::1", 2e9), rate(0, "172.17.0.1", 9e9)))
    there = world(far, near, instances=(instance("a", "n00"), instance("b", "n01")), links=(LINK,))
    assert prefill_peers("b", there).peers[0].addresses == ("[fd00::1]:7000", "10.0.0.1:7000")


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (runner("a", "failed", kv_port=7000), "It is dead"),
        (runner("a", "restarting", kv_port=7000), "It is loading"),
        (runner("a"), "TANDEM_KV_PORT"),
        (runner("a", kv_port=7000, tokenizer="x"), "tokenizers"),
    ],
)
def test_who_cannot_prefill_now_is_left_out_with_the_reason(one: RunnerFact, words: str) -> None:
    """exo's fault: addresses of dead runners were handed out for ever."""
    found = prefill_peers("b", pair(one, runner("b", tokenizer="y")))
    assert found.peers == ()
    assert words in found.excluded["a"]


def test_an_instance_that_is_gone_is_left_out() -> None:
    there = pair(links=(LinkIntent("l", ("a", "gone"), ("b",)),))
    found = prefill_peers("b", there)
    assert found.addresses == ("10.0.0.1:7000",)
    assert "gone" in found.excluded


def rates(one: float, other: float, model=None, links=(), state: str = "ready") -> World:
    """`a` and `b` with these prefill rates; 0 is not measured."""
    facts = [
        runner(name, state, speed or 256.0, 20.0 if speed else 0.0, kv_port=port)
        for name, speed, port in (("a", one, 7000), ("b", other, 7001))
    ]
    return pair(*facts, model=model, links=links)


@pytest.mark.parametrize(
    ("one", "other", "linked"),
    [
        (1500, 1000, {("a", "b")}),
        (1499, 1000, set()),
        (1000, 5000, {("b", "a")}),
        (1000, 1000, set()),
        (0, 1000, {("a", "b"), ("b", "a")}),
        (0, 0, {("a", "b"), ("b", "a")}),
    ],
)
def test_automatic_links_follow_the_rates(one: float, other: float, linked: set[tuple[str, str]]) -> None:
    found = automatic_links(rates(one, other))
    assert {(link.prefill_instances[0], link.decode_instances[0]) for link in found} == linked
    assert all(link.automatic and not link.allow_quantisation for link in found)
    assert all(link_fault(link, rates(one, other)) is None for link in found)


def test_a_link_is_kept_somewhat_longer_than_it_is_made() -> None:
    (made,) = automatic_links(rates(1600, 1000))
    for rate_now, kept in ((1600, True), (1300, True), (1100, False)):
        assert (automatic_links(rates(rate_now, 1000, links=(made,))) == (made,)) == kept


def test_what_is_never_linked_automatically() -> None:
    assert automatic_links(rates(5000, 1000, model=EIGHT_BIT)) == ()
    assert automatic_links(rates(5000, 1000, state="loading")) == ()
    assert automatic_links(rates(5000, 1000, links=(LinkIntent("mine", ("a",), ("b",)),))) == ()
    one_node = node(0, runners=(runner("a", prefill=5000, decode=9, kv_port=1), runner("b", prefill=10, decode=9)))
    assert automatic_links(world(one_node, instances=(instance("a", "n00"), instance("b", "n00")))) == ()
    portless = pair(runner("a", prefill=5000, decode=9), runner("b", prefill=10, decode=9), links=())
    assert automatic_links(portless) == ()


def test_an_automatic_link_leaves_roles_alone() -> None:
    there = rates(5000, 1000)
    linked = World(there.nodes, there.instances, {link.link_id: link for link in automatic_links(there)})
    for number in range(20):
        assert isinstance(
            choose(Asked("org/Llama-8B-4bit", avoid=frozenset("b"), request_id=str(number)), linked), Route
        )
    manual = World(there.nodes, there.instances, {"m": LinkIntent("m", ("b",), ("a",))})
    assert automatic_links(manual) == ()


def test_every_node_finds_the_same_links() -> None:
    there = rates(0, 0)
    turned = World(dict(reversed(there.nodes.items())), dict(reversed(there.instances.items())))
    assert automatic_links(turned) == automatic_links(there)
