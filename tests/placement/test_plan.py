"""Where instances go, and what refusals say."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import PlacementError, UnplaceableError
from tandem.placement.candidates import MOST_SEEDS, Candidates
from tandem.placement.memory import Availability, footprint
from tandem.placement.plan import PlacementRequest, place
from tandem.placement.world import World
from tandem.types.facts import DownloadFact, EngineFact, Interface, NodeFacts
from tandem.types.intents import InstanceIntent

from .worlds import BIG, GB, WHOLE, card, downloaded, ethernet, instance, node, rate, runner, world


def request(model=None, **changes) -> PlacementRequest:
    model = model or card()
    return PlacementRequest(model, model.model_id, **changes)


def nodes_of(intent: InstanceIntent) -> list[str]:
    return [shard.node_id for shard in intent.shards]


def test_one_node_when_one_is_enough() -> None:
    planned = place(request(), world(node(0), node(1, 64)), "i", launch=True, created=5.0)
    assert nodes_of(planned) == ["n01"]
    shard = planned.shards[0]
    assert (shard.rank, shard.world, shard.start_layer, shard.end_layer) == (0, 1, 0, 32)
    assert (planned.meta, planned.sharding, planned.created, planned.options) == ("MlxRing", "Pipeline", 5.0, {})
    assert msgspec.json.decode(msgspec.json.encode(planned), type=InstanceIntent) == planned


def test_the_message_says_how_much_and_where_and_what_to_do() -> None:
    with pytest.raises(PlacementError, match=r"^Llama-8B-4bit needs 6\.\d GB; the freest node, 'mac-1', has") as told:
        place(request(), world(node(0, 3), node(1, 5.4)), "i")
    assert told.value.message.endswith("Stop an instance or choose a smaller quantisation.")
    assert told.value.status == 409
    assert not told.value.permanent


def test_an_override_places_it_anyway() -> None:
    tight = world(node(0, 3), node(1, 2))
    assert nodes_of(place(request(override_memory=True), tight, "i", launch=True)) == ["n00"]


def test_the_cache_counts() -> None:
    """exo's fault: only the weights had to fit."""
    fits = footprint(card(), "MlxMetal", 8192).single
    room = world(node(0, (fits + 512 * 2**20) / GB + 0.001, total=10))
    assert place(request(context_length=8192), room, "i").options == {"context_length": 8192}
    with pytest.raises(PlacementError, match="needs"):
        place(request(context_length=16384), room, "i")
    with pytest.raises(UnplaceableError, match="131072 tokens at most"):
        place(request(context_length=131_073), room, "i")


def test_what_others_were_promised_counts() -> None:
    """exo's fault: two placements in a row took the same memory."""
    there = world(node(0, 12))
    first = place(request(), there, "i")
    with pytest.raises(PlacementError, match="the freest node"):
        place(request(), replace(there, instances={"i": first}), "j")
    loading = node(0, 12, runners=(runner("i", "loading", promised=6 * GB, load=None),))
    with pytest.raises(PlacementError, match="the freest node"):
        place(request(), replace(world(loading), instances={"i": first}), "j")


def test_the_engine_is_looked_at_before_the_size() -> None:
    """exo's fault: the smallest set won, and then lacked the engine, though a larger one had it."""
    there = world(node(0, 200, backends=("MlxCpu",)), node(1, 30), node(2, 30))
    planned = place(request(card(**{**BIG.model_dump(), "backends": ("MlxMetal",)})), there, "i")
    assert nodes_of(planned) == ["n01", "n02"]


def test_all_nodes_of_an_instance_have_one_engine() -> None:
    mixed = world(node(0, 30), node(1, 30, backends=("MlxCpu",)), node(2, 30, backends=("MlxCpu",)))
    assert nodes_of(place(request(BIG), mixed, "i")) == ["n01", "n02"]
    with pytest.raises(PlacementError, match=r"with one engine .*and there are 2"):
        place(request(BIG, min_nodes=3), mixed, "i")


def test_an_engine_that_does_not_import_is_none() -> None:
    broken = node(0, engines=(EngineFact("MlxMetal", available=False, reason="no module named mlx"),))
    with pytest.raises(PlacementError, match=r"'mac-0' does not have MlxMetal.*no module named mlx"):
        place(request(), world(broken), "i")
    with pytest.raises(PlacementError, match="does not have Vllm"):
        place(request(WHOLE, meta="Vllm"), world(node(0)), "i")
    with pytest.raises(UnplaceableError, match="does not run as Vllm: its card names MlxMetal") as told:
        place(request(card(backends=("MlxMetal",), quantization=""), meta="Vllm"), world(node(0)), "i")
    assert (told.value.status, told.value.permanent) == (422, True)


