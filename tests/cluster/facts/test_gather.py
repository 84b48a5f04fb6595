"""Facts are complete, quiet while nothing happens, and current when something does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.facts.engines import EngineProber
from tandem.cluster.facts.gather import FactsGatherer, Sources
from tandem.cluster.facts.gpu import GpuReading, GpuSource, NoGpu
from tandem.cluster.facts.resources import SystemReading
from tandem.cluster.state import ClusterState, NodeChanged, NodeJoined, apply
from tandem.config import Settings
from tandem.types.facts import Accelerator, Device, DownloadFact, EngineFact, Interface, NodeFacts, RunnerFact
from tests.cluster.facts.conftest import join_readers

pytestmark = pytest.mark.anyio
DEADLINE = 60.0
GIB = 1 << 30
ETHERNET = Interface("eth0", "10.0.0.1", "ethernet", 10**10)


class Machine:
    """Figures that a test changes by hand, in place of a real machine's."""

    def __init__(self) -> None:
        self.system = SystemReading(64 * GIB, 32 * GIB, 0, 0, 0.1, 40.0)
        self.interfaces: tuple[Interface, ...] = (ETHERNET,)
        self.gpu: GpuSource = NoGpu()
        self.awake = threading.Event()
        self.awake.set()
        self.reads = 0
        self.error: OSError | None = None

    def read_system(self) -> SystemReading:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.system

    def read_interfaces(self) -> tuple[Interface, ...]:
        assert self.awake.wait(DEADLINE)
        return self.interfaces

    def sources(self) -> Sources:
        return Sources(
            self.read_system,
            self.read_interfaces,
            lambda names: Device("dgx_spark" if "NVIDIA GB10" in names else "linux_desktop"),
            lambda chip: self.gpu,
            KnownEngines(),
        )


class KnownEngines(EngineProber):
    async def engines(self) -> tuple[EngineFact, ...]:
        return (EngineFact("MlxCpu", "1"),)


class SparkGpu(NoGpu):
    async def read(self) -> GpuReading:
        return GpuReading((Accelerator("NVIDIA GB10", usage=0.5),), True, 77.0, 99.0)


class Heard:
    """What was emitted, with a way to wait for it."""

    def __init__(self) -> None:
        self.facts: list[NodeFacts] = []
        self.times: list[float] = []
        self.changed = asyncio.Event()

    def __call__(self, facts: NodeFacts) -> None:
        self.facts.append(facts)
        self.times.append(time.monotonic())
        self.changed.set()

    async def until(self, condition: Callable[[NodeFacts], bool]) -> NodeFacts:
        async with asyncio.timeout(DEADLINE):
            while not (self.facts and condition(self.facts[-1])):
                self.changed.clear()
                await self.changed.wait()
        return self.facts[-1]


async def started(tmp_path: Path, machine: Machine, heard: Heard, interval: float = 3600.0) -> FactsGatherer:
    gatherer = FactsGatherer(
        Settings(home=tmp_path, node_name="Blue"), "node", heard, sources=machine.sources(), interval=interval
    )
    await gatherer.start()
    await heard.until(lambda facts: bool(facts.engines))
    return gatherer


async def test_this_machine(tmp_path: Path) -> None:
    heard = Heard()
    gatherer = FactsGatherer(Settings(home=tmp_path), "node", heard)
    assert gatherer.current is None
    await gatherer.start()
    first = gatherer.current
    assert first is not None
    assert (first.node_id, first.sequence) == ("node", 1)
    assert first.name
    assert first.version
    assert first.device.os
    assert first.resources.memory_total > 0
    assert first.resources.disk_total > 0
    assert first.interfaces
    facts = await heard.until(lambda facts: bool(facts.engines))
    assert [fact.backend for fact in facts.engines] == ["MlxMetal", "MlxCuda", "MlxCpu", "Vllm"]
    assert any(fact.available for fact in facts.engines)
    assert [facts.sequence for facts in heard.facts] == list(range(1, len(heard.facts) + 1))
    assert len({facts.life for facts in heard.facts}) == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=NodeFacts) == facts
    state = apply(apply(ClusterState(), NodeJoined(first)), NodeChanged(facts))
    assert state.nodes["node"] == facts
    await gatherer.stop()


async def test_each_life_is_another(tmp_path: Path) -> None:
    lives = set()
    for _ in range(2):
        heard = Heard()
        gatherer = await started(tmp_path, Machine(), heard)
        lives.add(heard.facts[0].life)
        await gatherer.stop()
    assert len(lives) == 2


async def test_an_idle_node_is_silent(tmp_path: Path) -> None:
    machine, heard = Machine(), Heard()
    gatherer = await started(tmp_path, machine, heard)
    count = len(heard.facts)
    assert count == 2, "the machine, then its engines"
    for step in range(20):
        machine.system = machine.system._replace(
            memory_available=32 * GIB + step % 2 * GIB // 4, cpu_usage=0.1 + step % 2 * 0.05, temperature=40 + step % 3
        )
        await gatherer.look()
    assert len(heard.facts) == count
    assert machine.reads == 21
    await gatherer.stop()


