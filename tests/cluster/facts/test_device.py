"""Machines are told apart by what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.cluster.facts.device import (
    LinuxSample,
    MacSample,
    friendly_name,
    has_battery,
    linux_device,
    mac_device,
    read_device,
    read_linux,
)
from tandem.types.facts import Device
from tests.cluster.facts import machines


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (machines.MAC_STUDIO, Device("mac_studio", "Mac Studio (Mac15,14)", "Apple M3 Ultra", "macOS", "26.1")),
        (machines.MACBOOK_PRO, Device("macbook", "MacBook Pro (Mac16,5)", "Apple M4 Max", "macOS", "15.7.2")),
        (machines.MAC_MINI, Device("mac_mini", "Mac mini (Mac16,11)", "Apple M4 Pro", "macOS", "15.5")),
        (machines.MAC_PRO, Device("mac_pro", "Mac Pro (Mac14,8)", "Apple M2 Ultra", "macOS", "14.6")),
        (machines.IMAC, Device("imac", "iMac (Mac15,5)", "Apple M3", "macOS", "15.0")),
        (machines.OLD_MINI_WITHOUT_PROFILE, Device("mac_mini", "Macmini9,1", "Apple M1", "macOS", "13.6")),
        (machines.STUDIO_WITHOUT_PROFILE, Device("unknown", "Mac15,14", "Apple M3 Ultra", "macOS", "26.1")),
        (machines.INTEL_MACBOOK, Device("macbook", "MacBookPro16,1", "Intel Core i9-9880H", "macOS", "13.6")),
        (MacSample(), Device("unknown", "", "", "macOS", "")),
        (MacSample(profile='{"SPHardwareDataType": ["?"]}'), Device("unknown", "", "", "macOS", "")),
    ],
)
def test_macs(sample: MacSample, expected: Device) -> None:
    assert mac_device(sample) == expected


@pytest.mark.parametrize(
    ("sample", "gpus", "expected"),
    [
        (machines.DGX_SPARK, (), Device("dgx_spark", "NVIDIA DGX Spark", "NVIDIA GB10", "Ubuntu", "24.04")),
        (
            machines.SPARK_BY_ANOTHER_MAKER,
            ("NVIDIA GB10",),
            Device("dgx_spark", "Dell Pro Max with GB10 FCM1253", "NVIDIA GB10", "Ubuntu", "24.04"),
        ),
        (
            machines.THINKPAD,
            (),
            Device(
                "linux_laptop", "LENOVO ThinkPad X1 Carbon Gen 9", "11th Gen Intel Core i7-1165G7", "Fedora Linux", "43"
            ),
        ),
        (
            machines.DELL_TOWER,
            ("NVIDIA RTX 6000 Ada Generation",),
            Device("linux_desktop", "Dell Precision 7960 Tower", "Intel Xeon w9-3495X", "Ubuntu", "24.04"),
        ),
        (
            machines.SELF_BUILT,
            ("NVIDIA GeForce RTX 4090",),
            Device("linux_desktop", "ASUSTeK ROG STRIX X670E-E GAMING WIFI", "AMD Ryzen 9 7950X", "NixOS", "26.05"),
        ),
        (machines.UNLABELLED_LAPTOP, (), Device("linux_laptop", "", "", "Linux", "")),
        (
            machines.VIRTUAL_MACHINE,
            (),
            Device("unknown", "QEMU Standard PC (Q35 + ICH9, 2009)", "AMD EPYC-Milan", "Ubuntu", "24.04"),
        ),
        (machines.HYPER_V, (), Device("unknown", "Microsoft Virtual Machine", "", "Linux", "")),
        (machines.CONTAINER, (), Device("unknown", "", "Intel Xeon", "Linux", "")),
        (machines.RASPBERRY_PI, (), Device("unknown", "Raspberry Pi 5 Model B Rev 1.0", "aarch64", "Ubuntu", "24.04")),
        (
            machines.LINUX_ON_MACBOOK,
            (),
            Device("macbook", "Apple MacBook Pro (14-inch, M1 Pro, 2021)", "aarch64", "Fedora Linux", "43"),
        ),
        (LinuxSample(), (), Device("unknown", "", "", "Linux", "")),
    ],
)
def test_linux_machines(sample: LinuxSample, gpus: tuple[str, ...], expected: Device) -> None:
    assert linux_device(sample, gpus) == expected


def test_linux_is_read_from_its_files(tmp_path: Path) -> None:
    files = {
        "sys/class/dmi/id/product_name": "20XW0042US\n",
        "sys/class/dmi/id/chassis_type": "10\n",
        "proc/device-tree/model": "Some Board\0",
        "proc/cpuinfo": machines.cpuinfo("A"),
        "usr/lib/os-release": machines.FEDORA,
        "sys/class/power_supply/BAT0/type": "Battery\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sample = read_linux(tmp_path)
    assert (sample.product_name, sample.chassis_type, sample.device_tree_model) == ("20XW0042US", "10", "Some Board")
    assert sample.battery
    assert sample.os_release.startswith("NAME='Fedora")


def test_a_mouse_makes_no_laptop(tmp_path: Path) -> None:
    supply = tmp_path / "sys/class/power_supply/hidpp_battery_0"
    supply.mkdir(parents=True)
    (supply / "type").write_text("Battery\n")
    (supply / "scope").write_text("Device\n")
    assert not has_battery(tmp_path)
    (supply / "scope").unlink()
    assert has_battery(tmp_path)


def test_a_container_without_anything(tmp_path: Path) -> None:
    device = linux_device(read_linux(tmp_path))
    assert (device.kind, device.model, device.os) == ("unknown", "", "Linux")


def test_this_machine() -> None:
    device = read_device()
    assert device.os
    assert device.chip
    if sys.platform == "darwin":
        assert device.os == "macOS"


def test_the_name_is_the_setting_or_the_computer() -> None:
    assert friendly_name("  Blue ") == "Blue"
    own = friendly_name("")
    assert own
    assert "." not in own or sys.platform == "darwin"
