"""What the bus is told, and the zenoh configuration that follows from it.

The values are measured ones: how soon a silent death is seen, how long a frozen peer may hold a sender up, what keeps
clusters apart. `docs/cluster.md` lists them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
from dataclasses import dataclass
from typing import Literal

import zenoh

from tandem.cluster.bus.addresses import by_family
from tandem.config import Settings, parse_addresses
from tandem.errors import ConfigError
from tandem.kv.tls import Identity

LEASE = 2.0
"""Seconds after which others take a peer for dead that sends nothing."""
LEASE_HERE = 4.0
"""The same on this machine alone, where no cable is pulled: dead processes close their links, and frozen ones have no
heartbeats. Each link carries four signs of life a lease, which add up where many nodes share a machine."""
OPEN_TIMEOUT = 1.0
"""Seconds for one address of a peer: dead ones are dialled one after another."""
OPEN_TIMEOUT_HERE = 5.0
"""The same on this machine alone, where no address is dead: a node may wait for a processor."""
WAIT_BEFORE_CLOSE = 0.3
"""Seconds a frozen peer may hold a sender up before its link is closed."""
MAX_MESSAGE = 4 << 20
"""Largest payload, in bytes. The bus is for small messages; bulk data has connections of its own."""
# A silent death blocks the thread that closes its socket, so there have to be more of them than deaths at a time.
_RUNTIME = "(rx: (worker_threads: 8), net: (worker_threads: 2), acc: (worker_threads: 2))"
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class BusOptions:
    """Who this node is on which bus. Times in seconds.

    Attributes:
        life: new at every start, see `NodeFacts.life`.
        open: serve other machines although there is no secret.
        port: of the listener; the same number after every reopening.
        peers: addresses that are dialled for ever, each `host:port`.
        discovery: find others, and be found, by multicast.

    Raises:
        ConfigError: a value cannot be used, or they do not fit together.
    """

    node_id: str
    life: str
    port: int
    cluster_name: str = "tandem"
    secret: str = ""
    open: bool = False
    peers: tuple[str, ...] = ()
    discovery: bool = True

    def __post_init__(self) -> None:
        for name in (self.node_id, self.life):
            if not _ID.fullmatch(name):
                raise ConfigError(f"{name!r} cannot be a node id: use up to 64 letters, digits, '_', '-' and '.'.")
        if not self.cluster_name:
            raise ConfigError("The cluster's name is empty; set TANDEM_CLUSTER_NAME, or leave it out.")
        far = [peer for peer in self.peers if not _is_loopback(peer)]
        if self.loopback_only and far:
            raise ConfigError(
                f"TANDEM_CLUSTER_PEERS names {far[0]}, but without a cluster secret only this machine is served. Make "
                "a secret and give it to every node, or set TANDEM_CLUSTER_OPEN=1 on a network that you trust wholly."
            )

    @property
    def scheme(self) -> Literal["quic", "tcp"]:
        """QUIC with mutual TLS under a secret, plain TCP without one."""
        return "quic" if self.secret else "tcp"

    @property
    def loopback_only(self) -> bool:
        """Nothing is to be heard from or sent to other machines."""
        return not self.secret and not self.open

    @property
    def digest(self) -> bytes:
        """Stands for the cluster's name, and for whom it serves, as those who could not talk need not meet."""
        reach = "secret" if self.secret else "open" if self.open else "machine"
        return hashlib.sha256(f"tandem cluster {reach} {self.cluster_name}".encode()).digest()

    @property
    def multicast(self) -> str:
        """Group and port of discovery, from the cluster's name: clusters of other names do not even meet."""
        high, low = self.digest[0], self.digest[1]
        return f"239.255.{high}.{low}:{20000 + int.from_bytes(self.digest[2:4], 'big') % 10000}"

    @property
    def namespace(self) -> str:
        """Prefix of every key on the wire."""
        return f"tandem-{self.digest[:8].hex()}"


