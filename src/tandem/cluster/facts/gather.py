"""Everything a node says of itself, put together and kept current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

import tandem
from tandem.cluster.facts.blocking import BlockingRead
from tandem.cluster.facts.device import friendly_name, read_device
from tandem.cluster.facts.engines import EngineProber
from tandem.cluster.facts.gpu import GpuReading, GpuSource, find_gpu_source
from tandem.cluster.facts.material import differs
from tandem.cluster.facts.network import InterfaceReader
from tandem.cluster.facts.resources import DiskReading, SystemReader, SystemReading, read_disk
from tandem.cluster.facts.throttle import Clock, Throttle
from tandem.config import Settings
from tandem.types.facts import Device, DownloadFact, Interface, LinkRate, NodeFacts, Resources, RunnerFact

logger = logging.getLogger("tandem.facts")

INTERVAL = 2.0
GAP = 0.25
"""Four messages a second at most, and fewer in a large cluster: all of its nodes hear each."""
FEW, MANY = 12, 25
"""Nodes up to which messages come as often as they may, and figures are read as often as they should be."""
READ_SECONDS = 5.0
DEVICE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the figures come from: this machine, unless a test says otherwise. The callables may block.

    Attributes:
        device: from the GPUs' names.
        gpu: from the chip's name, as device tells it.
        engines: None for those of the node's own data folder.
    """

    system: Callable[[], SystemReading] = field(default_factory=lambda: SystemReader().read)
    interfaces: Callable[[], tuple[Interface, ...]] = field(default_factory=lambda: InterfaceReader().read)
    device: Callable[[tuple[str, ...]], Device] = read_device
    gpu: Callable[[str], GpuSource] = find_gpu_source
    engines: EngineProber | None = None


class FactsGatherer:
    """Reads the machine every two seconds, takes what the node pushes, and emits facts when something has changed.

    All methods belong to the event loop; what blocks runs in threads.

    Args:
        settings: the node's.
        node_id: its persistent id.
        emit: called with new facts, whose `sequence` is one more than before.
        sources: where figures come from.
        interval: seconds between readings.
        clock: the event loop, unless a test brings its own.

    Attributes:
        life: of the node, made here: new at every start.
    """

    def __init__(
        self,
        settings: Settings,
        node_id: str,
        emit: Callable[[NodeFacts], None],
        *,
        sources: Sources | None = None,
        interval: float = INTERVAL,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._sources = sources or Sources()
        self._engines = self._sources.engines or EngineProber(home=settings.home)
        self._emit = emit
        self._interval = self._pause = interval
        self._throttle = Throttle(self._deliver, GAP, clock or asyncio.get_running_loop())
        self.life = secrets.token_hex(8)
        self._facts = NodeFacts(
            node_id=node_id,
            life=self.life,
            sequence=0,
            version=tandem.__version__,
            started=time.time(),
        )
        self._emitted: NodeFacts | None = None
        self._gpu: GpuSource | None = None
        self._read_system = BlockingRead(self._sources.system, READ_SECONDS)
        self._read_disk = BlockingRead(lambda: read_disk(settings.home), READ_SECONDS)
        self._read_interfaces = BlockingRead(self._sources.interfaces, READ_SECONDS)
        self._tasks: list[asyncio.Task[Any]] = []
        self._due = asyncio.Event()

    @property
    def current(self) -> NodeFacts | None:
        """What was emitted last; None before `start`. One sequence number always means the same facts."""
        return self._emitted

    async def start(self) -> None:
        """Read everything once, emit it, and go on reading. Engines follow as soon as they are probed.

        Returns after at most half a minute, normally in well under a second (macOS: two).
        """
        name = await BlockingRead(lambda: friendly_name(self._settings.node_name), READ_SECONDS)()
        device = await BlockingRead(lambda: self._sources.device(()), DEVICE_SECONDS)() or Device()
        self._gpu = self._sources.gpu(device.chip)
        await self._gpu.start()
        reading = await self._gpu.read()
        gpu_names = tuple(accelerator.name for accelerator in reading.accelerators)
        if gpu_names:
            device = await BlockingRead(lambda: self._sources.device(gpu_names), DEVICE_SECONDS)() or device
        self._change(name=name or "tandem", device=device)
        await self.look()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._probe_engines())]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """Read and emit no more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=READ_SECONDS)
        if self._gpu is not None:
            await self._gpu.stop()
        self._throttle.close()

    def spread(self, nodes: int) -> None:
        """Say less often what so many nodes have to listen to."""
        self._throttle.gap = GAP * max(1.0, nodes / FEW)
        self._pause = self._interval * min(2.0, max(1.0, nodes / MANY))

    def set_ports(self, *, api_port: int | None, node_port: int | None) -> None:
        """Where the node can be reached."""
        self._push(api_port=api_port, node_port=node_port)

    def set_runners(self, runners: Iterable[RunnerFact]) -> None:
        """All runners, as they are now. Memory is read anew when one has become ready: what it was promised until then
        is taken now."""
        before = {runner.runner_id for runner in self._facts.runners if runner.state == "ready"}
        now = tuple(runners)
        if any(runner.state == "ready" and runner.runner_id not in before for runner in now):
            self._due.set()
        self._push(runners=now)

    def set_downloads(self, downloads: Iterable[DownloadFact]) -> None:
        """All downloads, as they are now."""
        self._push(downloads=tuple(downloads))

    def set_links(self, links: Iterable[LinkRate]) -> None:
        """All measured links, as they are now."""
        self._push(links=tuple(links))

    async def look(self) -> None:
        """Read the machine now instead of in two seconds. What hangs or fails keeps its last figures."""
        assert self._gpu is not None
        system, disk, interfaces, gpu = await asyncio.gather(
            _try(self._read_system), _try(self._read_disk), _try(self._read_interfaces), self._gpu.read()
        )
        self._push(
            resources=_resources(self._facts.resources, system, disk, gpu),
            interfaces=self._facts.interfaces if interfaces is None else interfaces,
        )

    def _push(self, **changes: Any) -> None:
        self._change(**changes)
        # Before the first reading is complete there is nothing to say yet.
        if self._facts.resources.memory_total:
            self._throttle.request()

    def _change(self, **changes: Any) -> None:
        self._facts = msgspec.structs.replace(self._facts, **changes)

    def _deliver(self) -> bool:
        if self._emitted is not None and not differs(self._emitted, self._facts):
            return False
        self._change(sequence=self._facts.sequence + 1)
        self._emitted = self._facts
        self._emit(self._facts)
        return True

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self._due.wait()
            self._due.clear()
            await self.look()

    async def _probe_engines(self) -> None:
        self._push(engines=await self._engines.engines())


async def _try(read: BlockingRead[Any]) -> Any:
    try:
        return await read()
    except (OSError, psutil.Error) as error:
        logger.debug("A reading of this machine failed: %s", error)
        return None


def _resources(known: Resources, system: SystemReading | None, disk: DiskReading | None, gpu: GpuReading) -> Resources:
    changes: dict[str, Any] = {"unified": gpu.unified, "accelerators": gpu.accelerators, "power": gpu.power}
    if disk is not None:
        changes |= {"disk_total": disk.total, "disk_available": disk.available}
    if system is not None:
        changes |= system._asdict()
        if system.temperature is None:
            changes["temperature"] = gpu.temperature
    return msgspec.structs.replace(known, **changes)


def _report(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("The node's facts are no longer kept current.", exc_info=task.exception())
