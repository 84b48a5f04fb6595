"""Machines on a switch, made of network namespaces, with cables of a set speed.

Everything is inside namespaces of its own, the switch included, so that this machine's network is left alone. Needs
Linux, root and the tools `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tandem.errors import EngineError

PREFIX = "tandem-"
TOOLS = ("ip", "tc")
TOOL_PATH = "/usr/sbin:/sbin:" + os.environ.get("PATH", "")
DEADLINE = 20
CLONE_NEWNET = 0x40000000


def missing(tools: Sequence[str] = TOOLS) -> str:
    """Why machines cannot be made here, tried out; empty if they can."""
    if platform.system() != "Linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in tools if shutil.which(tool, path=TOOL_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian's packages are iproute2 and nftables)"
    try:
        with Network(f"{PREFIX}{os.getpid()}-try") as network:
            network.machine("one").rate(10.0)
    except EngineError as error:
        return f"this kernel or container forbids it: {error}"
    return ""


def run(*command: str, text: str | None = None) -> str:
    """The output of a tool.

    Raises:
        EngineError: it did not end with status 0.
    """
    done = subprocess.run(
        command,
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PATH": TOOL_PATH},
        check=False,
    )
    if done.returncode:
        raise EngineError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def tbf(megabits: float) -> tuple[str, ...]:
    """A token bucket of that rate, for `tc qdisc`, with buffers of 100 ms."""
    return ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms")


class Machine:
    """One namespace with an interface `eth0` on the switch.

    Attributes:
        address: of `eth0`.
    """

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network = network
        self.name = name
        self.namespace = f"{network.prefix}-{name}"
        self.port = f"port{number}"
        self.address = f"10.77.0.{number}"

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to run it on this machine."""
        return [shutil.which("ip", path=TOOL_PATH) or "ip", "netns", "exec", self.namespace]

    def ip(self, *command: str) -> None:
        """`ip` on this machine."""
        run("ip", "-n", self.namespace, *command)

    def add_address(self, address: str | None = None) -> None:
        """Give it `address`, or the one it was made with."""
        self.address = address or self.address
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")

    def rate(self, megabits: float) -> None:
        """Slow the cable down, both ways."""
        self._at_both_ends("replace", *tbf(megabits))

    def unrate(self) -> None:
        """Undo `rate`."""
        self._at_both_ends("delete", "root")

    def _at_both_ends(self, verb: str, *qdisc: str) -> None:
        for namespace, device in ((self.namespace, "eth0"), (self.network.switch, self.port)):
            run("ip", "netns", "exec", namespace, "tc", "qdisc", verb, "dev", device, *qdisc)

    def sent(self) -> int:
        """Bytes that have gone into the cable from here, headers included."""
        [device] = json.loads(run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0"))
        nbytes: int = device["stats64"]["tx"]["bytes"]
        return nbytes

    def connect(self, port: int, deadline: float = DEADLINE) -> socket.socket:
        """A connection to the machine's loopback, from this process.

        Raises:
            OSError: nothing listens there.
        """
        made: queue.SimpleQueue[socket.socket | OSError] = queue.SimpleQueue()

        def dial() -> None:
            # A socket belongs to the namespace of the thread that made it; this thread does nothing else.
            try:
                with Path("/run/netns", self.namespace).open() as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                made.put(socket.create_connection(("127.0.0.1", port), deadline))
            except OSError as error:
                made.put(error)

        threading.Thread(target=dial, name="dial", daemon=True).start()
        found = made.get()
        if isinstance(found, OSError):
            raise found
        return found


class Network:
    """A switch and its machines. A context manager, which leaves nothing behind.

    Args:
        prefix: begins the names of its namespaces; None takes one that this process has once.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = prefix or f"{PREFIX}{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Network:
        remove_left_behind()
        run("ip", "netns", "add", self.switch)
        try:
            run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
            run("ip", "-n", self.switch, "link", "set", "switch", "up")
        except EngineError:
            remove(self.switch)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*(machine.namespace for machine in self.machines.values()), self.switch):
            remove(name)

    def machine(self, name: str, *, address: bool = True) -> Machine:
        """A new machine, with an address or with its interface up and nothing more."""
        return self.join(Machine(self, name, len(self.machines) + 1), address=address)

    def join(self, machine: Machine, *, address: bool) -> Machine:
        """Make the namespace of a machine and plug its cable in."""
        self.machines[machine.name] = machine
        run("ip", "netns", "add", machine.namespace)
        ends = ("link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
        run("ip", "-n", self.switch, *ends)
        run("ip", "-n", self.switch, "link", "set", machine.port, "master", "switch", "up")
        machine.ip("link", "set", "lo", "up")
        machine.ip("link", "set", "eth0", "up")
        if address:
            machine.add_address()
        return machine


def remove(namespace: str) -> None:
    """Delete a namespace and end what runs in it."""
    with contextlib.suppress(EngineError):
        for process in run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "delete", namespace)


def remove_left_behind() -> None:
    """Delete the namespaces of runs that were killed."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.is_dir() else ():
        owner = entry.name.removeprefix(PREFIX).partition("-")[0]
        if entry.name.startswith(PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            remove(entry.name)
