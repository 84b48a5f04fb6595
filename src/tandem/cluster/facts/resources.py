"""Memory, swap, disk, load and temperature of the machine, or of the container that the node runs in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import psutil

from tandem.cluster.facts.blocking import read_text

SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
"""Linux's hwmon drivers that know the processor's temperature, best first."""

SHORTEST_SECONDS = 0.1
"""Of all cores together, between two readings: the kernel counts in hundredths, so that less says nothing."""


class SystemReading(NamedTuple):
    """Bytes; `cpu_usage` from 0 to 1 since the reading before; `temperature` in degrees Celsius."""

    memory_total: int
    memory_available: int
    swap_total: int
    swap_available: int
    cpu_usage: float
    temperature: float | None


class DiskReading(NamedTuple):
    """Bytes of a file system."""

    total: int
    available: int


class MemoryLimit(NamedTuple):
    """Of a control group: bytes that it may use, and bytes that it uses and cannot give back by dropping file pages."""

    limit: int
    used: int


class CpuTimes(NamedTuple):
    """Seconds since the machine started, over all cores."""

    busy: float
    total: float


class SystemReader:
    """Reads memory and load. `read` blocks for well under a millisecond.

    Args:
        root: below which `/proc` and `/sys` lie.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._groups = memory_groups(root)
        self._sensor = find_sensor(root)
        self._before = cpu_times()

    def read(self) -> SystemReading:
        """As it is now."""
        memory = psutil.virtual_memory()
        swap = psutil.swap_memory()
        total, available = memory.total, memory.available
        for group in self._groups:
            total, available = within(total, available, group_memory(group))
        now = cpu_times()
        usage = busy_share(self._before, now)
        self._before = now
        return SystemReading(total, available, swap.total, swap.free, usage, self._temperature())

    def _temperature(self) -> float | None:
        text = read_text(self._sensor) if self._sensor is not None else ""
        return int(text) / 1000 if text.lstrip("-").isdecimal() else None


def read_disk(folder: Path) -> DiskReading:
    """The file system of `folder`, or of its nearest parent that exists. Hangs when a network disk does.

    Raises:
        OSError: the file system does not tell.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return DiskReading(usage.total, usage.free)


def cpu_times() -> CpuTimes:
    """Now. Our own differences: psutil keeps the last reading per thread, and every read is in another one."""
    times = psutil.cpu_times()
    # Linux counts a guest's time in `user` as well, so the named fields are summed without it.
    names = [name for name in times._fields if name not in ("guest", "guest_nice")]
    total = float(sum(getattr(times, name) for name in names))
    idle = float(times.idle) + float(getattr(times, "iowait", 0.0))
    return CpuTimes(total - idle, total)


def busy_share(before: CpuTimes, now: CpuTimes) -> float:
    """The share of time, 0 to 1, that the cores were busy between two readings. Pure."""
    passed = now.total - before.total
    if passed < SHORTEST_SECONDS:
        return 0.0
    return min(1.0, max(0.0, (now.busy - before.busy) / passed))


def within(total: int, available: int, limit: MemoryLimit | None) -> tuple[int, int]:
    """Memory in total and available, once a control group's limit counts too. Pure."""
    if limit is None or limit.limit >= total:
        return total, available
    return limit.limit, min(available, max(0, limit.limit - limit.used))


def memory_groups(root: Path) -> tuple[Path, ...]:
    """Folders of the control groups, version 1 or 2, around this process that limit its memory."""
    found: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        # A container that sees the host's path but only its own group mounted has nothing there: its top counts.
        folder = top / path.lstrip("/")
        while True:
            if group_memory(folder) is not None:
                found.append(folder)
            if folder == top:
                break
            folder = folder.parent
    return tuple(found)


def group_memory(folder: Path) -> MemoryLimit | None:
    """A control group's limit and use; None when it has no limit, or when it is gone."""
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = read_text(folder / limit_name), read_text(folder / used_name)
        # Version 1 writes a number of 19 digits where there is no limit.
        if not limit.isdecimal() or not used.isdecimal() or len(limit) > 18:
            continue
        statistics = dict(
            line.split(maxsplit=1) for line in read_text(folder / "memory.stat").splitlines() if " " in line
        )
        cached = statistics.get(cached_name, "0")
        return MemoryLimit(int(limit), max(0, int(used) - (int(cached) if cached.isdecimal() else 0)))
    return None


def find_sensor(root: Path) -> Path | None:
    """The file with the processor's temperature in thousandths of a degree, where Linux has one.

    One file only: reading every sensor of a machine asks disks and takes milliseconds.
    """
    monitors = root / "sys/class/hwmon"
    named = {read_text(folder / "name"): folder for folder in monitors.iterdir()} if monitors.is_dir() else {}
    for name in SENSORS:
        folder = named.get(name)
        if folder is not None and (folder / "temp1_input").exists():
            return folder / "temp1_input"
    zone = root / "sys/class/thermal/thermal_zone0/temp"
    return zone if zone.exists() else None
