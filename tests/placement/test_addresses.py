"""Which addresses are used, and which links they make."""

from __future__ import annotations

import pytest

from tandem.placement.addresses import LINK_RANK, NO_LINK, Reach
from tandem.placement.routing import addresses, with_port
from tandem.types.facts import Interface

from .worlds import ethernet, node, rate

ME = node(0, interfaces=(ethernet(1), Interface("en5", "169.254.1.1", "thunderbolt")))
PEER = node(
    1,
    interfaces=(
        Interface("docker0", "172.17.0.1", "unknown"),
        Interface("br-1f", "172.18.0.1", "ethernet"),
        Interface("vm", "192.168.64.1", "virtual"),
        Interface("lo", "127.0.0.1", "loopback"),
        Interface("en0", "fe80::1", "ethernet"),
        Interface("en7", "10.0.9.2", "ethernet", up=False),
        Interface("x", "10.0.3.2", "unknown"),
        Interface("wl", "10.0.2.2", "wifi", 2_000_000_000),
        Interface("en0", "10.0.0.2", "ethernet", 1_000_000_000),
        Interface("en1", "10.0.1.2", "ethernet", 10_000_000_000),
        Interface("en1", "fd00::2", "ethernet", 10_000_000_000),
        Interface("en5", "169.254.1.2", "thunderbolt"),
        Interface("odd", "no address", "ethernet"),
    ),
)
IN_ORDER = ["169.254.1.2", "10.0.1.2", "fd00::2", "10.0.0.2", "10.0.2.2", "10.0.3.2"]


def test_kinds_have_an_order_and_containers_no_place() -> None:
    """exo's faults: docker's addresses equal real ones, link-local IPv6 without a scope, no kinds on Linux."""
    assert addresses(PEER, ME, ()) == IN_ORDER


def test_every_order_of_interfaces_gives_the_same() -> None:
    turned = node(1, interfaces=PEER.interfaces[::-1])
    assert addresses(turned, ME, ()) == IN_ORDER


def test_a_measurement_wins_over_the_kind() -> None:
    slow_cable = [rate(1, "169.254.1.2", 5e6), rate(1, "10.0.0.2", 0.1e9)]
    assert addresses(PEER, ME, slow_cable) == ["10.0.1.2", "fd00::2", "10.0.0.2", "10.0.2.2", "10.0.3.2", "169.254.1.2"]
    assert addresses(PEER, ME, [rate(1, "10.0.3.2", 3e9)])[0] == "10.0.3.2"
    assert addresses(PEER, ME, [rate(2, "10.0.3.2", 3e9), rate(1, "10.0.3.2")]) == IN_ORDER


def test_measured_addresses_count_although_they_are_not_listed() -> None:
    assert addresses(PEER, ME, [rate(1, "fe80::1%en0", 9e9)])[0] == "fe80::1%en0"
    assert addresses(PEER, ME, [rate(1, "100.64.0.7", 9e9)])[0] == "100.64.0.7"
    for never in ("fe80::1", "172.17.0.1", "172.18.0.1", "192.168.64.1", "127.0.0.1", "10.0.9.2"):
        assert addresses(PEER, ME, [rate(1, never, 9e9)]) == IN_ORDER, never


def test_a_cable_that_i_lack_leads_elsewhere() -> None:
    without = node(0, interfaces=(ethernet(1),))
    assert addresses(PEER, without, ())[:2] == ["10.0.1.2", "fd00::2"]


def test_one_machine_is_reached_through_loopback() -> None:
    """exo's fault: two instances on one machine never prefilled for each other."""
    beside = node(2, interfaces=ME.interfaces)
    assert addresses(beside, ME, ())[0] == "127.0.0.1"
    assert addresses(ME, ME, ())[0] == "127.0.0.1"
    alone = (Interface("lo", "127.0.0.1", "loopback"),)
    assert addresses(node(1, interfaces=alone), node(0, interfaces=alone), ()) == ["127.0.0.1"]
    assert addresses(node(1, interfaces=alone), ME, ()) == []


def test_the_same_containers_network_is_not_the_same_machine() -> None:
    docker = Interface("docker0", "172.17.0.1", "virtual")
    one, other = node(0, interfaces=(ethernet(1), docker)), node(1, interfaces=(ethernet(2), docker))
    assert "127.0.0.1" not in addresses(one, other, ())
    assert Reach.of(one).rank(Reach.of(other)) == LINK_RANK["ethernet"]


@pytest.mark.parametrize(
    ("mine", "theirs", "links", "kind"),
    [
        ((ethernet(1),), (ethernet(2),), (), "ethernet"),
        ((ethernet(1),), (Interface("wl", "10.0.0.2", "wifi"),), (), "wifi"),
        ((ethernet(1),), (Interface("en0", "10.9.0.2", "ethernet"),), (), "unknown"),
        ((ethernet(1),), (), (), "unknown"),
        ((ethernet(1),), (Interface("docker0", "10.0.0.2", "virtual"),), (), None),
        ((Interface("tb", "169.254.1.1", "thunderbolt"), ethernet(1)), PEER.interfaces, (), "ethernet"),
        (ME.interfaces, PEER.interfaces, (rate(1, "169.254.1.2"),), "thunderbolt"),
        ((ethernet(1),), (ethernet(2),), (rate(1, "172.17.0.1", 9e9),), "ethernet"),
        ((ethernet(1),), (ethernet(1),), (), "loopback"),
    ],
)
def test_links(mine, theirs, links, kind) -> None:
    one, other = Reach.of(node(0, interfaces=mine, links=links)), Reach.of(node(1, interfaces=theirs))
    assert one.rank(other) == other.rank(one) == (NO_LINK if kind is None else LINK_RANK[kind])


def test_a_container_is_reached_by_the_only_cable_it_has() -> None:
    loopback = Interface("lo", "127.0.0.1", "loopback")
    one, other = (node(n, interfaces=(loopback, Interface("eth0", f"172.20.0.{n}", "virtual"))) for n in (1, 2))
    assert addresses(other, one, ()) == ["172.20.0.2"]
    assert addresses(other, one, (rate(2, "172.20.0.2", 1e9),)) == ["172.20.0.2"]
    assert Reach.of(one).rank(Reach.of(other)) == LINK_RANK["unknown"]
    bridge = Interface("docker0", "172.17.0.1", "virtual")
    assert addresses(node(3, interfaces=(loopback, bridge)), one, ()) == []


def test_ports() -> None:
    assert with_port("10.0.0.1", 5) == "10.0.0.1:5"
    assert with_port("fe80::1%en0", 5) == "[fe80::1%en0]:5"
