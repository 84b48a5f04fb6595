"""Machines on a switch, made of network namespaces: cables to pull, links to slow down, partitions to make and heal.

Everything is inside namespaces of its own, the switch included, so that this machine's network is left alone. Needs
root and the tools `ip`, `tc` and `nft`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

PREFIX = "tandem-"
TOOLS = ("ip", "tc", "nft")
TOOL_PATH = "/usr/sbin:/sbin:" + os.environ.get("PATH", "")
DEADLINE = 20


class ToolFailed(RuntimeError):
    """A command said no."""


def missing() -> str:
    """Why machines cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=TOOL_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install iproute2 nftables)"
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "end1", "type", "veth", "peer", "name", "end2")
            run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            run("ip", "netns", "exec", name, "nft", "add", "table", "inet", "tandem")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "end1", *tbf(10.0))
        finally:
            run("ip", "netns", "delete", name)
    except ToolFailed as error:
        return f"this kernel or container forbids it: {error}"
    return ""


def run(*command: str, text: str | None = None) -> str:
    """The output of a tool.

    Raises:
        ToolFailed: with what it said.
    """
    done = subprocess.run(
        command,
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PATH": TOOL_PATH},
    )
    if done.returncode:
        raise ToolFailed(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def tbf(megabits: float) -> tuple[str, ...]:
    """A token bucket of that rate, for `tc qdisc`, with buffers of 100 ms."""
    return ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms")


class Machine:
    """One namespace with an interface `eth0` on the switch."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network = network
        self.name = name
        self.namespace = f"{network.prefix}-{name}"
        self.port = f"port{number}"
        self.address = f"10.77.0.{number}"
        self._blocked: list[str] = []

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to run it on this machine."""
        return ["ip", "netns", "exec", self.namespace]

    def ip(self, *command: str) -> None:
        """`ip` on this machine."""
        run("ip", "-n", self.namespace, *command)

    def add_address(self, address: str | None = None) -> None:
        """Give it `address`, or the one it was made with."""
        self.address = address or self.address
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")

    def change_address(self, address: str) -> None:
        """Take its address away and give it another."""
        self.ip("address", "flush", "dev", "eth0", "scope", "global")
        self.add_address(address)

    def unplug(self) -> None:
        """Take its cable out of the switch: frames vanish silently."""
        run("ip", "-n", self.network.switch, "link", "set", self.port, "nomaster")

    def plug(self) -> None:
        """Undo `unplug`."""
        run("ip", "-n", self.network.switch, "link", "set", self.port, "master", "switch")

    def set_link(self, *, up: bool) -> None:
        """The interface itself, as `ip link set` does it."""
        self.ip("link", "set", "eth0", "up" if up else "down")

    def rate(self, megabits: float) -> None:
        """Slow the cable down, both ways."""
        for namespace, device in ((self.namespace, "eth0"), (self.network.switch, self.port)):
            run("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, *tbf(megabits))

    def unrate(self) -> None:
        """Undo `rate`."""
        for namespace, device in ((self.namespace, "eth0"), (self.network.switch, self.port)):
            run("ip", "netns", "exec", namespace, "tc", "qdisc", "delete", "dev", device, "root")

    def block(self, destinations: Iterable[str]) -> None:
        """Drop every packet to and from these addresses or networks, in place of those blocked before."""
        self._blocked = list(destinations)
        rules = ["add table inet tandem", "delete table inet tandem", "add table inet tandem"]
        for hook, field in (("input", "saddr"), ("output", "daddr")):
            rules.append(f"add chain inet tandem {hook} {{ type filter hook {hook} priority 0; policy accept; }}")
            rules += [f"add rule inet tandem {hook} ip {field} {address} drop" for address in self._blocked]
        if hook_multicast := [address for address in self._blocked if address.startswith("224.")]:
            rules += [f"add rule inet tandem input ip daddr {address} drop" for address in hook_multicast]
        run(*self.prefix, "nft", "-f", "-", text="\n".join(rules))

    def processes(self) -> list[int]:
        """Ids of everything that runs on it."""
        return [int(line) for line in run("ip", "netns", "pids", self.namespace).split()]


class Network:
    """A switch and its machines. A context manager, which leaves nothing behind."""

    def __init__(self) -> None:
        self.prefix = f"{PREFIX}{os.getpid()}"
        self.switch = f"{self.prefix}-switch"
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Network:
        remove_left_behind()
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*(machine.namespace for machine in self.machines.values()), self.switch):
            remove(name)

    def machine(self, name: str, *, address: bool = True) -> Machine:
        """A new machine, with an address or with its interface up and nothing more."""
        machine = Machine(self, name, len(self.machines) + 1)
        self.machines[name] = machine
        run("ip", "netns", "add", machine.namespace)
        ends = ("link", "add", machine.port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
        run("ip", "-n", self.switch, *ends)
        run("ip", "-n", self.switch, "link", "set", machine.port, "master", "switch", "up")
        machine.ip("link", "set", "lo", "up")
        machine.ip("link", "set", "eth0", "up")
        if address:
            machine.add_address()
        return machine

    def partition(self, *groups: Iterable[Machine]) -> None:
        """Let machines of one group hear only one another. Without groups, heal."""
        members = [list(group) for group in groups]
        for machine in self.machines.values():
            own = next((group for group in members if machine in group), list(self.machines.values()))
            machine.block(other.address for other in self.machines.values() if other not in own)

    def block_multicast(self) -> None:
        """As many Wi-Fi networks do."""
        for machine in self.machines.values():
            machine.block(["224.0.0.0/4"])


def remove(namespace: str) -> None:
    """Delete a namespace and end what runs in it."""
    with contextlib.suppress(ToolFailed):
        for process in run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "delete", namespace)


def remove_left_behind() -> None:
    """Delete the namespaces of test runs that were killed."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.is_dir() else ():
        owner = entry.name.removeprefix(PREFIX).partition("-")[0]
        if entry.name.startswith(PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            remove(entry.name)
