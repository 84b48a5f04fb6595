"""The bench's cluster, seen from the bench: programs that hold its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from tandem.bench.cluster.messages import HostSettings, Started
from tandem.bench.handoff.children import Child
from tandem.errors import TandemError
from tandem.types.facts import EngineFact

END_SECONDS = 10.0
SLACK = 30.0
"""Seconds beyond a question's own deadline: its answer says more than that none came."""


class Host:
    """One program.

    Attributes:
        nodes: how many it holds.
        ids: theirs, once they are started.
    """

    def __init__(self, child: Child, nodes: int) -> None:
        self.child = child
        self.nodes = nodes
        self.ids: list[str] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        pid: int = self.child.ready["pid"]
        return pid

    async def ask(self, do: str, deadline: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Have it do something.

        Raises:
            TandemError: it failed, ended, or was not done within `deadline` seconds.
        """
        return await self.child.ask({"do": do, "deadline": deadline, **arguments}, deadline + SLACK)

    def cpu_seconds(self) -> float:
        """Processor time of the program itself, without the runners that it started."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


class Cluster:
    """Async context manager: all programs run, their nodes do not yet. At the end nothing of them is left.

    Args:
        sizes: nodes of each program.
        work: folder for homes and logs; made here.
        engines: of this machine.
    """

    def __init__(self, sizes: Sequence[int], work: Path, secret: str, engines: tuple[EngineFact, ...]) -> None:
        self.hosts: list[Host] = []
        self.killed: list[str] = []
        self._family: dict[int, psutil.Process] = {}
        name = f"bench-{secrets.token_hex(6)}"
        for index, size in enumerate(sizes):
            home = work / f"process-{index}"
            home.mkdir(parents=True)
            settings = HostSettings(size, str(home), name, secret, engines)
            child = Child(
                f"The program of nodes {index}",
                "tandem.bench.cluster.host",
                msgspec.to_builtins(settings),
                home / "log",
            )
            self.hosts.append(Host(child, size))

    @property
    def ids(self) -> list[str]:
        """Of the nodes of all programs that run."""
        return [node_id for host in self.hosts for node_id in host.ids]

    async def __aenter__(self) -> Cluster:
        try:
            results = await asyncio.gather(*(host.child.__aenter__() for host in self.hosts), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def form(self, deadline: float = 120.0) -> tuple[float, float]:
        """Start one program's nodes after the other's, each when those before it see one another: fifty at once on a
        few cores say more of the cores.

        Returns:
            Seconds from the last ones' start until every node saw every other; and those that their own start took.
        """
        running, self.hosts = self.hosts, []
        try:
            for host in running:
                self.hosts.append(host)
                started = msgspec.convert(await host.ask("start", deadline), Started)
                host.ids = started.node_ids
                seen = await self._all("joined", deadline, ids=self.ids)
        finally:
            self.hosts = running
        return float(max(answer["at"] for answer in seen) - started.called), started.started - started.called

    async def kill(self, hosts: Sequence[Host]) -> float:
        """End programs with SIGKILL, all of them within milliseconds.

        Returns:
            When the last one was killed, on the machine's monotonic clock.
        """
        for host in hosts:
            self._remember(host)
        for host in hosts:
            os.kill(host.pid, signal.SIGKILL)
        at = time.monotonic()
        self.hosts = [host for host in self.hosts if host not in hosts]
        self.killed += [node_id for host in hosts for node_id in host.ids]
        await asyncio.gather(*(host.child.stop() for host in hosts))
        return at

    async def noticed(self, since: float, ids: Sequence[str], deadline: float = 60.0) -> float:
        """Seconds from `since` until no node has facts of `ids` any more."""
        answers = await self._all("left", deadline, ids=list(ids))
        return float(max(answer["at"] for answer in answers) - since)

    async def departures(self) -> int:
        """How often a node was taken for gone that was not killed."""
        return sum(int(answer["count"]) for answer in await self._all("departures", 30.0, ids=self.killed))

    async def _all(self, do: str, deadline: float, **arguments: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(host.ask(do, deadline, **arguments) for host in self.hosts))

    async def every(self, do: str, deadline: float = 60.0, **arguments: Any) -> list[dict[str, Any]]:
        """Have every program do something. Of programs that were killed meanwhile there is no answer.

        Raises:
            TandemError: a program that was not killed failed.
        """
        asked = list(self.hosts)
        answers = await asyncio.gather(*(host.ask(do, deadline, **arguments) for host in asked), return_exceptions=True)
        found = []
        for host, answer in zip(asked, answers, strict=True):
            if isinstance(answer, TandemError) and host not in self.hosts:
                continue
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    def _remember(self, host: Host) -> None:
        """What a program started is ours to end, also when the program cannot any more."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(host.pid).children(recursive=True):
                self._family[process.pid] = process

    async def stop(self) -> None:
        """End all programs and whatever they started. Idempotent."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            if host.child.ready:
                self._remember(host)
        await asyncio.shield(self._end(hosts))

    async def _end(self, hosts: Sequence[Host]) -> None:
        await asyncio.gather(*(host.child.stop() for host in hosts), return_exceptions=True)
        family = list(self._family.values())
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, END_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, END_SECONDS)
