"""Memory, disk and load."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tandem.cluster.facts.resources import (
    CpuTimes,
    MemoryLimit,
    SystemReader,
    busy_share,
    find_sensor,
    group_memory,
    memory_groups,
    read_disk,
    within,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_this_machine(tmp_path: Path) -> None:
    reading = SystemReader().read()
    assert 0 < reading.memory_available <= reading.memory_total <= psutil.virtual_memory().total
    assert 0 <= reading.cpu_usage <= 1
    disk = read_disk(tmp_path / "not" / "there" / "yet")
    assert disk == read_disk(tmp_path) or disk.total == read_disk(tmp_path).total
    assert 0 < disk.available <= disk.total


def test_usage_is_the_difference_of_two_readings() -> None:
    assert busy_share(CpuTimes(10, 100), CpuTimes(11, 104)) == 0.25
    assert busy_share(CpuTimes(10, 100), CpuTimes(10, 100)) == 0.0
    assert busy_share(CpuTimes(10, 100), CpuTimes(9, 104)) == 0.0, "iowait may run backwards"


def test_load_is_seen() -> None:
    reader = SystemReader()
    times = psutil.cpu_times()
    while psutil.cpu_times().user - times.user < 0.3:
        pass
    assert reader.read().cpu_usage > 0.1


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_control_group_allows(tmp_path: Path, version: int) -> None:
    if version == 2:
        write(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user.slice/app\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/user.slice/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/user.slice/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
                "sys/fs/cgroup/user.slice/app/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/app/memory.current": f"{GIB}\n",
            },
        )
    else:
        write(
            tmp_path,
            {
                "proc/self/cgroup": "9:cpuset:/\n4:memory:/docker/0123\n0::/elsewhere\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {2 * GIB}\n",
            },
        )
    (group,) = memory_groups(tmp_path)
    assert group_memory(group) == MemoryLimit(8 * GIB, 3 * GIB)
    assert within(64 * GIB, 60 * GIB, group_memory(group)) == (8 * GIB, 5 * GIB)


def test_no_limit_is_none(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert memory_groups(tmp_path) == ()
    assert within(4, 3, None) == (4, 3)
    assert within(4, 3, MemoryLimit(8, 8)) == (4, 3)
    assert within(8, 3, MemoryLimit(4, 5)) == (4, 0)


def test_the_processor_has_a_sensor(tmp_path: Path) -> None:
    assert find_sensor(tmp_path) is None
    write(tmp_path, {"sys/class/thermal/thermal_zone0/temp": "30000\n"})
    assert find_sensor(tmp_path) == tmp_path / "sys/class/thermal/thermal_zone0/temp"
    write(
        tmp_path,
        {
            "sys/class/hwmon/hwmon0/name": "nvme\n",
            "sys/class/hwmon/hwmon0/temp1_input": "50000\n",
            "sys/class/hwmon/hwmon1/name": "k10temp\n",
            "sys/class/hwmon/hwmon1/temp1_input": "41250\n",
        },
    )
    assert find_sensor(tmp_path) == tmp_path / "sys/class/hwmon/hwmon1/temp1_input"
    assert SystemReader(tmp_path).read().temperature == 41.25
    write(tmp_path, {"sys/class/hwmon/hwmon1/temp1_input": "garbage"})
    assert SystemReader(tmp_path).read().temperature is None
