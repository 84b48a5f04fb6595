"""Nodes on machines of their own: how they find one another, and what cables and addresses do to them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.bus.nodes import SECRET, Nodes, meet
from tests.cluster.netns import Network

PORT = 52414
LONG = pytest.mark.skipif(
    not os.environ.get("TANDEM_LONG_FAULTS"), reason="minutes of faults: set TANDEM_LONG_FAULTS=1 to run them"
)
SCHEMES = pytest.mark.parametrize("secret", [SECRET, ""], ids=["quic", "tcp"])
QUIC = pytest.mark.parametrize("secret", [SECRET, pytest.param("", marks=LONG)], ids=["quic", "tcp"])
TCP = pytest.mark.parametrize("secret", [pytest.param(SECRET, marks=LONG), ""], ids=["quic", "tcp"])
"""Both kinds of links, of which one is left to the long rounds."""


def options(secret: str) -> dict[str, object]:
    """Settings that make a node serve other machines."""
    return {"secret": secret, "open": not secret, "port": PORT}


@SCHEMES
def test_three_nodes_meet_by_multicast(network: Network, nodes: Nodes, secret: str) -> None:
    started = [nodes.start(name, network.machine(name), **options(secret)) for name in ("n1", "n2", "n3")]
    seconds = meet(started)
    print(f"three nodes {'quic' if secret else 'tcp'}: full mesh {seconds:.3f} s after the last one was ready")
    assert seconds < 10
    late = nodes.start("n4", network.machine("n4"), **options(secret))
    print(f"a late one: {meet([*started, late]):.3f} s")
    assert late.ask("n1", "echo", "hello")["text"] == "hello"


@QUIC
def test_static_peers_where_multicast_is_blocked(network: Network, nodes: Nodes, secret: str) -> None:
    machines = [network.machine(name) for name in ("n1", "n2", "n3")]
    network.block_multicast()
    first, *others = [
        nodes.start(machine.name, machine, peers=[f"{machines[0].address}:{PORT}"], **options(secret))
        for machine in machines
    ]
    seconds = meet([first, *others])
    print(f"by one static peer, {'quic' if secret else 'tcp'}: full mesh after {seconds:.3f} s")


def test_without_discovery_and_peers_nobody_is_found(network: Network, nodes: Nodes) -> None:
    one, two = (nodes.start(name, network.machine(name), discovery=False, **options("")) for name in ("n1", "n2"))
    three = nodes.start("n3", network.machine("n3"), discovery=False, peers=[f"10.77.0.1:{PORT}"], **options(""))
    meet([one, three])
    two.wait("ready")
    assert [line["node_id"] for line in one.seen("joined")] == ["n3"]
    assert not two.seen("joined")


@TCP
def test_a_pulled_cable_disturbs_nobody_else(network: Network, nodes: Nodes, secret: str) -> None:
    machines = [network.machine(name) for name in ("n1", "n2", "n3")]
    one, two, three = started = [nodes.start(machine.name, machine, **options(secret)) for machine in machines]
    meet(started)
    for node in started:
        node.do("stream", rate=200)
    for node, others in ((one, ("n2", "n3")), (two, ("n1", "n3")), (three, ("n1", "n2"))):
        for other in others:
            node.wait("counted", 20.0, node=other, count=200)
    asked = one.do("ask", node="n3", topic="slow", deadline=3.0)
    three.wait("asked")
    machines[2].unplug()
    failed = one.wait("failed", 10.0, after=asked)
    assert failed["took"] < 4.0
    assert failed["code"] in ("deadline_exceeded", "node_lost")
    left = [node.wait("left", 15.0, node_id="n3", reason="unreachable", after=asked) for node in (one, two)]
    print(
        f"cable pulled, {'quic' if secret else 'tcp'}: noticed {max(line['at'] for line in left) - asked:.2f} s later"
    )
    assert max(line["at"] for line in left) - asked < 10
    # Two seconds of traffic on, what passed between the healthy ones is complete.
    for node, other in ((one, "n2"), (two, "n1")):
        count = node.report()["numbers"][other]["count"] // 100 * 100 + 400
        node.wait("counted", 20.0, node=other, count=count)
        numbers = node.report()["numbers"][other]
        print(f"{node.name} from {other}: {numbers['count']} messages, longest pause {numbers['gap']:.3f} s")
        assert (numbers["lost"], numbers["disordered"]) == (0, 0)
        assert numbers["gap"] < 2.0
    machines[2].plug()
    for node in (one, two):
        back = node.wait("joined", 30.0, node_id="n3", after=left[0]["at"])
        print(f"plugged in again: seen by {node.name}")
    assert back["life"] == three.life
    for node in started:
        node.do("still")


def test_a_node_is_killed_while_others_talk(network: Network, nodes: Nodes) -> None:
    one, two, three = started = [
        nodes.start(name, network.machine(name), **options(SECRET)) for name in ("n1", "n2", "n3")
    ]
    meet(started)
    one.do("stream", rate=500)
    two.wait("counted", 20.0, node="n1", count=500)
    killed = three.signal(signal.SIGKILL)
    for node in (one, two):
        left = node.wait("left", 10.0, node_id="n3")
        print(f"kill -9 over quic: noticed after {left['at'] - killed:.2f} s")
    again = nodes.start("n3", network.machines["n3"], **options(SECRET))
    meet([one, two, again])
    assert not again.seen("conflict")
    numbers = two.report()["numbers"]["n1"]
    assert (numbers["lost"], numbers["disordered"]) == (0, 0)


@QUIC
def test_a_frozen_process_is_dead_until_it_wakes(network: Network, nodes: Nodes, secret: str) -> None:
    one, two, three = started = [
        nodes.start(name, network.machine(name), **options(secret)) for name in ("n1", "n2", "n3")
    ]
    meet(started)
    one.do("stream", rate=200)
    two.wait("counted", 20.0, node="n1", count=200)
    frozen = three.signal(signal.SIGSTOP)
    left = one.wait("left", 15.0, node_id="n3")
    print(f"SIGSTOP, {'quic' if secret else 'tcp'}: noticed after {left['at'] - frozen:.2f} s")
    count = two.report()["numbers"]["n1"]["count"] // 100 * 100 + 1000
    two.wait("counted", 20.0, node="n1", count=count)
    numbers = two.report()["numbers"]["n1"]
    assert (numbers["lost"], numbers["disordered"]) == (0, 0)
    woken = three.signal(signal.SIGCONT)
    back = one.wait("joined", 30.0, node_id="n3", after=left["at"])
    print(f"awake again: seen after {back['at'] - woken:.2f} s")
    assert three.ask("n1", "echo", "awake", deadline=10.0)["event"] == "answer"


def test_started_without_network(network: Network, nodes: Nodes) -> None:
    one = nodes.start("n1", network.machine("n1"), **options(SECRET))
    bare = network.machine("n2", address=False)
    two = nodes.start("n2", bare, **options(SECRET))
    for node in (one, two):
        node.wait("ready", 20.0)
    assert not two.seen("joined")
    bare.add_address()
    reopened = two.wait("reopened", 10.0)
    seconds = max(meet([one, two]), 0.0)
    assert seconds > 0
    print(f"found {two.seen('joined')[0]['at'] - reopened['at']:.2f} s after its session was opened anew")


@QUIC
def test_a_changed_address(network: Network, nodes: Nodes, secret: str) -> None:
    machines = [network.machine(name) for name in ("n1", "n2")]
    one, two = started = [nodes.start(machine.name, machine, **options(secret)) for machine in machines]
    meet(started)
    machines[1].change_address("10.77.0.77")
    reopened = two.wait("reopened", 10.0)
    assert "10.77.0.77" in reopened["reason"]
    link = one.wait("link", 20.0, up=True, after=reopened["at"])
    print(f"a new address, {'quic' if secret else 'tcp'}: linked {link['at'] - reopened['at']:.2f} s after reopening")
    two.wait_until(lambda lines: any(line["event"] == "link" and line["at"] > reopened["at"] for line in lines), 20.0)
    assert one.wait("link", 20.0, up=True, after=reopened["at"])
    asked = one.ask("n2", "echo", "moved", deadline=10.0)
    for _ in range(20):
        if asked["event"] == "answer":
            break
        asked = one.ask("n2", "echo", "moved", deadline=10.0)
    assert asked["event"] == "answer", one.story()
