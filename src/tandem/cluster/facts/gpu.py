"""What the GPUs say of themselves: NVIDIA's through NVML, Apple's through `macmon`."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tandem.cluster.facts.blocking import BlockingRead
from tandem.cluster.facts.macmon import Macmon
from tandem.types.facts import Accelerator

logger = logging.getLogger("tandem.facts")

NVML_SECONDS = 1.0
RETRY_SECONDS = 60.0
"""Between attempts to start NVML: a driver may be installed or loaded while the node runs."""


class GpuReading(NamedTuple):
    """The accelerators, and what the same tool says of the whole machine.

    Attributes:
        unified: a GPU uses the machine's memory.
        temperature: degrees Celsius, of the processor.
        power: watts.
    """

    accelerators: tuple[Accelerator, ...] = ()
    unified: bool = False
    temperature: float | None = None
    power: float | None = None


class GpuSource(Protocol):
    """Where readings come from. None of its methods blocks the event loop or waits longer than its own deadline."""

    async def start(self) -> None:
        """Before the first reading."""

    async def read(self) -> GpuReading:
        """Now; figures that are not there in time are None."""
        ...

    async def stop(self) -> None:
        """After the last reading."""


class NoGpu:
    """For machines without a GPU that we can ask."""

    async def start(self) -> None:
        """Nothing to do."""

    async def read(self) -> GpuReading:
        """Always empty."""
        return GpuReading()

    async def stop(self) -> None:
        """Nothing to do."""


class Nvml:
    """NVIDIA GPUs through the driver's management library. It makes no CUDA context and takes no GPU memory.

    Args:
        library: the module `pynvml` of nvidia-ml-py.
        deadline: seconds for one reading of all GPUs.
        clock: seconds.
    """

    def __init__(
        self, library: Any, deadline: float = NVML_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._library = library
        self._clock = clock
        self._handles: list[Any] | None = None
        self._retry_at = float("-inf")
        self._last = GpuReading()
        self._late = False
        self._ask_all = BlockingRead(self._read, deadline)

    async def start(self) -> None:
        """The library is started by the first reading."""

    async def read(self) -> GpuReading:
        """Every GPU; while the driver does not answer, those known without their figures."""
        reading = await self._ask_all()
        if reading is not None:
            self._last, self._late = reading, False
            return reading
        if not self._late:
            logger.warning(
                "The NVIDIA driver does not answer. Its figures are left out until it does (see nvidia-smi)."
            )
            self._late = True
        names = tuple(Accelerator(known.name, memory_total=known.memory_total) for known in self._last.accelerators)
        return GpuReading(names, self._last.unified)

    async def stop(self) -> None:
        """The library ends with the process: ending it here could wait for a stuck driver."""

    def _read(self) -> GpuReading:
        if self._handles is None:
            self._open()
        if not self._handles:
            return GpuReading()
        accelerators, unified = [], False
        for handle in self._handles:
            accelerator, shares = self._one(handle)
            accelerators.append(accelerator)
            unified = unified or shares
        return GpuReading(tuple(accelerators), unified)

    def _open(self) -> None:
        if self._clock() < self._retry_at:
            return
        library = self._library
        try:
            library.nvmlInit()
            count = library.nvmlDeviceGetCount()
            self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except library.NVMLError as error:
            logger.info("No NVIDIA GPU: %s", error)
            self._retry_at = self._clock() + RETRY_SECONDS

    def _one(self, handle: Any) -> tuple[Accelerator, bool]:
        library = self._library
        name = self._ask(library.nvmlDeviceGetName, handle) or "NVIDIA GPU"
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        shares = False
        memory = None
        try:
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError as error:
            # GPUs on the machine's memory (GB10 and its like) have none of their own to report.
            shares = getattr(error, "value", None) == library.NVML_ERROR_NOT_SUPPORTED
        usage = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        temperature = self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU)
        milliwatts = self._ask(library.nvmlDeviceGetPowerUsage, handle)
        return (
            Accelerator(
                name=name,
                memory_total=None if memory is None else int(memory.total),
                memory_available=None if memory is None else int(memory.free),
                usage=None if usage is None else usage.gpu / 100,
                temperature=None if temperature is None else float(temperature),
                power=None if milliwatts is None else milliwatts / 1000,
            ),
            shares,
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """One figure; None where this GPU does not tell it, as with MIG, or no longer does."""
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None


class AppleGpu:
    """Apple's GPU: always there, with figures where `macmon` is installed.

    Args:
        chip: its name, as the chip's.
        macmon: the running tool, or None without it.
    """

    def __init__(self, chip: str, macmon: Macmon | None) -> None:
        self._chip = chip
        self._macmon = macmon

    async def start(self) -> None:
        """Start the tool. Its first figures come some seconds later."""
        if self._macmon is not None:
            await self._macmon.start()

    async def read(self) -> GpuReading:
        """What the tool said last, unless that is old."""
        sample = self._macmon.latest() if self._macmon is not None else None
        if sample is None:
            return GpuReading((Accelerator(self._chip),), unified=True)
        own = Accelerator(
            self._chip, usage=sample.gpu_usage, temperature=sample.gpu_temperature, power=sample.gpu_power
        )
        return GpuReading((own,), True, sample.cpu_temperature, sample.system_power)

    async def stop(self) -> None:
        """End the tool."""
        if self._macmon is not None:
            await self._macmon.stop()


def find_gpu_source(chip: str = "") -> GpuSource:
    """The source for this machine.

    Args:
        chip: the processor's name; on Apple silicon, the GPU's as well.
    """
    if sys.platform == "darwin":
        if not chip.startswith("Apple"):
            return NoGpu()
        path = shutil.which("macmon")
        return AppleGpu(chip, Macmon((path, "pipe", "--interval", "2000")) if path else None)
    try:
        return Nvml(importlib.import_module("pynvml"))
    except ImportError:
        return NoGpu()
