"""Replicas: changes spread at once, what was missed is made good, and disks may fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tandem.cluster import snapshot
from tandem.cluster.exchange import Changes, Compare, Refused, Same, decode, encode
from tandem.cluster.replica import ReplicaTiming
from tandem.cluster.snapshot import SnapshotStore
from tandem.errors import NewerFormatError, NotFoundError, UnavailableError, WireError
from tandem.types.intents import CardIntent
from tests.cluster.intent_network import DAY, DEADLINE, Machine, Network, equal, instance, settled

pytestmark = pytest.mark.anyio
NOW = 1_800_000_000_000
Make = Callable[..., Awaitable[Machine]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
async def make(network: Network, tmp_path: Path) -> AsyncIterator[Make]:
    machines: list[Machine] = []

    async def machine(name: str, error: int = 0, timing: ReplicaTiming | None = None) -> Machine:
        machines.append(Machine(network, name, tmp_path / name / "intents", lambda: NOW + error, timing))
        await machines[-1].start()
        return machines[-1]

    yield machine
    for each in machines:
        if each.replica:
            await each.stop()


async def test_a_change_reaches_everybody_without_being_asked_for(network: Network, make: Make) -> None:
    machines = [await make(name) for name in "abc"]
    await settled(machines)
    asked = network.seen["Compare"]
    entry = await machines[0].replica.put(instance("x"))
    await equal(machines)
    assert [each.replica.map.get("instance/x") for each in machines] == [entry] * 3
    await machines[1].replica.remove("instance/x")
    await equal(machines)
    with pytest.raises(NotFoundError):
        await machines[2].replica.remove("instance/x")
    assert network.seen["Compare"] == asked
    for each in machines:
        assert each.events.state.instances == {}
        assert each.events.state.intents == each.replica.map.entries


async def test_a_late_joiner_gets_everything(network: Network, make: Make) -> None:
    first = await make("a")
    for number in range(40):
        await first.replica.put(CardIntent(f"m{number}", {"text": "x" * 20_000}))
    late = await make("b")
    await equal([first, late])
    assert len(late.replica.map) == 40
    assert network.seen["Trade"] > 2


async def test_equal_copies_exchange_no_entries(network: Network, make: Make) -> None:
    machines = [await make(name) for name in "ab"]
    await machines[0].replica.put(instance("x"))
    await equal(machines)
    network.seen.clear()
    assert await machines[0].replica.reconcile("b") == 0
    assert dict(network.seen) == {"Compare": 1, "Same": 1, "lost": 0, "bytes": network.seen["bytes"]}
    assert network.seen["bytes"] < 100


async def test_one_comparison_makes_both_equal_and_both_keep_it(network: Network, make: Make) -> None:
    a, b = await make("a"), await make("b")
    await settled([a, b])
    network.part("a")
    await a.replica.put(instance("x"))
    await b.replica.put(instance("y"))
    network.cuts.clear()
    assert await a.replica.reconcile("b") == 1
    final = a.replica.map.entries
    assert set(final) == {"instance/x", "instance/y"}
    assert b.replica.map.entries == final
    for each in (a, b):
        await each.stop()
    for each in (a, b):
        await each.start()
        assert each.replica.map.entries == final
        await each.stop()


@pytest.mark.parametrize("error", [-DAY, 0, DAY])
async def test_a_healed_partition_agrees(network: Network, make: Make, error: int) -> None:
    machines = [await make(name, error if name in "ab" else 0) for name in "abcd"]
    a, _, c, d = machines
    for name in ("removed left", "removed right", "both"):
        await a.replica.put(instance(name))
    await equal(machines)
    network.part("ab")
    await a.replica.remove("instance/removed left")
    await c.replica.remove("instance/removed right")
    await a.replica.put(instance("both", "left"))
    await d.replica.put(instance("both", "right"))
    await a.replica.put(instance("new left"))
    await d.replica.put(instance("new right"))
    await equal(machines[:2])
    await equal(machines[2:])
    network.heal()
    await equal(machines)
    alive = {entry.key for entry in a.replica.map if entry.value is not None}
    assert alive == {"instance/both", "instance/new left", "instance/new right"}


async def test_nodes_that_cannot_reach_one_another_learn_through_a_third(network: Network, make: Make) -> None:
    quick = ReplicaTiming(interval=0.02, first_retry=0.001)
    machines = [await make(name, timing=quick) for name in "abc"]
    await equal(machines)
    network.cuts.add(frozenset("ac"))
    network.loss = 0.3
    await machines[0].replica.put(instance("x"))
    await machines[2].replica.put(instance("y"))
    await equal(machines)
    assert len(machines[0].replica.map) == 2


async def test_a_first_comparison_is_tried_until_it_works(network: Network, make: Make) -> None:
    a = await make("a")
    await a.replica.put(instance("x"))
    network.lose_next = 7
    b = await make("b")
    await equal([a, b])
    assert network.lose_next == 0
    assert b.replica.map.get("instance/x") is not None


async def test_a_restart_keeps_everything_and_later_changes_win(network: Network, make: Make) -> None:
    a = await make("a", error=DAY)
    old = await a.replica.put(instance("x"))
    await a.replica.put(instance("y"))
    await a.replica.remove("instance/y")
    before = a.replica.map.entries
    await a.stop()
    a.wall = lambda: NOW - DAY
    await a.start()
    assert a.replica.map.entries == before
    new = await a.replica.put(instance("x", "again"))
    assert new.stamp > old.stamp
    await a.kill()
    await a.start()
    assert a.replica.map.get("instance/x") == new


async def test_a_full_disk_is_seen_and_survived(network: Network, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ReplicaTiming(interval=1e6, disk_retry=0.02)
    a, b = await make("a", timing=quick), await make("b")
    await a.replica.put(instance("before"))
    assert a.replica.degraded is None
    mine = str(a.folder)

    def full(descriptor: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(mine):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, data)

    plain = os.write
    a.store.written.clear()
    with monkeypatch.context() as patched:
        patched.setattr(snapshot.os, "write", full)
        await a.replica.put(instance("during"))
        assert "Free some space" in (a.replica.degraded or "")
        await equal([a, b])
        assert b.replica.map.get("instance/during") is not None
        assert b.replica.degraded is None
        assert {entry.key for entry in SnapshotStore(a.folder).load().entries} == {"instance/before"}
    async with asyncio.timeout(DEADLINE):
        # Nothing changes any more: it is written since there is room.
        await a.store.written.wait()
    assert a.replica.degraded is None
    assert {entry.key for entry in SnapshotStore(a.folder).load().entries} == {"instance/before", "instance/during"}


async def test_a_disk_that_hangs_delays_a_command_but_not_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await make("a", timing=ReplicaTiming(interval=1e6, disk=0.05))
    await a.replica.put(instance("before"))
    loop, released = asyncio.get_running_loop(), asyncio.Event()
    plain = snapshot._flush

    def hang(descriptor: int) -> None:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(DEADLINE)
        plain(descriptor)

    monkeypatch.setattr(snapshot, "_flush", hang)
    async with asyncio.timeout(DEADLINE):
        await a.replica.put(instance("during"))
        assert "did not answer" in (a.replica.degraded or "")
        released.set()
        while a.replica.degraded is not None:
            await a.replica.put(instance("after"))
    await a.stop()
    kept = {entry.key for entry in SnapshotStore(a.folder).load().entries}
    assert kept == {"instance/before", "instance/during", "instance/after"}


async def test_many_changes_share_their_writes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await make("a")
    await a.replica.put(instance("first"))
    flushes = 0
    plain = snapshot._flush

    def count(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        plain(descriptor)

    monkeypatch.setattr(snapshot, "_flush", count)
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*(a.replica.put(instance(f"i{number}")) for number in range(100)))
    assert 1 <= flushes <= 10
    await a.kill()
    await a.start()
    assert len(a.replica.map) == 101


async def test_a_folder_of_a_newer_version_stops_the_start(network: Network, make: Make) -> None:
    a = await make("a")
    await a.stop()
    path = max(a.folder.glob("*.log"))
    from tandem.cluster.records import record

    path.write_bytes(path.read_bytes() + record(b"\xa5later", int(path.stem)))
    with pytest.raises(NewerFormatError):
        await a.start()
    a.replica = None
    assert network.receivers == {}


async def test_garbage_from_others_is_refused_and_harms_nothing(network: Network, make: Make) -> None:
    a = await make("a")
    await a.replica.on_changes(b"\xc1garbage")
    await a.replica.on_changes(encode(Compare(bytes(16))))
    assert isinstance(decode(await a.replica.on_ask(b"garbage")), Refused)
    assert isinstance(decode(await a.replica.on_ask(encode(Changes(())))), Refused)
    assert len(a.replica.map) == 0

    class Stranger:
        answer: bytes

        async def on_changes(self, message: bytes) -> None: ...

        def on_node(self, node_id: str) -> None: ...

        async def on_ask(self, message: bytes) -> bytes:
            return self.answer

    stranger = Stranger()
    network.receivers["s"] = stranger
    for answer, error in (
        (b"garbage", WireError),
        (encode(Changes(())), WireError),
        (encode(Refused("too old")), UnavailableError),
    ):
        stranger.answer = answer
        with pytest.raises(error):
            await a.replica.reconcile("s")
    stranger.answer = encode(Same())
    assert await a.replica.reconcile("s") == 0
