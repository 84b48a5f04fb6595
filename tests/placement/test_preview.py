"""What people are shown before they choose."""

from __future__ import annotations

import itertools
import time

from tandem.models.cards import builtin_cards
from tandem.placement.memory import footprint
from tandem.placement.plan import PlacementRequest, place
from tandem.placement.preview import Preview, previews

from .worlds import BIG, WHOLE, card, downloaded, ethernet, node, rate, runner, world


def show(model, there, node_ids=(), **changes) -> list[Preview]:
    numbers = itertools.count()
    return previews(model, there, node_ids, identify=lambda: f"i{next(numbers)}", **changes)


def test_each_way_once() -> None:
    found = show(WHOLE, world(*(node(number) for number in range(4))))
    planned = [(one.sharding, one.meta, one.nodes) for one in found if one.instance is not None]
    assert sorted(planned) == sorted(
        [("Pipeline", "MlxRing", count) for count in (1, 2, 3, 4)] + [("Tensor", "MlxRing", count) for count in (2, 4)]
    )
    refused = {(one.sharding, one.meta): one.error for one in found if one.instance is None}
    assert "Thunderbolt" in (refused["Pipeline", "MlxJaccl"] or "")
    assert "Vllm" in (refused["Pipeline", "Vllm"] or "")
    assert "Choose Pipeline or another number" in (refused["Tensor", "MlxRing"] or "")
    assert len({one.instance.instance_id for one in found if one.instance}) == len(planned)
    for one in found:
        assert (one.instance is None) == (one.memory_delta_by_node is None) == (one.error is not None)


def test_memory_is_that_of_each_nodes_layers() -> None:
    """exo's fault: every node was shown the whole divided by their number."""
    there = world(node(0, 30), node(1, 60))
    two = next(one for one in show(BIG, there) if one.nodes == 2 and one.instance and one.sharding == "Pipeline")
    assert two.instance is not None
    assert two.memory_delta_by_node is not None
    needs = footprint(BIG, "MlxMetal", 0)
    for shard in two.instance.shards:
        count = shard.end_layer - shard.start_layer
        assert two.memory_delta_by_node[shard.node_id] == needs.pipeline(
            count, first=shard.rank == 0, last=shard.rank == 1
        )
    assert two.memory_delta_by_node["n01"] > 1.5 * two.memory_delta_by_node["n00"]


def test_a_preview_is_what_place_would_do() -> None:
    there = world(node(0, 30), node(1, 60), node(2, 20))
    for one in show(BIG, there):
        if one.instance is not None:
            wish = PlacementRequest(BIG, BIG.model_id, one.sharding, one.meta, min_nodes=one.nodes)
            assert place(wish, there, one.instance.instance_id) == one.instance


def test_named_nodes_take_part() -> None:
    there = world(*(node(number, 30 + number) for number in range(4)))
    found = [one for one in show(card(), there, ["n00", "n01"]) if one.instance is not None]
    assert {one.nodes for one in found} == {2, 3, 4}
    for one in found:
        assert {"n00", "n01"} <= (one.memory_delta_by_node or {}).keys()


def test_refusals_that_no_number_of_nodes_changes_come_once() -> None:
    only_metal = card(backends=("MlxMetal",), quantization="")
    refused = [one for one in show(only_metal, world(node(0), node(1))) if one.meta == "Vllm"]
    assert [(one.sharding, one.nodes) for one in refused] == [("Pipeline", 0), ("Tensor", 0)]
    nobody = show(WHOLE, world())
    assert all("There is no node" in (one.error or "") for one in nobody)
    assert nobody


def test_a_simulated_model_is_shown_simulated() -> None:
    sim = card(model_id="sim", family="sim", storage_size=1, n_layers=4, hidden_size=128, supports_tensor=False)
    found = [one for one in show(sim, world(node(0, backends=()))) if one.instance is not None]
    assert [(one.meta, one.nodes) for one in found] == [("Sim", 1)]


def test_fifty_nodes() -> None:
    """exo's search was exponential in dense graphs. Printed, not bounded: a loaded machine is not a fault."""
    nodes = []
    for number in range(50):
        links = tuple(rate(other, f"10.0.0.{other + 1}", 0.1e9) for other in range(50) if other != number)
        changes = {"downloads": (downloaded(BIG),)} if number % 5 == 0 else {}
        if number % 3 == 0:
            changes["runners"] = (runner(f"x{number}", decode=20 + number, prefill=300),)
        backends = (("MlxMetal",), ("MlxCpu",), ("MlxCuda", "Vllm"))[number % 3]
        vram = 24.0 if number % 3 == 2 else None
        nodes.append(
            node(
                number,
                8 + 7 * (number % 11),
                backends=backends,
                vram=vram,
                unified=vram is None,
                interfaces=(ethernet(number + 1),),
                links=links,
                **changes,
            )
        )
    mixed = world(*nodes)
    same = world(*(node(number, 8 + number % 5, links=nodes[number].links) for number in range(50)))
    largest = max(builtin_cards(), key=lambda model: model.storage_size)
    for name, there in (("mixed", mixed), ("alike", same)):
        for model in (card(), BIG, largest):
            times = []
            for _ in range(3):
                begin = time.process_time()
                found = show(model, there)
                times.append(time.process_time() - begin)
            planned = sum(one.instance is not None for one in found)
            print(f"50 nodes, {name}, {model.model_id}: {planned} plans, {min(times) * 1000:.0f} ms of CPU")
            assert {one.nodes for one in found if one.instance is not None} or all(one.error for one in found)
            assert found == show(model, there)
