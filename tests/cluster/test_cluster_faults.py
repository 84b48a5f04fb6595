"""Faults drawn by lot on three real nodes, while people go on asking for things.

`TANDEM_CLUSTER_FAULT_ROUNDS=200` runs as many rounds, `TANDEM_CLUSTER_FAULT_SEED` repeats a run's draws.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import IncompleteRead

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.up_nodes import Refused, UpNode, each, meet

ROUNDS = int(os.environ.get("TANDEM_CLUSTER_FAULT_ROUNDS", "3"))
SEED = os.environ.get("TANDEM_CLUSTER_FAULT_SEED") or secrets.token_hex(4)
DEADLINE = 30.0
GONE_SECONDS = 10.0
REQUEST_SECONDS = 40.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 60 * ROUNDS)]


@dataclass
class Faults:
    """What is broken, what was asked for, and what came of it.

    Attributes:
        cards: that should be there, with their number of layers.
        settled: of those, the ones that every node knew when the round began: only these are removed or changed, so
            that what should be there does not depend on whose clock is ahead.
        tally: how often what happened.
        slowest: seconds.
    """

    cluster: Cluster
    chance: random.Random
    instances: list[str] = field(default_factory=list)
    cards: dict[str, int] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    made: int = 0
    rounds: int = 0

    @property
    def nodes(self) -> list[UpNode]:
        return self.cluster.nodes

    def took(self, what: str, seconds: float) -> None:
        self.slowest[what] = max(seconds, self.slowest.get(what, 0.0))

    def change(self, by: UpNode) -> None:
        """Ask one node for one thing. What it answers has to last."""
        kind = self.chance.choice(("add", "add", "remove", "alter")) if self.settled else "add"
        if kind == "add":
            name, layers = f"org/card-{self.made}", 1
            self.made += 1
        else:
            name = self.settled.pop(self.chance.randrange(len(self.settled)))
            layers = self.cards[name] + 1
        if kind == "remove":
            by.ask("remove_card", model_id=name)
            del self.cards[name]
        else:
            by.ask("card", model_id=name, layers=layers)
            self.cards[name] = layers
        self.tally[f"intents: {kind}"] += 1

    def request(self, by: UpNode) -> str:
        """One answer over HTTP; how it ended. A request that hangs is a failure of the test."""
        began = time.monotonic()
        try:
            status, _ = by.chat("steady", deadline=REQUEST_SECONDS).whole()
            return f"requests: {status}"
        except TimeoutError:
            raise AssertionError(f"a request at {by.name} hung for {time.monotonic() - began:.0f} s") from None
        except (OSError, ValueError, IncompleteRead) as error:  # its own node was killed
            return f"requests: {type(error).__name__}"
        finally:
            self.took("a request", time.monotonic() - began)

    def expect_gone(self, gone: list[UpNode]) -> None:
        """The nodes that can still hear one another forget those that are gone, in time."""
        began = time.monotonic()
        left = [node for node in self.nodes if node not in gone]
        if left:
            at = each(left, "wait_nodes", nodes=[node.id for node in left], deadline=GONE_SECONDS)
            self.took("facts of the gone", at - began)

    # ---------------------------------------------------------------------------------------------------------- faults

    def kill(self, victims: list[UpNode]) -> Callable[[], None]:
        for node in victims:
            node.kill()
        return lambda: self.again(victims)

    def restart(self, victims: list[UpNode]) -> Callable[[], None]:
        for node in victims:
            node.stop()
        return lambda: self.again(victims)

    def wrong_clock(self, victims: list[UpNode]) -> Callable[[], None]:
        for node in victims:
            node.kill()
        self.again(victims, clock=self.chance.choice((-86_400.0, 86_400.0)))
        return lambda: None

    def again(self, victims: list[UpNode], clock: float = 0.0) -> None:
        for node in victims:
            node.start(clock=clock)
        for node in victims:
            node.ready()

    def cable(self, victims: list[UpNode]) -> Callable[[], None]:
        for node in victims:
            node.machine.unplug()
        return lambda: do(node.machine.plug for node in victims)

    def link(self, victims: list[UpNode]) -> Callable[[], None]:
        for node in victims:
            node.machine.set_link(up=False)
        return lambda: do(partial(node.machine.set_link, up=True) for node in victims)

    def partition(self, victims: list[UpNode]) -> Callable[[], None]:
        rest = [node.machine for node in self.nodes if node not in victims]
        self.cluster.network.partition([node.machine for node in victims], rest)
        return self.cluster.network.partition

    def round(self) -> None:
        """Break something, go on asking, mend it, and look whether everything is as it was asked for."""
        self.settled = sorted(self.cards)
        victims = self.chance.sample(self.nodes, self.chance.choice((1, 1, 2)))
        fault = self.chance.choice((self.kill, self.restart, self.wrong_clock, self.cable, self.link, self.partition))
        self.tally[f"faults: {fault.__name__} of {len(victims)}"] += 1
        # Asked for just before: what was answered is on the disk of the one who answered.
        self.change(self.chance.choice(victims))
        with ThreadPoolExecutor(8) as pool:
            asked: list[Future[str]] = [pool.submit(self.request, node) for node in self.nodes]
            mend = fault(victims)
            there = [node for node in self.nodes if node.running]
            asked += [pool.submit(self.request, node) for node in there]
            for _ in range(self.chance.randint(1, 3)):
                self.change(self.chance.choice(there))
            # Of two without a cable, each is alone, and the third one is too.
            cut_off = fault in (self.cable, self.link) and len(victims) == 1
            if cut_off or fault in (self.kill, self.restart):
                self.expect_gone(victims)
            self.change(self.chance.choice(there))
            mended = time.monotonic()
            mend()
            for one in asked:
                outcome = one.result(timeout=REQUEST_SECONDS + 10)
                # Only a process that ends at once leaves half an answer.
                assert fault in (self.kill, self.wrong_clock) or "IncompleteRead" not in outcome, fault.__name__
                self.tally[outcome] += 1
        meet(self.nodes, DEADLINE)
        agreed = each(self.nodes, "wait_intents", instances=self.instances, cards=self.cards, deadline=DEADLINE)
        self.took("mended to agreed", agreed - mended)
        for instance in self.instances:
            each(self.nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
        for node in self.nodes:
            assert self.request(node) == "requests: 200"

    def story(self) -> str:
        lines = [f"  {key}: {count}" for key, count in sorted(self.tally.items())]
        times = [f"  slowest, {key}: {seconds:.2f} s" for key, seconds in sorted(self.slowest.items())]
        return "\n".join([f"seed {SEED}", *lines, *times])


def do(all_of: Iterable[Callable[[], None]]) -> None:
    """Call each."""
    for call in all_of:
        call()


def test_faults_drawn_by_lot(cluster: Cluster) -> None:
    run = Faults(cluster, random.Random(SEED))
    for number, node in enumerate(cluster.nodes[:2]):
        run.instances.append(f"steady-{number}")
        node.ask("create", node_id=node.id, instance_id=run.instances[-1], reference="sim:model_id=steady")
    for instance in run.instances:
        each(cluster.nodes, "wait_ready", instance_id=instance, deadline=DEADLINE)
    try:
        while run.rounds < ROUNDS:
            run.round()
            run.rounds += 1
    except Refused as error:
        raise AssertionError(f"a node that was there refused: {error}") from error
    finally:
        print(f"\n{run.rounds} rounds of {ROUNDS} were good\n{run.story()}")
