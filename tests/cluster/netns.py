"""The machines of `tandem.bench.netns` with faults: cables to pull, partitions to make and heal. Needs `nft`, too."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.bench import netns
from tandem.bench.netns import TOOL_PATH, run
from tandem.errors import EngineError

__all__ = ["TOOL_PATH", "Machine", "Network", "missing", "run"]


def missing() -> str:
    """Why machines cannot be made here; empty if they can."""
    if reason := netns.missing((*netns.TOOLS, "nft")):
        return reason
    try:
        with Network(f"{Network().prefix}-try") as network:
            network.machine("one").block([])
    except EngineError as error:
        return f"this kernel or container forbids it: {error}"
    return ""


class Machine(netns.Machine):
    """One namespace with an interface `eth0` on the switch."""

    network: Network

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

    def block(self, destinations: Iterable[str]) -> None:
        """Drop every packet to and from these addresses or networks, in place of those blocked before."""
        blocked = list(destinations)
        rules = ["add table inet tandem", "delete table inet tandem", "add table inet tandem"]
        for hook, field in (("input", "saddr"), ("output", "daddr")):
            rules.append(f"add chain inet tandem {hook} {{ type filter hook {hook} priority 0; policy accept; }}")
            rules += [f"add rule inet tandem {hook} ip {field} {address} drop" for address in blocked]
        rules += [f"add rule inet tandem input ip daddr {address} drop" for address in blocked if _multicast(address)]
        run(*self.prefix, "nft", "-f", "-", text="\n".join(rules))

    def processes(self) -> list[int]:
        """Ids of everything that runs on it."""
        return [int(line) for line in run("ip", "netns", "pids", self.namespace).split()]


class Network(netns.Network):
    """A switch and its machines. A context manager, which leaves nothing behind."""

    machines: dict[str, Machine]

    def __enter__(self) -> Network:
        super().__enter__()
        return self

    def machine(self, name: str, *, address: bool = True) -> Machine:
        """A new machine, with an address or with its interface up and nothing more."""
        machine = Machine(self, name, len(self.machines) + 1)
        self.join(machine, address=address)
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


def _multicast(address: str) -> bool:
    return address.startswith("224.")
