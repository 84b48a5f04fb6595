"""Interfaces: what they are, and what they are called."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tandem.cluster.facts.network import (
    InterfaceReader,
    LinkReading,
    describe,
    linux_link,
    mac_kind,
    parse_hardware_ports,
)
from tandem.types.facts import Interface
from tests.cluster.facts import machines


def link(
    folder: Path,
    name: str,
    *,
    kind: int = 1,
    device: str = "",
    lower: tuple[str, ...] = (),
    devtype: str = "",
    extra: tuple[str, ...] = (),
    **files: str,
) -> None:
    """One interface's folder below /sys/class/net; `device` is the bus that it sits on."""
    own = folder / name
    own.mkdir(parents=True)
    (own / "type").write_text(f"{kind}\n")
    (own / "uevent").write_text((f"DEVTYPE={devtype}\n" if devtype else "") + f"INTERFACE={name}\n")
    for file, text in {"flags": "0x1003", "operstate": "up", **files}.items():
        (own / file).write_text(f"{text}\n")
    for entry in extra:
        (own / entry).mkdir()
    if device:
        bus = folder.parent / "bus" / device
        bus.mkdir(parents=True, exist_ok=True)
        hardware = folder.parent / "devices" / name
        hardware.mkdir(parents=True)
        (hardware / "subsystem").symlink_to(bus)
        (own / "device").symlink_to(hardware)
    for port in lower:
        (own / f"lower_{port}").symlink_to(folder / port)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    folder = tmp_path / "net"
    link(folder, "lo", kind=772, operstate="unknown", flags="0x9")
    link(folder, "eno1", device="pci", speed="10000")
    link(folder, "enp2s0", device="pci", speed="-1", operstate="down")
    link(folder, "wlp3s0", device="pci", devtype="wlan", extra=("wireless", "phy80211"))
    link(folder, "thunderbolt0", device="thunderbolt", speed="20000")
    link(folder, "tbt", device="thunderbolt")
    link(folder, "wwan0", device="usb", devtype="wwan", kind=65534)
    link(folder, "veth1", lower=())
    link(folder, "docker0", devtype="bridge", extra=("bridge",), lower=("veth1",))
    link(folder, "br0", devtype="bridge", extra=("bridge",), lower=("tap0", "eno1"), speed="10000")
    link(folder, "tap0", tun_flags="0x1002")
    link(folder, "tailscale0", kind=65534, tun_flags="0x1001", operstate="unknown")
    link(folder, "wg0", kind=65534, devtype="wireguard", operstate="unknown", lower=("eno1",))
    link(folder, "bond0", devtype="bond", extra=("bonding",), lower=("eno1", "enp2s0"), speed="20000")
    link(folder, "vlan5", devtype="vlan", lower=("bond0",))
    link(folder, "vxlan7", devtype="vxlan", lower=("eno1",))
    link(folder, "ib0", kind=32, device="pci", speed="200000")
    link(folder, "off0", device="pci", flags="0x1002")
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lo", LinkReading("loopback", None, True)),
        ("eno1", LinkReading("ethernet", 10_000_000_000, True)),
        ("enp2s0", LinkReading("ethernet", None, False)),
        ("off0", LinkReading("ethernet", None, False)),
        ("wlp3s0", LinkReading("wifi", None, True)),
        ("thunderbolt0", LinkReading("thunderbolt", 20_000_000_000, True)),
        ("tbt", LinkReading("thunderbolt", None, True)),
        ("wwan0", LinkReading("unknown", None, True)),
        ("veth1", LinkReading("virtual", None, True)),
        ("docker0", LinkReading("virtual", None, True)),
        ("tap0", LinkReading("virtual", None, True)),
        ("tailscale0", LinkReading("virtual", None, True)),
        ("wg0", LinkReading("virtual", None, True)),
        ("vxlan7", LinkReading("virtual", None, True)),
        ("br0", LinkReading("ethernet", 10_000_000_000, True)),
        ("bond0", LinkReading("ethernet", 20_000_000_000, True)),
        ("vlan5", LinkReading("ethernet", 10_000_000_000, True)),
        ("ib0", LinkReading("unknown", 200_000_000_000, True)),
        ("gone", LinkReading("unknown", None, True)),
    ],
)
def test_linux(net: Path, name: str, expected: LinkReading) -> None:
    assert linux_link(net, name) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("en0", "ethernet"),
        ("en1", "wifi"),
        ("en2", "thunderbolt"),
        ("bridge0", "thunderbolt"),
        ("en9", "ethernet"),
        ("en10", "ethernet"),
        ("en11", "unknown"),
        ("en12", "unknown"),
        ("lo0", "loopback"),
        ("utun4", "virtual"),
        ("awdl0", "virtual"),
        ("bridge100", "virtual"),
        ("vmenet0", "virtual"),
    ],
)
def test_macos(name: str, kind: str) -> None:
    assert mac_kind(name, parse_hardware_ports(machines.STUDIO_PORTS)) == kind


@pytest.mark.parametrize("output", ["", "Device: en0\n", "Hardware Port:\nDevice:\n", "\x00\xff garbage : : :"])
def test_garbage_names_no_port(output: str) -> None:
    assert parse_hardware_ports(output) == {}


def test_addresses_lose_their_scope_and_are_sorted() -> None:
    wired = LinkReading("ethernet", 10, True)
    addresses = {
        "eth1": ("fe80::1%eth1", "192.168.1.2", "fe80::1%eth1", "nonsense", "2001:db8:0:0::1"),
        "eth0": ("127.0.0.2", "10.0.0.1"),
    }
    assert describe(addresses, {"eth1": wired}) == (
        Interface("eth0", "10.0.0.1"),
        Interface("eth0", "127.0.0.2", "loopback"),
        Interface("eth1", "192.168.1.2", "ethernet", 10),
        Interface("eth1", "2001:db8::1", "ethernet", 10),
        Interface("eth1", "fe80::1", "ethernet", 10),
    )


def test_this_machine() -> None:
    interfaces = InterfaceReader().read()
    assert any(entry.address == "127.0.0.1" and entry.kind == "loopback" for entry in interfaces)
    for entry in interfaces:
        socket.inet_pton(socket.AF_INET6 if ":" in entry.address else socket.AF_INET, entry.address)
    if sys.platform == "linux":
        names = {name for _, name in socket.if_nameindex()}
        assert {entry.name for entry in interfaces} <= names
    assert InterfaceReader().read() == interfaces
