"""What is worth telling, and how often."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tandem.cluster.facts.material import differs
from tandem.cluster.facts.throttle import Throttle
from tandem.types.description import EngineLoad
from tandem.types.facts import (
    Accelerator,
    Device,
    DownloadFact,
    EngineFact,
    Interface,
    LinkRate,
    NodeFacts,
    Resources,
    RunnerFact,
)

GB = 1_000_000_000
GPU = Accelerator("NVIDIA GB10", 100 * GB, 50 * GB, 0.5, 60.0, 100.0)
MACHINE = Resources(100 * GB, 50 * GB, 10 * GB, 5 * GB, False, 50 * GB, 20 * GB, 0.5, 60.0, 100.0, (GPU,))
LOAD = EngineLoad(1, 1, 0, 2, 1000, 1000, 1000, 5, 100.0, 10.0)
RUNNER = RunnerFact("r", "i", "m", "ready", load=LOAD)
DOWNLOAD = DownloadFact("m", "ongoing", 50 * GB, 100 * GB, 1e8)
LINK = LinkRate("other", "10.0.0.2", 1e9, 0.02)
FACTS = NodeFacts("n", "life", 1, resources=MACHINE, runners=(RUNNER,), downloads=(DOWNLOAD,), links=(LINK,))


def at(path: str, value: object, facts: Any = FACTS) -> Any:
    """The facts with one value changed, e.g. at `resources.accelerators.0.usage`."""
    name, _, rest = path.partition(".")
    if isinstance(facts, tuple):
        index = int(name)
        return (*facts[:index], at(rest, value, facts[index]) if rest else value, *facts[index + 1 :])
    return msgspec.structs.replace(facts, **{name: at(rest, value, getattr(facts, name)) if rest else value})


NOISE = [
    ("sequence", 9),
    ("resources.memory_available", 51 * GB),
    ("resources.memory_available", 49 * GB),
    ("resources.swap_available", 5_100_000_000),
    ("resources.disk_available", 20_500_000_000),
    ("resources.cpu_usage", 0.59),
    ("resources.temperature", 62.9),
    ("resources.power", 109.0),
    ("resources.accelerators.0.usage", 0.41),
    ("resources.accelerators.0.memory_available", 50_900_000_000),
    ("resources.accelerators.0.power", 91.0),
    ("runners.0.load.steps", 5000),
    ("runners.0.load.decode_tps", 10.9),
    ("runners.0.load.active_memory", 1090),
    ("downloads.0.done", 51 * GB),
    ("downloads.0.speed", 5e8),
    ("links.0.bandwidth", 1.05e9),
    ("links.0.round_trip", 0.0239),
]
NEWS = [
    ("name", "other"),
    ("api_port", 1),
    ("device", Device("mac_mini")),
    ("engines", (EngineFact("MlxCpu"),)),
    ("interfaces", (Interface("eth0", "10.0.0.1"),)),
    ("resources.memory_available", 51_100_000_000),
    ("resources.memory_total", 100 * GB - 1),
    ("resources.swap_available", 5_110_000_000),
    ("resources.disk_available", 20_510_000_000),
    ("resources.unified", True),
    ("resources.cpu_usage", 0.61),
    ("resources.temperature", 63.0),
    ("resources.temperature", None),
    ("resources.power", 112.0),
    ("resources.accelerators", ()),
    ("resources.accelerators.0.usage", 0.61),
    ("resources.accelerators.0.usage", None),
    ("resources.accelerators.0.memory_available", 51_100_000_000),
    ("resources.accelerators.0.name", "another"),
    ("runners", ()),
    ("runners.0.state", "failed"),
    ("runners.0.running", 1),
    ("runners.0.load", None),
    ("runners.0.load.waiting", 0),
    ("runners.0.load.decode_tps", 12.0),
    ("runners.0.load.active_memory", 1200),
    ("downloads.0.state", "completed"),
    ("downloads.0.done", 51_100_000_000),
    ("downloads.0.error", "no space"),
    ("links", ()),
    ("links.0.bandwidth", None),
    ("links.0.bandwidth", 1.2e9),
    ("links.0.round_trip", 0.03),
]


@pytest.mark.parametrize(("path", "value"), NOISE)
def test_noise(path: str, value: object) -> None:
    changed = at(path, value)
    assert changed != FACTS
    assert not differs(FACTS, changed)


@pytest.mark.parametrize(("path", "value"), NEWS)
def test_news(path: str, value: object) -> None:
    assert differs(FACTS, at(path, value))
    assert differs(at(path, value), FACTS)


def test_a_large_disk_counts_by_the_gigabyte() -> None:
    large = at("resources.disk_total", 8000 * GB)
    assert differs(large, at("resources.disk_available", 22 * GB, large))
    assert not differs(large, at("resources.disk_available", 20_900_000_000, large))


def test_drift_is_told_in_the_end() -> None:
    told, tellings = FACTS, 0
    for step in range(1, 101):
        now = at("resources.memory_available", 50 * GB - step * 200_000_000)
        if differs(told, now):
            told, tellings = now, tellings + 1
    assert tellings == 16, "every sixth step of 0.2 % is more than 1 % away"


class FakeClock:
    """An event loop's clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], Any]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], Any], /) -> FakeHandle:
        entry = (self.now + delay, callback)
        self.calls.append(entry)
        return FakeHandle(self, entry)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [entry for entry in self.calls if entry[0] <= until]:
            entry = min(due, key=lambda candidate: candidate[0])
            self.calls.remove(entry)
            self.now = entry[0]
            entry[1]()
        self.now = until


class FakeHandle:
    def __init__(self, clock: FakeClock, entry: tuple[float, Callable[[], Any]]) -> None:
        self.clock, self.entry = clock, entry

    def cancel(self) -> None:
        if self.entry in self.clock.calls:
            self.clock.calls.remove(self.entry)


def test_at_most_four_a_second_and_the_last_is_not_lost() -> None:
    clock = FakeClock()
    values, told = [0], list[tuple[float, int]]()

    def deliver() -> bool:
        told.append((clock.now, values[-1]))
        return True

    throttle = Throttle(deliver, 0.25, clock)
    for value in range(1, 951):
        values.append(value)
        throttle.request()
        clock.advance(0.001)
    assert told[0] == (100.0, 1), "the first goes at once"
    assert len(told) == 4
    clock.advance(10)
    assert told[-1][1] == 950, "the trailing edge"
    assert len(told) == 5
    times = [time for time, _ in told]
    assert all(later - earlier >= 0.25 - 1e-9 for earlier, later in pairwise(times))
    clock.advance(10)
    assert len(told) == 5, "nothing without a request"


def test_what_was_no_news_costs_no_gap() -> None:
    clock = FakeClock()
    answers = iter([False, True, True])
    told: list[float] = []

    def deliver() -> bool:
        told.append(clock.now)
        return next(answers)

    throttle = Throttle(deliver, 0.25, clock)
    throttle.request()
    throttle.request()
    assert told == [100.0, 100.0]
    throttle.request()
    assert len(told) == 2
    throttle.close()
    clock.advance(10)
    assert len(told) == 2, "closed"
