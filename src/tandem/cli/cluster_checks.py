"""What `tandem doctor` looks at before this machine can be one of a cluster."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator

from tandem.cli.checks import Finding
from tandem.cli.membership import OPEN_WARNING, reach_of
from tandem.config import Settings
from tandem.errors import ConfigError

MULTICAST_SECONDS = 0.5


def cluster_findings(settings: Settings) -> Iterator[Finding]:
    """The secret and its file, the cluster's port, multicast."""
    from tandem.cluster.bus.config import options_from
    from tandem.cluster.bus.secret import cluster_secret

    try:
        secret = cluster_secret(settings)
        options = options_from(settings, "doctor", "doctor", secret)
    except ConfigError as error:
        yield Finding("cluster", "failure", error.message)
        return
    reach = reach_of(settings, secret)
    values = {"name": settings.cluster_name, "reach": reach}
    if reach == "open":
        yield Finding("cluster", "warning", f"{settings.cluster_name}: {OPEN_WARNING}", "Use a secret.", values)
    elif reach == "secret":
        yield Finding("cluster", "ok", f"{settings.cluster_name}, with a secret", values=values)
    else:
        text = f"{settings.cluster_name}, of this machine alone: `tandem cluster secret` is the way to more"
        yield Finding("cluster", "info", text, values=values)
    yield _port(settings, options.scheme)
    if settings.cluster_discovery:
        group, _, port = options.multicast.rpartition(":")
        yield _multicast(group, int(port), "127.0.0.1" if options.loopback_only else "0.0.0.0")


def _port(settings: Settings, scheme: str) -> Finding:
    kind, name = (socket.SOCK_DGRAM, "UDP") if scheme == "quic" else (socket.SOCK_STREAM, "TCP")
    where = f"{name} port {settings.cluster_port}"
    if not settings.cluster_port:
        return Finding("node port", "ok", f"a free {name} port for other nodes")
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(kind == socket.SOCK_STREAM))
        try:
            probe.bind(("", settings.cluster_port))
        except OSError as error:
            reason = error.strerror or str(error)
            return Finding("node port", "info", f"{where} is taken ({reason}): a node takes a free one instead")
    return Finding("node port", "ok", f"{where} is free for other nodes")


def _multicast(group: str, port: int, interface: str) -> Finding:
    """Whether a datagram to the cluster's group comes back to this machine."""
    mark = secrets.token_bytes(16)
    member = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton(interface))
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Not the port of the nodes, which need not read what is no message of theirs.
            listener.bind(("", 0))
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            listener.settimeout(MULTICAST_SECONDS)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            if interface != "0.0.0.0":
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
            sender.sendto(mark, (group, listener.getsockname()[1]))
            while listener.recv(64) != mark:
                pass
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(
            "multicast",
            "warning",
            f"it does not work here ({reason}), so nodes do not find each other by themselves",
            "Name the others with --peers HOST:PORT or TANDEM_CLUSTER_PEERS.",
        )
    return Finding("multicast", "ok", f"nodes find each other at {group}:{port}")
