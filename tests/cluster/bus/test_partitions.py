"""Networks that fall apart and grow together again."""

from __future__ import annotations

import os

import pytest

from tests.cluster.bus.nodes import SECRET, Nodes, meet
from tests.cluster.bus.test_machines import LONG, PORT, QUIC, SCHEMES, TCP, options
from tests.cluster.netns import Network

SECONDS = 20 if os.environ.get("TANDEM_LONG_FAULTS") else 5
"""How long the partition lasts after all have noticed it."""


@QUIC
def test_a_partition_heals(network: Network, nodes: Nodes, secret: str) -> None:
    machines = [network.machine(name) for name in ("n1", "n2", "n3")]
    one, two, three = started = [nodes.start(machine.name, machine, **options(secret)) for machine in machines]
    meet(started)
    two.do("stream", rate=200)
    three.wait("counted", 20.0, node="n2", count=200)
    network.partition(machines[:1], machines[1:])
    cut = one.do("report")
    for node, other in ((one, "n2"), (one, "n3"), (two, "n1"), (three, "n1")):
        node.wait("left", 15.0, node_id=other, after=cut, reason="unreachable")
    # That long a stream of messages on the other side of the cut.
    count = three.report()["numbers"]["n2"]["count"] // 100 * 100 + 200 * SECONDS
    three.wait("counted", 30.0, node="n2", count=count)
    network.partition()
    healed = one.do("report")
    for node, other in ((one, "n2"), (one, "n3"), (two, "n1"), (three, "n1")):
        back = node.wait("joined", 40.0, node_id=other, after=healed)["at"] - healed
        print(f"{'quic' if secret else 'tcp'}: {node.name} sees {other} {back:.2f} s after the cut healed")
    assert one.ask("n3", "echo", "back")["text"] == "back"
    numbers = three.report()["numbers"]["n2"]
    assert (numbers["lost"], numbers["disordered"]) == (0, 0)


@TCP
def test_a_cut_between_two_of_three_heals_without_multicast(network: Network, nodes: Nodes, secret: str) -> None:
    """Neither of the two dials the other by itself: the third tells them of each other."""
    machines = [network.machine(name) for name in ("n1", "n2", "n3")]
    peers = [f"{machines[0].address}:{PORT}"]
    one, two, three = started = [
        nodes.start(machine.name, machine, peers=peers, discovery=False, **options(secret)) for machine in machines
    ]
    meet(started)
    machines[1].block([machines[2].address])
    cut = one.do("report")
    for node, other in ((two, "n3"), (three, "n2")):
        node.wait("left", 15.0, node_id=other, after=cut)
    machines[1].block([])
    healed = one.do("report")
    for node, other in ((two, "n3"), (three, "n2")):
        back = node.wait("joined", 60.0, node_id=other, after=healed)["at"] - healed
        print(f"{'quic' if secret else 'tcp'}: {node.name} sees {other} {back:.2f} s after the cut healed")
    assert two.ask("n3", "echo", "back")["text"] == "back"
    assert not one.seen("left", after=cut), "opening anew must not look like a death to the third"


def test_a_slow_cable_carries_large_messages(network: Network, nodes: Nodes) -> None:
    machines = [network.machine(name) for name in ("n1", "n2")]
    one, two = [nodes.start(machine.name, machine, **options(SECRET)) for machine in machines]
    meet([one, two])
    machines[1].rate(20)
    answer = one.ask("n2", "echo", "x", repeat=1_000_000, deadline=20.0)
    assert answer["event"] == "answer", answer
    print(f"1 MB there and back over 20 Mbit/s: {answer['took']:.2f} s")
    assert not one.seen("left")


@LONG
@SCHEMES
@pytest.mark.timeout(900)
def test_cables_pulled_again_and_again(network: Network, nodes: Nodes, secret: str) -> None:
    machines = [network.machine(f"n{number}") for number in range(1, 6)]
    started = [nodes.start(machine.name, machine, **options(secret)) for machine in machines]
    meet(started)
    one, two = started[:2]
    one.do("stream", rate=200)
    two.wait("counted", 20.0, node="n1", count=200)
    for turn in range(8):
        victims = [2 + turn % 3, 2 + (turn + 1) % 3]
        for victim in victims:
            machines[victim].unplug()
        pulled = one.do("report")
        for victim in victims:
            one.wait("left", 15.0, node_id=started[victim].name, after=pulled)
        for victim in victims:
            machines[victim].plug()
        plugged = one.do("report")
        for victim in victims:
            back = one.wait("joined", 60.0, node_id=started[victim].name, after=plugged)["at"] - plugged
            print(f"turn {turn}: {started[victim].name} back after {back:.2f} s")
    numbers = two.report()["numbers"]["n1"]
    print(f"{numbers['count']} messages, longest pause {numbers['gap']:.3f} s")
    assert (numbers["lost"], numbers["disordered"]) == (0, 0)
    assert numbers["gap"] < 2.0


@LONG
@pytest.mark.timeout(900)
def test_restarts_again_and_again(network: Network, nodes: Nodes) -> None:
    machines = [network.machine(f"n{number}") for number in range(1, 5)]
    settings = options(SECRET)
    started = [nodes.start(machine.name, machine, **settings) for machine in machines]
    meet(started)
    for turn in range(12):
        place = 1 + turn % 3
        if turn % 2:
            started[place].end()
        else:
            started[place].quit()
        started[place] = nodes.start(machines[place].name, machines[place], **settings)
        print(f"turn {turn}: all see all {meet(started, 60.0):.2f} s after the restart")
