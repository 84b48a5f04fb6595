"""Three real `tandem up` on machines of their own: they form a cluster, answer for one another, and bear faults."""

from __future__ import annotations

import signal
import threading
import time
import uuid

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.small_models import WEIGHTS, write_model
from tests.cluster.up_nodes import SECRET, Refused, UpNode, each, meet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
DEADLINE = 30.0


def launch(by: UpNode, on: UpNode, reference: str, nodes: list[UpNode]) -> str:
    """An instance that all of `nodes` know to be ready."""
    instance = str(uuid.uuid4())
    by.ask("create", node_id=on.id, instance_id=instance, reference=reference)
    each(nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
    return instance


def clean(nodes: list[UpNode]) -> None:
    """Remove everything that was asked for, everywhere."""
    state = nodes[0].ask("state")
    for instance in state["instances"]:
        nodes[0].ask("remove", instance_id=instance)
    for card in state["cards"]:
        nodes[0].ask("remove_card", model_id=card)
    each(nodes, "wait_intents", instances=[], cards={}, deadline=DEADLINE)


def test_a_cluster_forms_and_every_node_answers(cluster: Cluster) -> None:
    nodes = cluster.nodes
    for node in nodes:
        node.stop()
    began = time.monotonic()
    for node in nodes:
        node.start()
    served = max(time.monotonic() for node in nodes if node.ready())
    seen = meet(nodes)
    print(f"\nformed {max(0.0, seen - served):.2f} s after the last one served ({served - began:.2f} s of start-up)")
    assert seen - served < 10
    launch(nodes[2], nodes[0], "sim:model_id=shared", nodes)
    for node in nodes:
        began = time.monotonic()
        status, body = node.chat("shared").whole()
        print(f"asked of {node.name}, answered by n1: {(time.monotonic() - began) * 1000:.0f} ms")
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
    clean(nodes)


def test_strangers_stay_apart(cluster: Cluster) -> None:
    launch(cluster.nodes[0], cluster.nodes[0], "sim:model_id=ours", cluster.nodes)
    settings = ({"TANDEM_CLUSTER_SECRET": "another secret of theirs"}, {"TANDEM_CLUSTER_NAME": "theirs"})
    strangers = [
        cluster.up.node(cluster.network.machine(f"s{number}"), **one) for number, one in enumerate(settings, 1)
    ]
    friend = cluster.up.node(cluster.network.machine("friend"), TANDEM_CLUSTER_SECRET=SECRET)
    for node in (*strangers, friend):
        node.start()
    for node in (*strangers, friend):
        node.ready()
    # When one that may come in has come in, the others have had their chance.
    meet([*cluster.nodes, friend])
    for stranger in strangers:
        assert stranger.ask("state")["nodes"] == [stranger.id]
        assert stranger.ask("state")["instances"] == []
        assert stranger.chat("ours").whole()[0] == 404
    for node in (*strangers, friend):
        node.stop()
    meet(cluster.nodes)
    clean(cluster.nodes)


def test_a_node_is_killed(cluster: Cluster) -> None:
    """In the middle of an answer, and while another request has not begun; then it comes back with its instance."""
    one, two, three = cluster.nodes
    slow = "sim:model_id=slow,decode_tps=20,answer_tokens=100000"
    instance = launch(three, one, slow, cluster.nodes)
    stream = three.chat("slow", stream=True, tokens=10_000).events()
    for _ in range(3):
        next(stream)
    # Its prompt takes minutes there; here none.
    launch(three, one, "sim:model_id=twice,prefill_tps=0.05", cluster.nodes)
    waiting: list[tuple[int, dict[str, object]]] = []
    request = threading.Thread(target=lambda: waiting.append(three.chat("twice", deadline=60).whole()))
    request.start()
    three.ask("wait_running", model_id="twice", deadline=DEADLINE)
    second = launch(three, two, "sim:model_id=twice", [two, three])
    killed = one.kill()
    last = list(stream)[-1]
    error_after = time.monotonic() - killed
    print(f"\nkill -9: the client had its error after {error_after:.2f} s: {last}")
    assert "error" in last
    assert error_after < 6
    request.join(DEADLINE)
    assert waiting
    assert waiting[0][0] == 200
    left = each([two, three], "wait_nodes", nodes=[two.id, three.id], deadline=DEADLINE)
    print(f"kill -9: gone from the others' state after {left - killed:.2f} s")
    assert left - killed < 10
    assert three.ask("state")["runners"].keys() == {second}
    with pytest.raises(Refused) as refused:
        three.ask("create", node_id=one.id, instance_id="late", reference="sim")
    assert refused.value.code == "NotFoundError"
    began = time.monotonic()
    one.start()
    one.ready()
    back = each(cluster.nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
    print(f"started again: its instance was ready everywhere {back - began:.2f} s later")
    meet(cluster.nodes)
    clean(cluster.nodes)


@pytest.mark.parametrize("how", ["cable", "interface"])
def test_a_link_goes_down(cluster: Cluster, how: str) -> None:
    one, two, three = cluster.nodes
    launch(three, one, "sim:model_id=slow,decode_tps=20,answer_tokens=100000", cluster.nodes)
    stream = three.chat("slow", stream=True, tokens=10_000).events()
    for _ in range(3):
        next(stream)
    at = time.monotonic()
    if how == "cable":
        one.machine.unplug()
    else:
        one.machine.set_link(up=False)
    last = list(stream)[-1]
    print(f"\n{how} out: the client had its error after {time.monotonic() - at:.2f} s")
    assert "error" in last
    assert time.monotonic() - at < 10
    left = each([two, three], "wait_nodes", nodes=[two.id, three.id], deadline=DEADLINE)
    print(f"{how} out: noticed after {left - at:.2f} s")
    assert left - at < 10
    at = time.monotonic()
    if how == "cable":
        one.machine.plug()
    else:
        one.machine.set_link(up=True)
    print(f"{how} back: together after {meet(cluster.nodes, DEADLINE) - at:.2f} s")
    clean(cluster.nodes)


def test_both_sides_of_a_partition_keep_what_they_were_asked(cluster: Cluster) -> None:
    one, two, three = cluster.nodes
    kept = launch(one, one, "sim:model_id=kept", cluster.nodes)
    doomed = launch(one, three, "sim:model_id=doomed", cluster.nodes)
    one.ask("card", model_id="org/old", layers=1)
    each(cluster.nodes, "wait_intents", instances=[kept, doomed], cards={"org/old": 1}, deadline=DEADLINE)
    cluster.network.partition([one.machine, two.machine], [three.machine])
    each([one, two], "wait_nodes", nodes=[one.id, two.id], deadline=DEADLINE)
    each([three], "wait_nodes", nodes=[three.id], deadline=DEADLINE)
    here, there = str(uuid.uuid4()), str(uuid.uuid4())
    one.ask("create", node_id=two.id, instance_id=here, reference="sim:model_id=here")
    two.ask("remove_card", model_id="org/old")
    two.ask("remove", instance_id=doomed)
    three.ask("create", node_id=three.id, instance_id=there, reference="sim:model_id=there")
    three.ask("card", model_id="org/there", layers=3)
    assert three.ask("state")["cards"] == {"org/old": 1, "org/there": 3}
    healed = time.monotonic()
    cluster.network.partition()
    meet(cluster.nodes, DEADLINE)
    agreed = each(
        cluster.nodes, "wait_intents", instances=[kept, here, there], cards={"org/there": 3}, deadline=DEADLINE
    )
    print(f"\nhealed: all agree after {agreed - healed:.2f} s")
    for instance in (kept, here, there):
        each(cluster.nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
    for node in cluster.nodes:
        assert node.chat("there").whole()[0] == 200
        assert node.chat("doomed").whole()[0] == 404
    clean(cluster.nodes)


def test_a_model_comes_from_a_neighbour(cluster: Cluster) -> None:
    """These machines have no way to a hub at all."""
    one, two, three = cluster.nodes
    files = write_model(one.home / "models" / "org--small", 24 << 20)
    each(cluster.nodes, "wait_download", node_id=one.id, model_id="org/small", state="completed", deadline=DEADLINE)
    began = time.monotonic()
    three.ask("download", node_id=two.id, model_id="org/small")
    done = each(
        cluster.nodes, "wait_download", node_id=two.id, model_id="org/small", state="completed", deadline=DEADLINE
    )
    print(f"\n24 MiB from a neighbour, told by another node: {done - began:.2f} s")
    for name, content in files.items():
        assert (two.home / "models" / "org--small" / name).read_bytes() == content
    # Its sender dies in the middle, and the rest comes from the next one that has it.
    one.machine.rate(150)
    two.machine.rate(150)
    three.ask("download", node_id=three.id, model_id="org/small")
    three.ask("wait_arriving", model_id="org/small", least=4 << 20, deadline=DEADLINE)
    sender = three.ask("sender")
    killed = next(node for node in (one, two) if node.id == sender)
    killed.kill()
    each([three], "wait_download", node_id=three.id, model_id="org/small", state="completed", deadline=60)
    assert (three.home / "models" / "org--small" / WEIGHTS).read_bytes() == files[WEIGHTS]
    for node in (one, two):
        node.machine.unrate()
    killed.start()
    killed.ready()
    meet(cluster.nodes)


def test_links_are_measured(cluster: Cluster) -> None:
    """Round trips to all; bandwidth only from a node that runs the same model, and as fast as the cable is."""
    one, two, three = cluster.nodes
    one.machine.rate(200)
    for node in (one, two):
        launch(three, node, "sim:model_id=same", cluster.nodes)
    launch(three, three, "sim:model_id=other", cluster.nodes)
    two.ask("wait_links", count=1, deadline=60, within=60)
    rates = {link["node_id"]: link for link in two.ask("links")}
    print(f"\nmeasured by n2: {rates}")
    # The cable carries 25 MB/s. A busy machine does not fill it, and none gets more through.
    assert 3e6 < rates[one.id]["bandwidth"] < 32e6
    assert rates[one.id]["address"] == one.machine.address
    assert rates.keys() <= {one.id, three.id}
    assert three.id not in rates or rates[three.id]["bandwidth"] is None
    one.machine.unrate()
    clean(cluster.nodes)


def test_a_frozen_node(cluster: Cluster) -> None:
    """A laptop whose lid was shut: gone for the others, and back when it wakes."""
    one, two, three = cluster.nodes
    at = one.signal(signal.SIGSTOP)
    left = each([two, three], "wait_nodes", nodes=[two.id, three.id], deadline=DEADLINE)
    print(f"\nfrozen: noticed after {left - at:.2f} s")
    assert left - at < 10
    at = one.signal(signal.SIGCONT)
    print(f"awake: together after {meet(cluster.nodes, DEADLINE) - at:.2f} s")
