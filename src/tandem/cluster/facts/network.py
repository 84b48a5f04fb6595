"""The machine's network interfaces: their addresses, what they are, how fast."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from tandem.cluster.facts.blocking import read_text, run_tool
from tandem.types.facts import Interface, InterfaceKind

PORTS_SECONDS = 3.0
ETHERNET, LOOPBACK = "1", "772"
"""ARPHRD numbers of linux/if_arp.h, as `type` holds them."""
IFF_UP = 0x1
TUNNELS = frozenset({"vxlan", "wireguard", "geneve", "gretap", "ip6gretap", "ipip", "sit"})
"""Drivers (`DEVTYPE`) that run over another interface without being it."""
DEEPEST = 4
"""A VLAN on a bridge on a bond on a port is as far as people stack."""

MAC_VIRTUAL = ("utun", "awdl", "llw", "gif", "stf", "anpi", "ap", "bridge", "vmnet", "vmenet", "feth", "ipsec", "ppp")


class LinkReading(NamedTuple):
    """What one interface is; `speed` in bits per second."""

    kind: InterfaceKind
    speed: int | None
    up: bool


class InterfaceReader:
    """Reads every address. `read` blocks: a millisecond on Linux, for a subprocess on macOS when interfaces change."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._ports: dict[str, InterfaceKind] = {}

    def read(self) -> tuple[Interface, ...]:
        """Every IPv4 and IPv6 address, in a stable order."""
        addresses = {
            name: tuple(entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))
            for name, entries in psutil.net_if_addrs().items()
        }
        addresses = {name: found for name, found in addresses.items() if found}
        return describe(addresses, self._links(frozenset(addresses)))

    def _links(self, names: frozenset[str]) -> dict[str, LinkReading]:
        if sys.platform == "linux":
            return {name: linux_link(Path("/sys/class/net"), name) for name in names}
        if sys.platform == "darwin" and names != self._names:
            # The names are kept only with an answer, so that a tool that was too slow is asked again.
            output = run_tool(("networksetup", "-listallhardwareports"), PORTS_SECONDS)
            if output is not None:
                self._ports, self._names = parse_hardware_ports(output), names
        statistics = psutil.net_if_stats()
        return {
            name: LinkReading(mac_kind(name, self._ports), (found.speed * 1_000_000) or None, found.isup)
            for name, found in statistics.items()
        }


def describe(addresses: Mapping[str, tuple[str, ...]], links: Mapping[str, LinkReading]) -> tuple[Interface, ...]:
    """One entry an address, sorted, without scopes (`fe80::1%eth0`) and repetitions. Pure."""
    unknown = LinkReading("unknown", None, True)
    found = set()
    for name, texts in addresses.items():
        link = links.get(name, unknown)
        for text in texts:
            try:
                address = ipaddress.ip_address(text.partition("%")[0])
            except ValueError:
                continue
            kind: InterfaceKind = "loopback" if address.is_loopback else link.kind
            found.add(Interface(name, str(address), kind, link.speed, link.up))
    return tuple(sorted(found, key=lambda entry: (entry.name, ":" in entry.address, entry.address)))


def linux_link(folder: Path, name: str) -> LinkReading:
    """What `/sys/class/net/<name>` says (Documentation/ABI/testing/sysfs-class-net).

    Args:
        folder: that holds one folder for each interface.
    """
    own = folder / name
    kind = _linux_kind(own)
    speed = _linux_speed(own)
    carrier = _carrier(folder, name)
    if carrier is not None and kind == "virtual":
        below = linux_link(folder, carrier)
        kind, speed = below.kind, speed or below.speed
    flags = read_text(own / "flags")
    try:
        enabled = bool(int(flags, 16) & IFF_UP)
    except ValueError:
        enabled = True
    # Loopback and tunnels have no carrier to report and say `unknown`.
    return LinkReading(kind, speed, enabled and read_text(own / "operstate") in ("up", "unknown", ""))


def _linux_kind(own: Path) -> InterfaceKind:
    kind = read_text(own / "type")
    if kind == LOOPBACK:
        return "loopback"
    if (own / "wireless").exists() or (own / "phy80211").exists():
        return "wifi"
    if not (own / "device").exists():
        return "virtual" if kind else "unknown"
    if (own / "device/subsystem").resolve().name == "thunderbolt" or own.name.startswith("thunderbolt"):
        return "thunderbolt"
    # A modem or a USB stick of another sort has a device too.
    return "ethernet" if kind == ETHERNET and _device_type(own) in ("", "dsa") else "unknown"


def _device_type(own: Path) -> str:
    for line in read_text(own / "uevent").splitlines():
        key, _, value = line.partition("=")
        if key == "DEVTYPE":
            return value
    return ""


def _carrier(folder: Path, name: str) -> str | None:
    """The real port below a bridge, a bond or a VLAN: the machine's own address then lies on the virtual one."""
    own = folder / name
    for _ in range(DEEPEST):
        if _device_type(own) in TUNNELS or (own / "tun_flags").exists():
            return None
        lower = sorted(path.name.removeprefix("lower_") for path in own.glob("lower_*"))
        real = next((port for port in lower if (folder / port / "device").exists()), None)
        if real is not None:
            return real
        stacked = next((port for port in lower if list((folder / port).glob("lower_*"))), None)
        if stacked is None:
            return None
        own = folder / stacked
    return None


def _linux_speed(own: Path) -> int | None:
    text = read_text(own / "speed")
    # -1 where the driver does not know, an error where there is no such thing.
    return int(text) * 1_000_000 if text.isdecimal() and int(text) else None


def parse_hardware_ports(output: str) -> dict[str, InterfaceKind]:
    """Kinds by device name from `networksetup -listallhardwareports`. Pure."""
    kinds: dict[str, InterfaceKind] = {}
    port = ""
    for line in output.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            port = value.strip()
        elif key.strip() == "Device" and port and value.strip():
            kinds[value.strip()] = _port_kind(port)
            port = ""
    return kinds


def _port_kind(port: str) -> InterfaceKind:
    lowered = port.lower()
    if "wi-fi" in lowered or "airport" in lowered:
        return "wifi"
    # Before Thunderbolt: a "Thunderbolt Ethernet" adapter is Ethernet.
    if "ethernet" in lowered or "lan" in lowered.split():
        return "ethernet"
    if lowered.startswith("thunderbolt"):
        return "thunderbolt"
    return "unknown"


def mac_kind(name: str, ports: Mapping[str, InterfaceKind]) -> InterfaceKind:
    """What a macOS interface is: by its hardware port, or by its name where it has none. Pure."""
    if name in ports:
        return ports[name]
    letters = name.rstrip("0123456789")
    if letters == "lo":
        return "loopback"
    return "virtual" if letters in MAC_VIRTUAL else "unknown"