def test_unknown_memory_is_no_memory() -> None:
    mute = node(0, unified=False, vram=1, backends=("Vllm",))
    gpu = msgspec.structs.replace(mute.resources.accelerators[0], memory_available=None)
    resources = msgspec.structs.replace(mute.resources, accelerators=(gpu,))
    mute = msgspec.structs.replace(mute, resources=resources)
    with pytest.raises(PlacementError, match="does not say how much memory"):
        place(request(WHOLE, meta="Vllm"), world(mute), "i")


def test_named_nodes() -> None:
    there = world(*(node(number, 64 - number) for number in range(4)))
    assert nodes_of(place(request(node_ids=("n03",)), there, "i")) == ["n03"]
    assert set(nodes_of(place(request(node_ids=("n03", "n02")), there, "i"))) == {"n02", "n03"}
    assert {"n03"} < set(nodes_of(place(request(node_ids=("n03",), min_nodes=2), there, "i")))
    with pytest.raises(PlacementError, match="Nodes to choose from: 1; asked for: 2"):
        place(request(node_ids=("n03",), exact=True, min_nodes=2), there, "i")
    with pytest.raises(PlacementError, match="no node 'gone'"):
        place(request(node_ids=("gone",)), there, "i")
    with pytest.raises(PlacementError, match="the node named, 'mac-9'"):
        place(request(node_ids=("n09",), exact=True), world(node(9, 2), node(1, 64)), "i")
    with pytest.raises(PlacementError, match="no node"):
        place(request(), world(), "i")


def test_several_nodes_are_planned_and_not_launched() -> None:
    there = world(node(0, 30), node(1, 30))
    planned = place(request(BIG), there, "i")
    assert [(shard.start_layer, shard.end_layer) for shard in planned.shards] == [(0, 40), (40, 80)]
    assert [shard.runner_id for shard in planned.shards] == ["i-0", "i-1"]
    with pytest.raises(UnplaceableError, match=r"would fit on 2 nodes \('mac-[01]', 'mac-[01]'\).*later version"):
        place(request(BIG), there, "i", launch=True)
    with pytest.raises(UnplaceableError, match=r"later version.*Place it on one node\.$"):
        place(request(min_nodes=2), there, "i", launch=True)


def test_tensors() -> None:
    three = world(*(node(number) for number in range(4)))
    planned = place(request(sharding="Tensor", min_nodes=3), three, "i")
    assert len(planned.shards) == 4  # three do not divide the heads
    assert {(shard.start_layer, shard.end_layer, shard.world) for shard in planned.shards} == {(0, 32, 4)}
    with pytest.raises(UnplaceableError, match="cannot be split by tensors"):
        place(request(card(supports_tensor=False), sharding="Tensor", min_nodes=2), three, "i")
    assert place(request(sharding="Tensor"), three, "i").sharding == "Pipeline"


def test_rdma_needs_thunderbolt_all_around() -> None:
    def mac(number: int, *others: int) -> NodeFacts:
        cable = Interface("en5", f"169.254.0.{number + 1}", "thunderbolt")
        links = tuple(rate(other, f"169.254.0.{other + 1}", 3e9) for other in others)
        return node(number, interfaces=(ethernet(number + 1), cable), links=links)

    there = world(mac(0, 1), mac(1, 0), mac(2))
    assert nodes_of(place(request(meta="MlxJaccl", min_nodes=2), there, "i")) == ["n00", "n01"]
    with pytest.raises(PlacementError, match="Thunderbolt links between all 3 nodes"):
        place(request(meta="MlxJaccl", min_nodes=3), there, "i")
    assert place(request(meta="MlxJaccl"), there, "i").meta == "MlxRing"


def test_better_links_come_first() -> None:
    wifi = [(Interface("wl", f"10.0.0.{host}", "wifi"),) for host in (8, 9)]
    there = world(node(0, 30), node(1, 34, interfaces=wifi[0]), node(2, 30), node(3, 40, interfaces=wifi[1]))
    assert set(nodes_of(place(request(BIG), there, "i"))) == {"n00", "n02"}
    container = Interface("docker0", "172.17.0.1", "unknown")
    cut = world(node(0, 30), node(1, 30, interfaces=(container,)))
    with pytest.raises(PlacementError, match="No 2 nodes that can run Llama-70B-4bit reach one another"):
        place(request(BIG, min_nodes=2), cut, "i")


def test_a_download_comes_before_memory_and_speed_before_a_little_memory() -> None:
    there = world(node(0, 60), node(1, 20, downloads=(downloaded(card()),)))
    assert nodes_of(place(request(), there, "i")) == ["n01"]
    half = DownloadFact("ORG/llama-8B-4bit", "ongoing", 1, 2)
    assert nodes_of(place(request(), world(node(0, 60), node(1, 20, downloads=(half,))), "i")) == ["n01"]
    quick = node(1, 35, runners=(runner("j", decode=50, prefill=500),))
    assert nodes_of(place(request(), world(node(0, 36), quick), "i")) == ["n01"]
    assert nodes_of(place(request(), world(node(0, 360), quick), "i")) == ["n00"]
    slow_box = node(0, 360, backends=("MlxCpu",))
    assert nodes_of(place(request(), world(slow_box, node(1, 20)), "i")) == ["n01"]


