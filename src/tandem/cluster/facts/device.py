"""What kind of machine this is."""

from __future__ import annotations

import json
import platform
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.facts.blocking import read_text, run_tool
from tandem.types.facts import Device, DeviceKind

PROFILER_SECONDS = 10.0
TOOL_SECONDS = 3.0

MAC_NAMES: tuple[tuple[str, DeviceKind], ...] = (
    ("macbook", "macbook"),
    ("mac studio", "mac_studio"),
    ("mac mini", "mac_mini"),
    ("macmini", "mac_mini"),
    ("mac pro", "mac_pro"),
    ("macpro", "mac_pro"),
    ("imac", "imac"),
)
"""In names as people write them, and in older identifiers (`Macmini9,1`). Newer ones (`Mac15,14`) name no kind."""

STATIONARY_CHASSIS = frozenset({3, 4, 5, 6, 7, 13, 15, 16, 17, 23, 24, 25, 28, 35, 36})
PORTABLE_CHASSIS = frozenset({8, 9, 10, 14, 30, 31, 32})
"""Types of the SMBIOS specification (DSP0134), "System Enclosure or Chassis Types". Servers count as stationary."""

VIRTUAL_VENDORS = (
    "qemu",
    "vmware",
    "innotek",
    "xen",
    "amazon ec2",
    "google compute",
    "openstack",
    "parallels",
    "bochs",
    "digitalocean",
    "firecracker",
)
PLACEHOLDERS = frozenset(
    {
        "",
        "default string",
        "to be filled by o.e.m.",
        "system product name",
        "system manufacturer",
        "system version",
        "not applicable",
        "not specified",
        "o.e.m.",
        "oem",
        "none",
        "unknown",
        "invalid",
    }
)
"""What firmware says where its maker filled in nothing."""
COMPANY_SUFFIX = re.compile(r",? (inc|corporation|corp|co|ltd|limited|computer)\b\.?.*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LinuxSample:
    """What Linux tells, as read: DMI strings, the device tree's model, `/proc/cpuinfo`, `/etc/os-release`."""

    product_name: str = ""
    product_version: str = ""
    sys_vendor: str = ""
    board_vendor: str = ""
    board_name: str = ""
    chassis_type: str = ""
    device_tree_model: str = ""
    cpuinfo: str = ""
    os_release: str = ""
    machine: str = ""
    battery: bool = False


@dataclass(frozen=True, slots=True)
class MacSample:
    """What macOS tells, as read: `sysctl`, `system_profiler -json SPHardwareDataType`, the system's version."""

    hardware_model: str = ""
    brand: str = ""
    profile: str = ""
    version: str = ""


def read_device(gpu_names: Sequence[str] = ()) -> Device:
    """Look at this machine. Blocks, on macOS for a second or so.

    Args:
        gpu_names: as the GPU's driver calls them; they tell a DGX Spark's siblings, which other makers sell.
    """
    if sys.platform == "darwin":
        return mac_device(read_mac())
    if sys.platform == "linux":
        return linux_device(read_linux(), gpu_names)
    return Device(os=platform.system(), os_version=platform.release())


def friendly_name(setting: str) -> str:
    """`setting`, or the computer's name as its owner chose it. Blocks shortly on macOS."""
    if setting.strip():
        return setting.strip()
    if sys.platform == "darwin":
        name = (run_tool(("scutil", "--get", "ComputerName"), TOOL_SECONDS) or "").strip()
        if name:
            return name
    return socket.gethostname().partition(".")[0] or "tandem"


def read_linux(root: Path = Path("/")) -> LinuxSample:
    """Read what Linux tells of the machine below `root`."""
    dmi = root / "sys/class/dmi/id"
    return LinuxSample(
        product_name=read_text(dmi / "product_name"),
        product_version=read_text(dmi / "product_version"),
        sys_vendor=read_text(dmi / "sys_vendor"),
        board_vendor=read_text(dmi / "board_vendor"),
        board_name=read_text(dmi / "board_name"),
        chassis_type=read_text(dmi / "chassis_type"),
        device_tree_model=read_text(root / "proc/device-tree/model"),
        cpuinfo=read_text(root / "proc/cpuinfo"),
        os_release=read_text(root / "etc/os-release") or read_text(root / "usr/lib/os-release"),
        machine=platform.machine(),
        battery=has_battery(root),
    )


def has_battery(root: Path = Path("/")) -> bool:
    """Whether Linux runs on a battery of its own; a mouse's does not count."""
    supplies = root / "sys/class/power_supply"
    if not supplies.is_dir():
        return False
    return any(
        read_text(supply / "type") == "Battery" and read_text(supply / "scope") != "Device"
        for supply in supplies.iterdir()
    )


def read_mac() -> MacSample:
    """Ask macOS."""
    return MacSample(
        hardware_model=(run_tool(("sysctl", "-n", "hw.model"), TOOL_SECONDS) or "").strip(),
        brand=(run_tool(("sysctl", "-n", "machdep.cpu.brand_string"), TOOL_SECONDS) or "").strip(),
        profile=run_tool(("system_profiler", "-json", "SPHardwareDataType"), PROFILER_SECONDS) or "",
        version=platform.mac_ver()[0],
    )


def mac_device(sample: MacSample) -> Device:
    """What macOS's answers mean. Pure."""
    hardware = _first_hardware(sample.profile)
    name = str(hardware.get("machine_name", ""))
    identifier = str(hardware.get("machine_model", "")) or sample.hardware_model
    kind = mac_kind(name)
    if kind == "unknown":
        kind = mac_kind(identifier)
    model = f"{name} ({identifier})" if name and identifier else name or identifier
    chip = str(hardware.get("chip_type", "")) or clean_chip(sample.brand)
    return Device(kind, model, chip, "macOS", sample.version)


def _first_hardware(profile: str) -> dict[str, object]:
    try:
        entries = json.loads(profile)["SPHardwareDataType"]
        first = entries[0]
    except (ValueError, KeyError, IndexError, TypeError):
        return {}
    return first if isinstance(first, dict) else {}


def mac_kind(name: str) -> DeviceKind:
    """The kind of Mac that a name or an identifier means."""
    lowered = name.lower()
    return next((kind for part, kind in MAC_NAMES if part in lowered), "unknown")


def linux_device(sample: LinuxSample, gpu_names: Sequence[str] = ()) -> Device:
    """What Linux's answers mean. Pure."""
    release = parse_os_release(sample.os_release)
    return Device(
        kind=_linux_kind(sample, gpu_names),
        model=_linux_model(sample),
        chip="NVIDIA GB10" if _is_spark(sample, gpu_names) else parse_cpuinfo(sample.cpuinfo) or sample.machine,
        os=release.get("NAME", "Linux"),
        os_version=release.get("VERSION_ID", ""),
    )


def _is_spark(sample: LinuxSample, gpu_names: Sequence[str]) -> bool:
    named = "dgx spark" in sample.product_name.lower().replace("_", " ")
    return named or any("GB10" in name.split() for name in gpu_names)


def _linux_kind(sample: LinuxSample, gpu_names: Sequence[str]) -> DeviceKind:
    if _is_spark(sample, gpu_names):
        return "dgx_spark"
    product, vendor = sample.product_name.lower(), sample.sys_vendor.lower()
    if "virtual" in product or any(name in vendor or name in product for name in VIRTUAL_VENDORS):
        return "unknown"
    # Linux on a Mac: the device tree (Apple silicon) or DMI (Intel) names it.
    if "apple" in vendor or sample.device_tree_model.startswith("Apple "):
        return mac_kind(f"{sample.product_name} {sample.device_tree_model}")
    chassis = int(sample.chassis_type) if sample.chassis_type.isdecimal() else 0
    if chassis in PORTABLE_CHASSIS:
        return "linux_laptop"
    if chassis in STATIONARY_CHASSIS:
        return "linux_desktop"
    return "linux_laptop" if sample.battery else "unknown"


def _linux_model(sample: LinuxSample) -> str:
    vendor, name = sample.sys_vendor, sample.product_name
    if vendor.lower() == "lenovo" and sample.product_version.lower() not in PLACEHOLDERS:
        # Lenovo keeps the order number in product_name and the name in product_version.
        name = sample.product_version
    if name.lower() in PLACEHOLDERS:
        vendor, name = sample.board_vendor or vendor, sample.board_name
    if name.lower() in PLACEHOLDERS:
        return sample.device_tree_model
    name = name.replace("_", " ")
    vendor = "" if vendor.lower() in PLACEHOLDERS else COMPANY_SUFFIX.sub("", vendor)
    return name if not vendor or vendor.lower() in name.lower() else f"{vendor} {name}"


def parse_os_release(text: str) -> dict[str, str]:
    """Fields of `/etc/os-release` (os-release(5)): shell assignments."""
    fields = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or key.startswith("#"):
            continue
        try:
            words = shlex.split(value)
        except ValueError:
            continue
        fields[key] = words[0] if words else ""
    return fields


def parse_cpuinfo(text: str) -> str:
    """The processor's name in `/proc/cpuinfo`; empty where it has none, as on most ARM machines."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return clean_chip(value)
    return ""


def clean_chip(brand: str) -> str:
    """A processor's name without trade marks, clock and filler."""
    text = re.sub(r"\((R|TM|tm|r)\)", "", brand).partition("@")[0]
    text = re.sub(r"\b(CPU|\d+-Core Processor|Processor)\b", "", text)
    return " ".join(text.split())
