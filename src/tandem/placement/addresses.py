"""Which of a node's addresses another one should use, and what kind of link joins two nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from tandem.types.facts import Interface, InterfaceKind, LinkRate, NodeFacts

LinkKind: TypeAlias = Literal["loopback", "thunderbolt", "ethernet", "wifi", "unknown"]
LINK_RANK: dict[LinkKind, int] = {"loopback": 0, "thunderbolt": 1, "ethernet": 2, "wifi": 3, "unknown": 4}
"""Better links have lower ranks."""
NO_LINK = 9
_KINDS: dict[InterfaceKind, LinkKind] = {
    "thunderbolt": "thunderbolt",
    "ethernet": "ethernet",
    "wifi": "wifi",
    "unknown": "unknown",
}

EXPECTED: dict[LinkKind, float] = {
    "loopback": 1e12,
    "thunderbolt": 2.5e9,
    "ethernet": 0.118e9,
    "wifi": 0.02e9,
    "unknown": 0.01e9,
}
"""Bytes per second that a link is taken to carry until it is measured."""
SLOWEST_ETHERNET, FASTEST_ETHERNET = 0.03e9, 2.4e9
"""An unmeasured ethernet's own speed counts between these, so that kinds keep their order."""
USABLE_SHARE = 0.94
"""Of a wire's bits, what TCP carries at 1500 bytes a packet."""
VIRTUAL_NAMES = ("docker", "br-", "veth", "virbr", "vmnet", "cni", "flannel", "cali", "podman", "lxc", "lxd")
"""Interfaces of containers and virtual machines, whatever kind the platform takes them for. The same addresses exist
on many machines."""


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def is_virtual(interface: Interface) -> bool:
    """Whether it leads into containers or virtual machines."""
    return interface.kind == "virtual" or interface.name.lower().startswith(VIRTUAL_NAMES)


@lru_cache(maxsize=4096)
def is_reachable(address: str) -> bool:
    """Whether another machine may be able to dial it: link-local IPv6 only with its scope, loopback never."""
    parsed = _parse(address)
    if parsed is None or parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast:
        return False
    return not (isinstance(parsed, ipaddress.IPv6Address) and parsed.is_link_local and parsed.scope_id is None)


def usable(facts: NodeFacts) -> tuple[Interface, ...]:
    """The interfaces by which other machines may reach the node.

    A container that has nothing but its end of a virtual cable is reached by that, of whatever kind it is.
    """
    up = [interface for interface in facts.interfaces if interface.up and is_reachable(interface.address)]
    real = tuple(interface for interface in up if interface.kind in _KINDS and not is_virtual(interface))
    if real:
        return real
    return tuple(
        msgspec.structs.replace(interface, kind="unknown")
        for interface in up
        if interface.kind == "virtual" and not interface.name.lower().startswith(VIRTUAL_NAMES)
    )


@lru_cache(maxsize=4096)
def _network(address: str) -> str | None:
    """The network that an address is probably in, as /24 or /64; None where sharing it proves nothing."""
    parsed = _parse(address)
    if parsed is None or parsed.is_link_local:
        return None
    return str(ipaddress.ip_network((parsed, 24 if parsed.version == 4 else 64), strict=False))


def measured_kind(facts: NodeFacts, address: str) -> LinkKind | None:
    """The kind of the link that ends at this address of a node; None if it must not be used."""
    plain = address.partition("%")[0]
    for interface in facts.interfaces:
        if interface.address == plain:
            if interface.kind == "virtual" and any(own.address == plain for own in usable(facts)):
                return "unknown"
            return None if is_virtual(interface) or not interface.up else _KINDS.get(interface.kind)
    return "unknown"