async def test_changes_of_the_machine_are_told(tmp_path: Path) -> None:
    machine, heard = Machine(), Heard()
    gatherer = await started(tmp_path, machine, heard, interval=0.01)
    machine.system = machine.system._replace(memory_available=GIB)
    await heard.until(lambda facts: facts.resources.memory_available == GIB)
    machine.interfaces = (ETHERNET, Interface("wlan0", "10.0.1.1", "wifi"))
    await heard.until(lambda facts: facts.interfaces == machine.interfaces)
    await gatherer.stop()
    count = len(heard.facts)
    gatherer.set_runners([RunnerFact("r", "i", "m", "ready")])
    assert len(heard.facts) == count, "nothing after the end"


async def test_a_flood_is_limited_and_its_end_arrives(tmp_path: Path) -> None:
    machine, heard = Machine(), Heard()
    gatherer = await started(tmp_path, machine, heard)
    for done in range(400):
        gatherer.set_downloads([DownloadFact("m", "ongoing", done * 10, 1000)])
        await asyncio.sleep(0.002)
    gatherer.set_downloads([DownloadFact("m", "completed", 1000, 1000)])
    facts = await heard.until(lambda facts: bool(facts.downloads) and facts.downloads[0].state == "completed")
    assert facts is gatherer.current
    gaps = [later - earlier for earlier, later in pairwise(heard.times)]
    assert min(gaps) > 0.24
    await gatherer.stop()


async def test_what_the_node_pushes_is_told(tmp_path: Path) -> None:
    heard = Heard()
    gatherer = await started(tmp_path, Machine(), heard)
    gatherer.set_ports(api_port=52415, node_port=52416)
    await heard.until(lambda facts: facts.api_port == 52415 and facts.node_port == 52416)
    runner = RunnerFact("r", "i", "m", "loading")
    gatherer.set_runners([runner])
    await heard.until(lambda facts: facts.runners == (runner,))
    gatherer.set_runners([])
    facts = await heard.until(lambda facts: not facts.runners)
    gatherer.set_runners([])
    assert gatherer.current is facts
    await gatherer.stop()


async def test_memory_is_read_anew_when_a_runner_is_ready(tmp_path: Path) -> None:
    """What it was promised is promised no more, and has to be missing from what is free."""
    machine, heard = Machine(), Heard()
    gatherer = await started(tmp_path, machine, heard)
    gatherer.set_runners([RunnerFact("r", "i", "m", "loading")])
    machine.system = machine.system._replace(memory_available=GIB)
    gatherer.set_runners([RunnerFact("r", "i", "m", "ready")])
    await heard.until(lambda facts: facts.resources.memory_available == GIB)
    reads = machine.reads
    gatherer.set_runners([RunnerFact("r", "i", "m", "ready", running=1)])
    await heard.until(lambda facts: facts.runners[0].running == 1)
    assert machine.reads == reads
    await gatherer.stop()


async def test_pushes_before_the_start_come_with_the_first_facts(tmp_path: Path) -> None:
    machine, heard = Machine(), Heard()
    gatherer = FactsGatherer(Settings(home=tmp_path, node_name="Blue"), "node", heard, sources=machine.sources())
    gatherer.set_ports(api_port=1, node_port=2)
    assert heard.facts == []
    await gatherer.start()
    assert (heard.facts[0].api_port, heard.facts[0].name) == (1, "Blue")
    await gatherer.stop()


async def test_the_gpu_tells_the_device(tmp_path: Path) -> None:
    machine, heard = Machine(), Heard()
    machine.gpu = SparkGpu()
    machine.system = machine.system._replace(temperature=None)
    gatherer = await started(tmp_path, machine, heard)
    facts = heard.facts[0]
    assert facts.device.kind == "dgx_spark"
    assert facts.resources.unified
    assert (facts.resources.temperature, facts.resources.power) == (77.0, 99.0)
    assert facts.resources.accelerators[0].usage == 0.5
    await gatherer.stop()


async def test_a_reading_that_hangs_or_fails_keeps_its_last_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.facts.gather.READ_SECONDS", 0.1)
    machine, heard = Machine(), Heard()
    gatherer = await started(tmp_path, machine, heard)
    machine.awake.clear()
    machine.interfaces = ()
    machine.system = machine.system._replace(memory_available=GIB)
    await gatherer.look()
    facts = await heard.until(lambda facts: facts.resources.memory_available == GIB)
    assert facts.interfaces == (ETHERNET,), "the network hangs, memory does not"
    machine.error = OSError("no /proc")
    machine.awake.set()
    join_readers()
    await gatherer.look()
    facts = await heard.until(lambda facts: facts.interfaces == ())
    assert facts.resources.memory_available == GIB
    await gatherer.stop()


async def test_the_event_loop_is_never_held(tmp_path: Path) -> None:
    heard, longest = Heard(), 0.0
    gatherer = FactsGatherer(Settings(home=tmp_path), "node", heard, sources=Sources(engines=KnownEngines()))
    running = True

    async def measure() -> None:
        nonlocal longest
        while running:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    measuring = asyncio.create_task(measure())
    await gatherer.start()
    for _ in range(20):
        await gatherer.look()
    running = False
    await measuring
    await gatherer.stop()
    assert longest < 0.05
