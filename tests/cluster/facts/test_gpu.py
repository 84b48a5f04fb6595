"""GPUs' figures, and tools that hang or talk nonsense."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.facts.gpu import AppleGpu, GpuReading, NoGpu, Nvml
from tandem.cluster.facts.macmon import Macmon, MacmonSample, parse_sample
from tandem.types.facts import Accelerator
from tests.cluster.facts.conftest import join_readers

pytestmark = pytest.mark.anyio
DEADLINE = 20.0
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()
USED = (
    "nvmlInit",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
)


class FakeNvml:
    """Two GPUs with the functions of pynvml that we use; `missing` are figures that the GPU does not tell."""

    NVML_TEMPERATURE_GPU = 0
    NVML_ERROR_NOT_SUPPORTED = 3

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, names: tuple[Any, ...], missing: tuple[str, ...] = (), error: int = 3) -> None:
        self.names, self.missing, self.error = names, missing, error
        self.driver = True
        self.hanging = threading.Event()
        self.hanging.set()

    def _tell(self, name: str, value: Any) -> Any:
        assert self.hanging.wait(DEADLINE)
        if name in self.missing:
            raise self.NVMLError(self.error)
        return value

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self._tell("name", self.names[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return self._tell("memory", SimpleNamespace(total=80, free=60 + handle, used=20))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._tell("usage", SimpleNamespace(gpu=35, memory=10))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._tell("temperature", 61)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._tell("power", 123_456)


def test_the_fake_has_what_the_library_has() -> None:
    library = pytest.importorskip("pynvml")
    for name in USED:
        assert callable(getattr(library, name))
        assert callable(getattr(FakeNvml, name))
    assert library.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
    assert library.NVML_ERROR_NOT_SUPPORTED == FakeNvml.NVML_ERROR_NOT_SUPPORTED
    assert library.NVMLError(library.NVML_ERROR_NOT_SUPPORTED).value == 3


async def test_the_real_library_here() -> None:
    """Without a driver it says so; with one, it names its GPUs."""
    source = Nvml(pytest.importorskip("pynvml"), deadline=DEADLINE)
    reading = await source.read()
    assert bool(reading.accelerators) == HAS_DRIVER


async def test_nvidia_gpus() -> None:
    reading = await Nvml(FakeNvml(("NVIDIA RTX A6000", b"NVIDIA T4"))).read()
    assert reading == GpuReading(
        (
            Accelerator("NVIDIA RTX A6000", 80, 60, 0.35, 61.0, 123.456),
            Accelerator("NVIDIA T4", 80, 61, 0.35, 61.0, 123.456),
        )
    )


async def test_a_gpu_on_the_machines_memory() -> None:
    reading = await Nvml(FakeNvml(("NVIDIA GB10",), missing=("memory",))).read()
    assert reading == GpuReading((Accelerator("NVIDIA GB10", None, None, 0.35, 61.0, 123.456),), unified=True)


async def test_memory_that_is_refused_is_not_shared() -> None:
    reading = await Nvml(FakeNvml(("NVIDIA A100",), missing=("memory",), error=4)).read()
    assert not reading.unified
    assert reading.accelerators[0].memory_total is None


async def test_figures_that_a_gpu_does_not_tell_are_none() -> None:
    reading = await Nvml(FakeNvml(("NVIDIA H100",), missing=("usage", "temperature", "power"))).read()
    assert reading.accelerators == (Accelerator("NVIDIA H100", 80, 60),)


async def test_a_driver_that_comes_later() -> None:
    library, now = FakeNvml(("NVIDIA T4",)), [0.0]
    library.driver = False
    source = Nvml(library, clock=lambda: now[0])
    assert await source.read() == GpuReading()
    library.driver = True
    assert await source.read() == GpuReading(), "not tried again at once"
    now[0] = 61.0
    assert [known.name for known in (await source.read()).accelerators] == ["NVIDIA T4"]


async def test_a_driver_that_hangs_costs_the_figures_only() -> None:
    library = FakeNvml(("NVIDIA T4",))
    source = Nvml(library, deadline=0.05)
    assert (await source.read()).accelerators[0].usage == 0.35
    library.hanging.clear()
    for _ in range(3):
        assert (await source.read()).accelerators == (Accelerator("NVIDIA T4", 80),)
    library.hanging.set()
    join_readers()
    assert (await source.read()).accelerators[0].usage == 0.35


async def test_no_gpu() -> None:
    assert await NoGpu().read() == GpuReading()
    assert (await AppleGpu("Apple M3", None).read()) == GpuReading((Accelerator("Apple M3"),), unified=True)


LINE = {
    "timestamp": "2026-02-24T20:38:15.427569+00:00",
    "temp": {"cpu_temp_avg": 43.5, "gpu_temp_avg": 36.5},
    "memory": {"ram_total": 25769803776, "ram_usage": 20985479168, "swap_total": 0, "swap_usage": 0},
    "gpu_freq_mhz": 461,
    "gpu_scaled_ratio": 0.02,
    "gpu_active_ratio": 0.09,
    "cpu_power": 0.2,
    "gpu_power": 0.25,
    "all_power": 0.5,
    "sys_power": 5.75,
}
SAMPLE = MacmonSample(0.09, 36.5, 0.25, 43.5, 5.75)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SAMPLE),
        ({"gpu_active_ratio": None, "gpu_usage": [461, 0.5]}, SAMPLE._replace(gpu_usage=0.5)),
        ({"gpu_active_ratio": True}, SAMPLE._replace(gpu_usage=None)),
        ({"gpu_active_ratio": 17}, SAMPLE._replace(gpu_usage=None)),
        ({"sys_power": 1905.0}, SAMPLE._replace(system_power=None)),
        ({"sys_power": 0.0}, SAMPLE._replace(system_power=None)),
        ({"temp": "warm"}, SAMPLE._replace(gpu_temperature=None, cpu_temperature=None)),
        ({"gpu_power": float("nan")}, SAMPLE._replace(gpu_power=None)),
    ],
)
def test_macmon_lines(changes: dict[str, object], expected: MacmonSample) -> None:
    assert parse_sample(json.dumps({**LINE, **changes})) == expected


@pytest.mark.parametrize("line", ["", "{", "[1]", "null", "{}", "error: no sensors", b"\xff\xfe", b'{"gpu_power": 1'])
def test_macmon_garbage(line: str | bytes) -> None:
    assert parse_sample(line) is None


def tool(script: str) -> tuple[str, ...]:
    """A program that stands for macmon."""
    return (
        sys.executable,
        "-u",
        "-c",
        f"import time, sys, os, signal\nline = {json.dumps(json.dumps(LINE))}\n{script}",
    )


async def until(macmon: Macmon, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            macmon.changed.clear()
            await macmon.changed.wait()


async def test_macmon_runs_once_and_is_ended() -> None:
    macmon = Macmon(tool("print('noise')\nprint(line)\ntime.sleep(600)"))
    source = AppleGpu("Apple M4 Max", macmon)
    await source.start()
    await until(macmon, lambda: macmon.latest() is not None)
    assert await source.read() == GpuReading(
        (Accelerator("Apple M4 Max", None, None, 0.09, 36.5, 0.25),), True, 43.5, 5.75
    )
    await source.stop()


async def test_macmon_that_dies_is_started_again(tmp_path: Path) -> None:
    counter = tmp_path / "starts"
    script = f"open({str(counter)!r}, 'a').write('x')\nprint(line)\nos.kill(os.getpid(), signal.SIGKILL)"
    macmon = Macmon(tool(script), pause=0.001)
    await macmon.start()
    for _ in range(7):
        async with asyncio.timeout(DEADLINE):
            await macmon.changed.wait()
        macmon.changed.clear()
    assert not macmon.given_up, "every start gave a sample"
    await macmon.stop()
    assert len(counter.read_text()) >= 7


@pytest.mark.parametrize(
    "script",
    [
        "time.sleep(600)",
        "while True: print('garbage')",
        "sys.stdout.write('x' * 1000000); time.sleep(600)",
        "raise SystemExit('no')",
    ],
)
async def test_macmon_without_use_is_given_up(script: str) -> None:
    macmon = Macmon(tool(script), silence=0.3, pause=0.001)
    source = AppleGpu("Apple M1", macmon)
    await source.start()
    assert (await source.read()).accelerators == (Accelerator("Apple M1"),)
    await until(macmon, lambda: macmon.given_up)
    assert (await source.read()).accelerators == (Accelerator("Apple M1"),)
    await source.stop()


async def test_macmon_that_cannot_be_run_is_given_up() -> None:
    macmon = Macmon(("/no/such/macmon",))
    await macmon.start()
    await until(macmon, lambda: macmon.given_up)
    assert macmon.latest() is None
    await macmon.stop()


def test_old_samples_do_not_count() -> None:
    now = [1000.0]
    macmon = Macmon(("x",), clock=lambda: now[0])
    macmon._sample, macmon._sampled = SAMPLE, 1000.0
    assert macmon.latest() == SAMPLE
    now[0] += 10.0
    assert macmon.latest() is None


def test_nvml_is_looked_for_by_name() -> None:
    """The module of nvidia-ml-py is optional: without it there is simply no source."""
    from tandem.cluster.facts.gpu import find_gpu_source

    try:
        importlib.import_module("pynvml")
    except ImportError:
        assert isinstance(find_gpu_source("Intel"), NoGpu)
    else:
        assert isinstance(find_gpu_source("Intel"), NoGpu if sys.platform == "darwin" else Nvml)