@dataclass(frozen=True, slots=True)
class Reach:
    """What a node's facts say of its links, read once.

    Attributes:
        addresses: by which other machines may reach it.
        proven: those of them that no container's network has, so that no two machines share them.
        networks: that it is in, with the best rank of its interfaces there.
        listed: rank of the interface of every address, None where it must not be used.
        measured: addresses that it reached other nodes at, by node.
    """

    facts: NodeFacts
    addresses: frozenset[str]
    proven: frozenset[str]
    networks: dict[str, int]
    listed: dict[str, int | None]
    measured: dict[str, list[str]]

    @classmethod
    def of(cls, facts: NodeFacts) -> Reach:
        """Read a node's facts."""
        interfaces = usable(facts)
        networks: dict[str, int] = {}
        for interface in interfaces:
            network = _network(interface.address)
            if network is not None:
                rank = LINK_RANK[_KINDS[interface.kind]]
                networks[network] = min(rank, networks.get(network, rank))
        listed: dict[str, int | None] = {}
        for interface in facts.interfaces:
            kind = measured_kind(facts, interface.address)
            listed[interface.address] = None if kind is None else LINK_RANK[kind]
        measured: dict[str, list[str]] = {}
        for rate in facts.links:
            if is_reachable(rate.address):
                measured.setdefault(rate.node_id, []).append(rate.address)
        found = frozenset(interface.address for interface in interfaces)
        virtual = {interface.address for interface in facts.interfaces if is_virtual(interface)}
        return cls(facts, found, found - virtual, networks, listed, measured)

    def same_machine(self, other: Reach) -> bool:
        """Whether two nodes run on one machine, as far as their addresses tell.

        They do if they share an address that is not a container's; or if neither has one and all they have is equal.
        """
        if self.proven or other.proven:
            return not self.proven.isdisjoint(other.proven)
        one, two = self.facts, other.facts
        return bool(one.interfaces) and one.interfaces == two.interfaces and one.device == two.device

    def rank(self, other: Reach) -> int:
        """`LINK_RANK` of the best link to another node; `NO_LINK` if there is none.

        A link that either has measured counts by its interface, two addresses in one network by the worse of theirs.
        Thunderbolt addresses are mostly link-local and so prove nothing: that cable counts once it is measured.
        Nodes that share no network are routed somehow: unknown.
        """
        if self.same_machine(other):
            return LINK_RANK["loopback"]
        unknown = LINK_RANK["unknown"]
        best = NO_LINK
        for here, there in ((self, other), (other, self)):
            for address in here.measured.get(there.facts.node_id, ()):
                rank = there.listed.get(address.partition("%")[0], unknown)
                if rank is not None:
                    best = min(best, rank)
        for network, rank in self.networks.items():
            if network in other.networks:
                best = min(best, max(rank, other.networks[network]))
        silent = not self.facts.interfaces or not other.facts.interfaces
        if best == NO_LINK and (silent or (self.addresses and other.addresses)):
            return unknown
        return best


def expected_bandwidth(interface: Interface, me: NodeFacts) -> float:
    """Bytes per second that an unmeasured interface of a peer is taken to carry, seen from `me`."""
    kind = _KINDS[interface.kind]
    if kind == "thunderbolt" and not any(own.kind == "thunderbolt" for own in usable(me)):
        return EXPECTED["unknown"]  # the cable leads to some other machine
    if kind == "ethernet" and interface.speed:
        return min(max(interface.speed / 8 * USABLE_SHARE, SLOWEST_ETHERNET), FASTEST_ETHERNET)
    return EXPECTED[kind]


def addresses(peer: NodeFacts, me: NodeFacts, rates: Iterable[LinkRate]) -> list[str]:
    """Addresses of `peer`, the one to try first in front.

    The same machine is reached through loopback. What was measured counts by its bandwidth; the rest by what its kind
    is expected to carry: thunderbolt, ethernet by speed, wifi, unknown. Never an address of a container's or virtual
    machine's network, nor link-local IPv6 without a scope.

    Args:
        rates: measured by `me`; those of other nodes are ignored.
    """
    local = Reach.of(peer).same_machine(Reach.of(me))
    bandwidth: dict[str, float] = {}
    for interface in usable(peer):
        bandwidth[interface.address] = max(expected_bandwidth(interface, me), bandwidth.get(interface.address, 0.0))
    for rate in rates:
        if rate.node_id != peer.node_id or not is_reachable(rate.address):
            continue
        kind = measured_kind(peer, rate.address)
        if kind is None:
            continue
        if rate.bandwidth is not None:
            bandwidth[rate.address] = rate.bandwidth
        else:
            bandwidth.setdefault(rate.address, EXPECTED[kind])

    def order(address: str) -> tuple[float, bool, str]:
        return -bandwidth[address], ":" in address, address

    return [*(["127.0.0.1"] if local else []), *sorted(bandwidth, key=order)]


def with_port(address: str, port: int) -> str:
    """`host:port`, with brackets around IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
