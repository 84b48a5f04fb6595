"""Which instance answers."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InstanceNotReadyError, NotFoundError, PlacementError, UnavailableError
from tandem.placement.routing import Asked, Refused, Route, choose
from tandem.placement.world import World
from tandem.types.facts import RunnerFact
from tandem.types.intents import LinkIntent, Shard

from .worlds import card, instance, node, runner, world

MODEL = "org/Llama-8B-4bit"


def cluster(*runners: RunnerFact, links: tuple[LinkIntent, ...] = (), models=None) -> World:
    """One node and one instance for each runner."""
    nodes = [node(number, runners=(fact,)) for number, fact in enumerate(runners)]
    instances = [
        instance(fact.instance_id, f"n{number:02}", (models or {}).get(fact.instance_id))
        for number, fact in enumerate(runners)
    ]
    return world(*nodes, instances=tuple(instances), links=links)


def chosen(asked: Asked, there: World) -> str:
    route = choose(asked, there)
    assert isinstance(route, Route), route
    return route.instance_id


def refused(asked: Asked, there: World) -> Refused:
    route = choose(asked, there)
    assert isinstance(route, Refused), route
    return route


def test_the_route_names_node_and_runner() -> None:
    route = choose(Asked("ORG/llama-8b-4BIT"), cluster(runner("a", prefill=500, decode=25)))
    assert isinstance(route, Route)
    assert (route.node_id, route.runner_id) == ("n00", "r-a")
    assert route.seconds == pytest.approx(256 / 25)


def test_the_shorter_queue_and_the_faster_machine() -> None:
    assert chosen(Asked(MODEL), cluster(runner("a", running=3), runner("b", running=1))) == "b"
    quick = cluster(runner("a", decode=100, prefill=500, running=2), runner("b", decode=20, prefill=500))
    assert chosen(Asked(MODEL), quick) == "a"
    assert chosen(Asked(MODEL, pending={"a": 5}), quick) == "b"


def test_a_long_prompt_goes_where_it_is_read_fast_or_known() -> None:
    there = cluster(runner("a", prefill=2000, decode=20), runner("b", prefill=200, decode=30))
    assert chosen(Asked(MODEL, prompt_tokens=10), there) == "b"
    assert chosen(Asked(MODEL, prompt_tokens=8000), there) == "a"
    assert chosen(Asked(MODEL, prompt_tokens=8000, held={"b": 7900}), there) == "b"


def test_the_unmeasured_count_as_average() -> None:
    slow, new = runner("a", prefill=500, decode=10), runner("c", prefill=256)
    assert chosen(Asked(MODEL), cluster(slow, runner("b", prefill=500, decode=40), new)) == "b"
    assert chosen(Asked(MODEL), cluster(slow, runner("b", prefill=500, decode=40, running=9), new)) == "c"


def test_equal_choices_spread_and_repeat() -> None:
    """exo's fault: ties went by the order of a dictionary."""
    there = cluster(*(runner(name, decode=25 + 0.1 * index, prefill=500) for index, name in enumerate("abcd")))
    counts = Counter(chosen(Asked(MODEL, request_id=f"request-{number}"), there) for number in range(400))
    assert set(counts) == set("abcd")
    assert min(counts.values()) > 60
    turned = World(dict(reversed(there.nodes.items())), dict(reversed(there.instances.items())))
    for number in range(20):
        asked = Asked(MODEL, request_id=str(number))
        assert choose(asked, there) == choose(asked, turned)


def test_only_healthy_instances() -> None:
    """exo's fault: requests went to dead runners and hung."""
    sick = ["starting", "loading", "warming", "restarting", "failed", "stopped"]
    there = cluster(*(runner(state, state) for state in sick), runner("well", running=50))
    assert chosen(Asked(MODEL), there) == "well"
    gone = world(*there.nodes.values(), instances=(*there.instances.values(), instance("gone", "elsewhere")))
    assert chosen(Asked(MODEL), gone) == "well"


def test_all_shards_have_to_be_ready() -> None:
    shards = (Shard("n00", "r-a", 0, 2, 0, 16), Shard("n01", "r-b", 1, 2, 16, 32))
    sharded = instance("s", "n00", shards=shards)
    second = runner("b", "loading")
    there = world(node(0, runners=(runner("a"),)), node(1, runners=(second,)), instances=(sharded,))
    assert refused(Asked(MODEL), there).reason == "loading"
    there = world(node(0, runners=(runner("a"),)), node(1, runners=(runner("b"),)), instances=(sharded,))
    assert choose(Asked(MODEL), there) == Route("s", "n00", "r-a", 256 / 25)