def options_from(settings: Settings, node_id: str, life: str, secret: str) -> BusOptions:
    """The bus that the settings ask for. `secret` as `bus.secret.cluster_secret` found it.

    Raises:
        ConfigError: settings do not fit together.
    """
    return BusOptions(
        node_id=node_id,
        life=life,
        port=_port(settings.cluster_port, "quic" if secret else "tcp"),
        cluster_name=settings.cluster_name,
        secret=secret,
        open=settings.cluster_open,
        peers=parse_addresses(settings.cluster_peers.split(",")),
        discovery=settings.cluster_discovery,
    )


def _port(wanted: int, scheme: Literal["quic", "tcp"]) -> int:
    """The port that is wanted, or a free one where another node of this machine has that."""
    kind = socket.SOCK_DGRAM if scheme == "quic" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, scheme == "tcp")
        try:
            probe.bind(("", wanted))
        except OSError:
            return free_port(scheme)
        return wanted or free_port(scheme)


def zenoh_config(
    options: BusOptions, identity: Identity | None, extra: tuple[str, ...] = (), *, ipv6: bool = True
) -> zenoh.Config:
    """zenoh's configuration for this machine's addresses of this moment.

    Args:
        extra: further endpoints to dial, in zenoh's form.
        ipv6: listen on IPv6 addresses too, which may be too young to be listened on.
    """
    os.environ.setdefault("ZENOH_RUNTIME", _RUNTIME)
    config = zenoh.Config()
    hosts, groups = _hosts(options, ipv6=ipv6)
    values = {
        "mode": "peer",
        "namespace": options.namespace,
        "listen/endpoints": [f"{options.scheme}/{host}:{options.port}" for host in hosts],
        "connect/endpoints": list(dict.fromkeys([*(f"{options.scheme}/{peer}" for peer in options.peers), *extra])),
        "connect/retry": {"period_init_ms": 1000, "period_max_ms": 2000, "period_increase_factor": 1.5},
        # Whoever opens declares first and is found meanwhile.
        "open/return_conditions": {"connect_scouted": False, "declares": False},
        "scouting/multicast/enabled": options.discovery,
        "scouting/multicast/address": options.multicast,
        "scouting/multicast/interface": ",".join(groups),
        "scouting/multicast/autoconnect_strategy": "always",
        "scouting/gossip/autoconnect_strategy": "always",
        "transport/shared_memory/enabled": False,
        "transport/unicast/open_timeout": _milliseconds(OPEN_TIMEOUT_HERE if options.loopback_only else OPEN_TIMEOUT),
        "transport/link/protocols": [options.scheme],
        "transport/link/tx/lease": _milliseconds(LEASE_HERE if options.loopback_only else LEASE),
        "transport/link/tx/queue/congestion_control/block/wait_before_close": int(WAIT_BEFORE_CLOSE * 1e6),
        "transport/link/rx/max_message_size": 4 * MAX_MESSAGE,
    }
    if identity is not None:
        pem = {
            "root_ca_certificate": identity.authority,
            "listen_certificate": identity.certificate,
            "listen_private_key": identity.key,
            "connect_certificate": identity.certificate,
            "connect_private_key": identity.key,
        }
        values |= {f"transport/link/tls/{name}_base64": base64.b64encode(text).decode() for name, text in pem.items()}
        # Addresses are discovered, so certificates cannot name them.
        values |= {"transport/link/tls/enable_mtls": True, "transport/link/tls/verify_name_on_connect": False}
    for key, value in values.items():
        config.insert_json5(key, json.dumps(value))
    return config


def _hosts(options: BusOptions, *, ipv6: bool) -> tuple[list[str], list[str]]:
    """Where to listen, and the addresses of the interfaces for multicast.

    All spelt out, as zenoh reads the interfaces once in the life of a process: what it calls all interfaces, and what
    it tells others of its own address, would stay what they were when its first session was opened.
    """
    if options.loopback_only:
        return ["127.0.0.1"], ["127.0.0.1"]
    found = by_family()
    fourth = sorted(found[socket.AF_INET])
    sixth = [f"[{address}]" for address in sorted(found[socket.AF_INET6])] if ipv6 else []
    return [*fourth, *sixth] or ["127.0.0.1"], fourth or ["127.0.0.1"]


def free_port(scheme: Literal["quic", "tcp"]) -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if scheme == "quic" else socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
