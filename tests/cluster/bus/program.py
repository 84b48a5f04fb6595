"""A node that has nothing but a bus: takes commands on standard input and writes what it sees, as JSON lines.

Times are of the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.bus.bus import Bus
from tandem.cluster.bus.config import BusOptions
from tandem.cluster.bus.membership import Membership
from tandem.cluster.bus.roster import Heard, MemberEvent
from tandem.cluster.bus.serving import Question
from tandem.cluster.bus.session import LinkChange
from tandem.errors import InstanceNotReadyError, TandemError


def say(event: str, **values: Any) -> None:
    """One line to whoever started this."""
    print(json.dumps({"event": event, "at": time.monotonic(), **values}), flush=True)


@dataclass
class Numbers:
    """What arrived of one sender's numbered messages. `gap`: longest pause in seconds."""

    first: int = -1
    last: int = -1
    count: int = 0
    lost: int = 0
    disordered: int = 0
    gap: float = 0.0
    at: float = field(default_factory=time.monotonic)

    def take(self, number: int) -> None:
        """The next one."""
        now = time.monotonic()
        if self.count:
            self.gap = max(self.gap, now - self.at)
            self.lost += max(0, number - self.last - 1)
            self.disordered += number <= self.last
        else:
            self.first = number
        self.last, self.at = number, now
        self.count += 1


class Program:
    """One bus, one membership, and counters."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.bus = Bus(BusOptions(**{**options, "peers": tuple(options.get("peers", ()))}))
        self.bus.on_link.append(self.link)
        self.bus.on_reopened.append(lambda reason: say("reopened", reason=reason))
        self.membership = Membership(self.bus, describe=lambda: b"facts 7", on_event=self.member)
        self.numbers: dict[str, Numbers] = {}
        self.stream: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until standard input ends or says so."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self.bus:
            for topic, handler in (("echo", echo), ("slow", slow), ("fail", fail), ("crash", crash)):
                await self.bus.serve(topic, handler)
            subscription = await self.bus.subscribe("numbers")
            self.start(self.count(subscription))
            async with self.membership:
                say("ready", port=self.bus.options.port)
                while (line := await reader.readline()).strip():
                    command = json.loads(line)
                    do = command.pop("do")
                    if do == "quit":
                        break
                    self.start(getattr(self, f"do_{do}")(**command))
        say("closed")

    def start(self, work: Any) -> None:
        """Run it beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def count(self, subscription: Any) -> None:
        async for message in subscription:
            numbers = self.numbers.setdefault(message.node_id, Numbers())
            numbers.take(int(message.payload[:12]))
            if numbers.count % 100 == 0:
                say("counted", node=message.node_id, count=numbers.count)

    def member(self, event: MemberEvent) -> None:
        if not isinstance(event, Heard):
            values = {name: getattr(event, name) for name in event.__struct_fields__ if name != "payload"}
            say(type(event).__name__.lower(), **values)

    def link(self, change: LinkChange) -> None:
        say("link", up=change.up, name=change.name, destination=change.destination)

    async def do_ask(self, node: str, topic: str, payload: str = "", repeat: int = 1, deadline: float = 2.0) -> None:
        began = time.monotonic()
        try:
            answer = await self.bus.ask(node, topic, payload.encode() * repeat, deadline=deadline)
        except TandemError as error:
            say("failed", code=error.code, message=error.message, took=time.monotonic() - began)
        else:
            say("answer", text=answer[:200].decode(), size=len(answer), took=time.monotonic() - began)

    async def do_stream(self, rate: float, size: int = 1000) -> None:
        loop = asyncio.get_running_loop()
        began, number = loop.time(), 0
        self.stream = asyncio.current_task()
        while True:
            self.bus.publish("numbers", f"{number:012d}".encode().ljust(size, b"."))
            number += 1
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))

    async def do_still(self) -> None:
        assert self.stream is not None
        self.stream.cancel()
        say("still", lost=self.bus.lost)

    async def do_report(self) -> None:
        alive = {node_id: beat.life for node_id, beat in self.membership.alive.items()}
        say("report", numbers={name: vars(value) for name, value in self.numbers.items()}, alive=alive)

    async def do_forget(self) -> None:
        self.numbers.clear()
        say("forgot")

    async def do_hang(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this is the fault


async def echo(question: Question) -> bytes:
    return question.payload


async def slow(question: Question) -> bytes:
    say("asked")
    await asyncio.sleep(60)
    return b"late"


async def fail(question: Question) -> bytes:
    raise InstanceNotReadyError("The model is still loading.", retry_after=3.0)


async def crash(question: Question) -> bytes:
    raise KeyError("no such thing")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")
    try:
        asyncio.run(Program(json.loads(sys.argv[1])).run())
    except TandemError as refused:
        say("refused", code=refused.code, message=refused.message)
        sys.exit(1)