def test_no_such_model() -> None:
    nothing = refused(Asked("x"), world(node(0)))
    assert nothing.message == "No instance serves the model 'x'. This cluster serves no model at all."
    assert isinstance(nothing.error(), NotFoundError)
    other = refused(Asked("x"), cluster(runner("a")))
    assert MODEL in other.message
    assert other.error().status == 404


def test_loading_and_dead_differ() -> None:
    loading = refused(Asked(MODEL), cluster(runner("a", "failed"), runner("b", "warming")))
    error = loading.error()
    assert isinstance(error, InstanceNotReadyError)
    assert error.retry_after
    not_started = world(node(0), instances=(instance("a", "n00"),))
    assert refused(Asked(MODEL), not_started).reason == "loading"
    dead = refused(Asked(MODEL), cluster(runner("a", "failed", error="It ran out of memory.")))
    assert dead.reason == "dead"
    assert "It ran out of memory." in dead.message
    assert isinstance(dead.error(), UnavailableError)
    assert not isinstance(dead.error(), InstanceNotReadyError)
    gone = refused(Asked(MODEL), world(node(0), instances=(instance("a", "n09"),)))
    assert "its node 'n09' is gone" in gone.message
    assert refused(Asked(MODEL, avoid=frozenset("a")), cluster(runner("a"))).reason == "dead"


def test_default_and_aliases() -> None:
    there = cluster(runner("a"), models={"a": card(aliases=("Llama", "demo"))})
    assert chosen(Asked("default"), there) == "a"
    assert chosen(Asked("DEMO"), there) == "a"
    two = cluster(runner("a"), runner("b"), models={"b": card(model_id="org/other")})
    assert refused(Asked("default"), two).reason == "no_such_model"


def test_prefill_only_instances_do_not_answer() -> None:
    link = LinkIntent("l", ("a",), ("b",))
    assert chosen(Asked(MODEL), cluster(runner("a"), runner("b", running=9), links=(link,))) == "b"
    both = (link, LinkIntent("m", ("b",), ("a",)))
    assert chosen(Asked(MODEL), cluster(runner("a"), runner("b", running=9), links=both)) == "a"
    automatic = msgspec.structs.replace(link, automatic=True)
    assert chosen(Asked(MODEL), cluster(runner("a"), runner("b", running=9), links=(automatic,))) == "a"


def test_a_model_that_only_prefills_is_refused_and_does_not_hang() -> None:
    """exo's fault A1: the client waited for ever."""
    other = card(model_id="org/Llama-8B-8bit", quantization="8bit")
    models = {"b": other}
    strict = cluster(runner("a"), runner("b"), links=(LinkIntent("l", ("a",), ("b",)),), models=models)
    told = refused(Asked(MODEL), strict)
    assert told.reason == "prefill_only"
    assert isinstance(told.error(), PlacementError)
    assert told.error().status == 409
    mixed = LinkIntent("l", ("a",), ("b",), allow_quantisation=True)
    assert chosen(Asked(MODEL), cluster(runner("a"), runner("b"), links=(mixed,), models=models)) == "b"
    foreign = {"b": card(model_id="org/x", base_model="X")}
    assert refused(Asked(MODEL), cluster(runner("a"), runner("b"), links=(mixed,), models=foreign)).reason == (
        "prefill_only"
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ready", "loading", "failed"]), st.floats(0, 1e3), st.floats(0, 1e5), st.integers(0, 100)
        ),
        max_size=8,
    ),
    st.integers(0, 10**6),
    st.text(max_size=8),
)
def test_every_question_has_an_answer(specs, prompt, request_id) -> None:
    runners = [
        runner(f"i{index}", state, prefill, decode, running=running)
        for index, (state, decode, prefill, running) in enumerate(specs)
    ]
    there = cluster(*runners)
    asked = Asked(MODEL, request_id, prompt)
    route = choose(asked, there)
    assert route == choose(asked, there)
    if isinstance(route, Refused):
        assert not any(state == "ready" for state, *_ in specs)
        assert route.message
        assert route.error().status in (404, 503)
    else:
        assert there.nodes[route.node_id].runners[0].state == "ready"
        assert route.seconds > 0