def test_large_nodes_are_found_among_well_linked_small_ones() -> None:
    small = [node(number, 3, downloads=(downloaded(BIG),)) for number in range(20)]
    large = [node(number, 40, interfaces=(Interface("wl", f"10.1.0.{number}", "wifi"),)) for number in (20, 21)]
    assert set(nodes_of(place(request(BIG), world(*small, *large), "i"))) == {"n20", "n21"}


def test_simulated_models_run_anywhere() -> None:
    sim = card(model_id="sim", family="sim", storage_size=1, n_layers=4, hidden_size=128, num_key_value_heads=2)
    planned = place(request(sim), world(node(0, 2, backends=())), "i", launch=True)
    assert planned.meta == "Sim"


def outcome(wish: PlacementRequest, there: World) -> InstanceIntent | PlacementError:
    try:
        return place(wish, there, "i")
    except PlacementError as refused:
        return refused


def facts_strategy() -> st.SearchStrategy[list[NodeFacts]]:
    backends = st.sampled_from([("MlxMetal",), ("MlxCpu",), ("MlxCuda", "Vllm"), ("MlxMetal", "Vllm"), ()])
    spec = st.tuples(st.floats(0, 90), backends, st.one_of(st.none(), st.floats(0, 90)), st.booleans(), st.booleans())
    return st.lists(spec, min_size=0, max_size=7).map(
        lambda specs: [
            node(
                number,
                free,
                backends=chosen,
                vram=vram,
                unified=vram is None,
                downloads=(downloaded(BIG),) if here else (),
                interfaces=(Interface("wl", f"10.0.0.{number + 1}", "wifi"),) if wireless else (ethernet(number + 1),),
            )
            for number, (free, chosen, vram, here, wireless) in enumerate(specs)
        ]
    )


@given(
    facts_strategy(),
    st.sampled_from(["Pipeline", "Tensor"]),
    st.sampled_from(["MlxRing", "MlxJaccl", "Vllm"]),
    st.integers(1, 4),
    st.integers(0, 65536),
    st.sampled_from([BIG, card(), WHOLE]),
)
def test_whatever_the_cluster(facts, sharding, meta, least, context, model) -> None:
    wish = request(model, sharding=sharding, meta=meta, min_nodes=least, context_length=context)
    there = world(*facts)
    planned = outcome(wish, there)
    again = outcome(wish, world(*reversed(facts)))
    if isinstance(planned, PlacementError):
        assert isinstance(again, PlacementError)
        assert (again.message, type(again)) == (planned.message, type(planned))
        assert planned.message.endswith(".")
        assert len(planned.message) > 30
        return
    assert again == planned
    shards = planned.shards
    assert len(set(nodes_of(planned))) == len(shards) >= least
    assert [shard.rank for shard in shards] == list(range(len(shards)))
    if planned.sharding == "Pipeline":
        assert [layer for shard in shards for layer in range(shard.start_layer, shard.end_layer)] == list(
            range(model.n_layers)
        )
    engines = [
        {engine.backend for engine in there.nodes[shard.node_id].engines if engine.available} for shard in shards
    ]
    common = set.intersection(*engines)
    assert common
    fits = False
    for backend in common:
        needs = footprint(model, backend, context)
        free = [Availability(there).available(there.nodes[shard.node_id], backend) or 0 for shard in shards]
        sizes = [
            needs.tensor(len(shards))
            if planned.sharding == "Tensor"
            else needs.pipeline(
                shard.end_layer - shard.start_layer, first=shard.rank == 0, last=shard.rank == len(shards) - 1
            )
            for shard in shards
        ]
        fits = fits or all(size <= room for size, room in zip(sizes, free, strict=True))
    assert fits


def test_the_number_of_sets_is_bounded() -> None:
    there = world(*(node(number, 10 + number % 7) for number in range(50)))
    found = Candidates(there, "m")
    for size in (2, 3, 25, 50):
        groups = found.groups("MlxMetal", size)
        assert 1 <= len(groups) <= 2 * MOST_SEEDS + 1
        assert all(len({member.node_id for member in group.members}) == size for group in groups)
    assert len(found.groups("MlxMetal", 1)) == 50
    assert found.groups("MlxMetal", 51) == ()


def test_instances_elsewhere_change_nothing_here() -> None:
    there = world(node(0), node(1, 8), instances=(instance("i", "gone"),))
    assert nodes_of(place(request(), there, "j")) == ["n00"]
