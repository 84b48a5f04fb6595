"""Rounds of random faults: whatever happens, copies agree in the end, and nothing that was answered is lost."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tandem.cluster.events import EventLog
from tandem.cluster.state import ClusterState
from tandem.types.intents import CardIntent, Entry, Intent, Stamp, key_of
from tests.cluster.intent_network import DAY, DEADLINE, Machine, Network, equal, instance, link

pytestmark = pytest.mark.anyio
NOW = 1_800_000_000_000
ROUNDS = 200 if "TANDEM_TEST_LONG" in os.environ else 80
STEPS = 20
NAMES = "xyz"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Round:
    """A few machines, and everything that was asked of them."""

    def __init__(self, seed: int, folder: Path, tally: Counter[str]) -> None:
        self.random = random.Random(seed)
        self.network = Network(seed)
        self.tally = tally
        self.time = NOW
        self.errors: dict[str, int] = {}
        self.machines = [self._machine(f"n{number}", folder) for number in range(self.random.randint(2, 5))]
        self.answered: list[Entry] = []
        self.made: dict[Stamp, Entry] = {}
        self.under_way: set[asyncio.Task[None]] = set()

    def _machine(self, name: str, folder: Path) -> Machine:
        self.errors[name] = self.random.choice([0, 0, DAY, -DAY, self.random.randint(-DAY, DAY)])
        return Machine(self.network, name, folder / name / "intents", lambda: self.time + self.errors[name])

    def intent(self) -> Intent:
        name = self.random.choice(NAMES)
        some = self.random.sample(NAMES, 2)
        return self.random.choice(
            [instance(name, f"sim:{self.random.random()}"), link(name, some, some[:1]), CardIntent(name, {"a": [1]})]
        )

    async def change(self, machine: Machine) -> None:
        replica, intent = machine.replica, self.intent()
        assert replica is not None
        known = replica.map.get(key_of(intent))
        if known and known.value is not None and self.random.random() < 0.5:
            work = replica.remove(known.key)
        else:
            work = replica.put(intent)
        task = asyncio.create_task(self._answered(work, known))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        # The change is made when the command first waits, so that a crash may catch it before its answer.
        await asyncio.sleep(0)
        newest = max(replica.map, key=lambda entry: entry.stamp)
        self.made[newest.stamp] = newest
        if self.random.random() < 0.6:
            await asyncio.wait({task}, timeout=DEADLINE)

    async def _answered(self, work, known: Entry | None) -> None:  # type: ignore[no-untyped-def]
        entry = await work
        assert known is None or entry.stamp > known.stamp
        assert entry.stamp not in self.made or self.made[entry.stamp] == entry
        self.made[entry.stamp] = entry
        self.answered.append(entry)
        self.tally["removed" if entry.value is None else "put"] += 1

    async def step(self) -> None:
        running = [machine for machine in self.machines if machine.replica]
        machine = self.random.choice(self.machines)
        what = self.random.choices(
            ["change", "part", "heal", "kill", "stop", "clock", "time", "weather"], [12, 2, 2, 2, 1, 2, 3, 2]
        )[0]
        if what != "change":
            self.tally[what] += 1
        if machine.replica is None:
            await self.start(machine)
        elif what == "change":
            await self.change(machine)
        elif what == "part":
            self.network.part(
                each.node_id for each in self.random.sample(running, self.random.randint(1, len(running)))
            )
        elif what == "heal":
            self.network.heal()
        elif what == "kill":
            await self.kill(machine)
        elif what == "stop":
            await machine.stop()
        elif what == "clock":
            self.errors[machine.node_id] = self.random.randint(-DAY, DAY)
        elif what == "time":
            self.time += self.random.choice([0, 1, 1000, DAY])
        else:
            self.network.loss = self.random.choice([0, 0.2, 0.8])
            self.network.repeats = self.random.choice([0, 0.5])

    async def start(self, machine: Machine) -> None:
        await machine.start()
        self.tally["started"] += 1

    async def kill(self, machine: Machine) -> None:
        """As by a power cut: commands without an answer come to nothing, and the log may have a torn end."""
        before = len(self.under_way)
        for task in self.under_way:
            task.cancel()
        await asyncio.gather(*self.under_way, return_exceptions=True)
        self.tally["commands cut short"] += before
        await machine.kill()
        logs = sorted(machine.folder.glob("*.log"))
        if logs and self.random.random() < 0.5:
            with logs[-1].open("ab") as log:
                log.write(self.random.randbytes(self.random.randint(1, 60)))
            self.tally["torn logs"] += 1

    async def finish(self) -> None:
        """All machines run and reach one another; clocks stay wrong."""
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self.under_way)
        self.network.loss = 0
        for machine in self.machines:
            if machine.replica is None:
                await self.start(machine)
        self.network.heal()
        await equal(self.machines)

    def check(self) -> None:
        replica = self.machines[0].replica
        assert replica is not None
        final = replica.map.entries
        for entry in self.answered:
            # It is there, or something newer that somebody asked for.
            assert final[entry.key].stamp >= entry.stamp
        for entry in final.values():
            assert self.made[entry.stamp] == entry
        for machine in self.machines:
            assert machine.replica is not None
            assert machine.replica.map.entries == final
            assert machine.replica.degraded is None
            assert isinstance(machine.events, EventLog)
            assert machine.events.state == ClusterState(intents=final)
        self.tally["entries at the end"] += len(final)
        self.tally["tombstones at the end"] += sum(entry.value is None for entry in final.values())


async def one_round(seed: int, folder: Path, tally: Counter[str]) -> None:
    this = Round(seed, folder, tally)
    for machine in this.machines:
        await machine.start()
    for _ in range(STEPS):
        await this.step()
    await this.finish()
    this.check()
    final = this.machines[0].replica.map.entries  # type: ignore[union-attr]
    for machine in this.machines:
        await machine.stop()
    # What everybody agreed on is on everybody's disk.
    for machine in this.machines:
        this.network = machine.network = Network()
        replica = await machine.start()
        assert replica.map.entries == final
        await machine.stop()
    tally.update({name: count for name, count in this.network.seen.items() if name != "bytes"})


@pytest.mark.slow
async def test_rounds_of_random_faults(tmp_path: Path) -> None:
    tally: Counter[str] = Counter()
    for seed in range(ROUNDS):
        try:
            await one_round(seed, tmp_path / str(seed), tally)
        except BaseException as error:
            error.add_note(f"in round {seed}")
            raise
    print(f"{ROUNDS} rounds: " + ", ".join(f"{count} {name}" for name, count in sorted(tally.items())))
    for name in ("put", "removed", "part", "heal", "kill", "clock", "torn logs", "commands cut short"):
        assert tally[name] > ROUNDS / 10, name
