"""What several machines would tell, in the formats of sysctl, system_profiler, DMI, /proc and os-release."""

from __future__ import annotations

import json

from tandem.cluster.facts.device import LinuxSample, MacSample

UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nLOGO=ubuntu-logo\n'
FEDORA = "NAME='Fedora Linux'\nVERSION_ID=43\n# a remark\nbroken=\"never closed\n"
NIXOS = 'ID=nixos\nNAME=NixOS\nVERSION_ID="26.05"\n'


def cpuinfo(name: str) -> str:
    """Two cores of an x86 machine."""
    core = "processor\t: {}\nvendor_id\t: X\nmodel name\t: " + name + "\nflags\t\t: fpu vme model name\n\n"
    return core.format(0) + core.format(1)


ARM_CPUINFO = (
    "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd85\n\n" * 2
)


def profile(name: str, model: str, chip: str) -> str:
    """What `system_profiler -json SPHardwareDataType` prints, without serial numbers."""
    entry = {
        "_name": "hardware_overview",
        "chip_type": chip,
        "machine_model": model,
        "machine_name": name,
        "number_processors": "proc 32:24:8",
        "physical_memory": "512 GB",
    }
    return json.dumps({"SPHardwareDataType": [entry]}, indent=2)


MAC_STUDIO = MacSample("Mac15,14", "Apple M3 Ultra", profile("Mac Studio", "Mac15,14", "Apple M3 Ultra"), "26.1")
MACBOOK_PRO = MacSample("Mac16,5", "Apple M4 Max", profile("MacBook Pro", "Mac16,5", "Apple M4 Max"), "15.7.2")
MAC_MINI = MacSample("Mac16,11", "Apple M4 Pro", profile("Mac mini", "Mac16,11", "Apple M4 Pro"), "15.5")
MAC_PRO = MacSample("Mac14,8", "Apple M2 Ultra", profile("Mac Pro", "Mac14,8", "Apple M2 Ultra"), "14.6")
IMAC = MacSample("Mac15,5", "Apple M3", profile("iMac", "Mac15,5", "Apple M3"), "15.0")
OLD_MINI_WITHOUT_PROFILE = MacSample("Macmini9,1", "Apple M1", "", "13.6")
STUDIO_WITHOUT_PROFILE = MacSample("Mac15,14", "Apple M3 Ultra", "Segmentation fault: 11", "26.1")
INTEL_MACBOOK = MacSample(
    "MacBookPro16,1", "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz", '{"SPHardwareDataType": []}', "13.6"
)

DGX_SPARK = LinuxSample(
    product_name="NVIDIA_DGX_Spark",
    product_version="A.7",
    sys_vendor="NVIDIA",
    board_name="P4242",
    chassis_type="17",
    cpuinfo=ARM_CPUINFO,
    os_release=UBUNTU,
    machine="aarch64",
)
SPARK_BY_ANOTHER_MAKER = LinuxSample(
    product_name="Dell Pro Max with GB10 FCM1253",
    sys_vendor="Dell Inc.",
    chassis_type="35",
    cpuinfo=ARM_CPUINFO,
    os_release=UBUNTU,
    machine="aarch64",
)
THINKPAD = LinuxSample(
    product_name="20XW0042US",
    product_version="ThinkPad X1 Carbon Gen 9",
    sys_vendor="LENOVO",
    chassis_type="10",
    cpuinfo=cpuinfo("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz"),
    os_release=FEDORA,
    machine="x86_64",
    battery=True,
)
DELL_TOWER = LinuxSample(
    product_name="Precision 7960 Tower",
    sys_vendor="Dell Inc.",
    chassis_type="7",
    cpuinfo=cpuinfo("Intel(R) Xeon(R) w9-3495X"),
    os_release=UBUNTU,
)
SELF_BUILT = LinuxSample(
    product_name="System Product Name",
    product_version="System Version",
    sys_vendor="ASUS",
    board_vendor="ASUSTeK COMPUTER INC.",
    board_name="ROG STRIX X670E-E GAMING WIFI",
    chassis_type="3",
    cpuinfo=cpuinfo("AMD Ryzen 9 7950X 16-Core Processor"),
    os_release=NIXOS,
)
UNLABELLED_LAPTOP = LinuxSample(product_name="To Be Filled By O.E.M.", sys_vendor="Default string", battery=True)
VIRTUAL_MACHINE = LinuxSample(
    product_name="Standard PC (Q35 + ICH9, 2009)",
    product_version="pc-q35-9.2",
    sys_vendor="QEMU",
    chassis_type="1",
    cpuinfo=cpuinfo("AMD EPYC-Milan Processor"),
    os_release=UBUNTU,
)
HYPER_V = LinuxSample(product_name="Virtual Machine", sys_vendor="Microsoft Corporation", chassis_type="3")
CONTAINER = LinuxSample(cpuinfo=cpuinfo("Intel(R) Xeon(R) Processor"), os_release="", machine="x86_64")
RASPBERRY_PI = LinuxSample(
    device_tree_model="Raspberry Pi 5 Model B Rev 1.0", cpuinfo=ARM_CPUINFO, os_release=UBUNTU, machine="aarch64"
)
LINUX_ON_MACBOOK = LinuxSample(
    device_tree_model="Apple MacBook Pro (14-inch, M1 Pro, 2021)", os_release=FEDORA, machine="aarch64", battery=True
)

STUDIO_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 02:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 02:00:00:00:00:02

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 02:00:00:00:00:03

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: N/A

Hardware Port: Thunderbolt Ethernet Slot 2
Device: en9
Ethernet Address: 02:00:00:00:00:04

Hardware Port: USB 10/100/1000 LAN
Device: en10
Ethernet Address: 02:00:00:00:00:05

Hardware Port: iPhone USB
Device: en11
Ethernet Address: N/A

VLAN Configurations
===================
"""
