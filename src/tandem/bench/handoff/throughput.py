"""Throughput over loopback: the KV plane, exo's protocol, and plain sockets, in turns."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from tandem.bench.handoff.children import Child
from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.receivers import PeerReceiver, PlaneReceiver, Receiver, SocketReceiver
from tandem.bench.handoff.report import Throughput
from tandem.bench.handoff.sender import bench_identity
from tandem.bench.handoff.shape import Shape
from tandem.bench.report import Series, ratios
from tandem.bench.serve import Say

KINDS = {
    "plane": ("plane", False),
    "socket": ("socket", False),
    "peer": ("peer", False),
    "plane_tls": ("plane", True),
    "socket_tls": ("socket", True),
}
"""Name: the sender's kind, and whether over TLS."""

REPEATS = 3
"""Measurements of each a round: they take a fraction of a second, so anything else that runs shows in single ones."""


async def measure_throughput(plan: HandoffPlan, work: Path, say: Say) -> Throughput:
    """Receive as many bytes through each, round by round.

    Raises:
        TandemError: a sender failed, or other bytes arrived than were sent.
    """
    shape = Shape(tokens=plan.throughput_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    async with AsyncExitStack() as stack:
        say("starting the senders")
        receivers: dict[str, Receiver] = {}
        for name, (kind, tls) in KINDS.items():
            settings = {"kind": kind, "tls": tls, "shape": msgspec.to_builtins(shape)}
            log = work / f"sender-{name}.log"
            child = await stack.enter_async_context(
                Child(f"the sender {name}", "tandem.bench.handoff.sender", settings, log)
            )
            receivers[name] = receiver = await asyncio.to_thread(_receiver, kind, child.ready["port"], shape, tls)
            stack.callback(receiver.close)
            await asyncio.to_thread(receiver.receive)
        for number in range(plan.rounds * REPEATS):
            order = list(KINDS)
            order = order[number % len(order) :] + order[: number % len(order)]
            for name in order:
                say(f"throughput {number + 1} of {plan.rounds * REPEATS}: {name}")
                seconds[name].append(await asyncio.to_thread(receivers[name].receive))
    rates = {name: [shape.nbytes / one for one in taken] for name, taken in seconds.items()}
    return Throughput(
        payload_bytes=shape.nbytes,
        socket_ratio=ratios(rates["plane"], rates["socket"]),
        socket_ratio_tls=ratios(rates["plane_tls"], rates["socket_tls"]),
        peer_protocol_ratio=ratios(rates["peer"], rates["socket"]),
        bytes_per_second={name: Series.of(values) for name, values in rates.items()},
    )


def _receiver(kind: str, port: int, shape: Shape, tls: bool) -> Receiver:
    identity = bench_identity() if tls else None
    expected = shape.entries()
    if kind == "plane":
        return PlaneReceiver(port, shape, expected, identity)
    if kind == "socket":
        return SocketReceiver(port, shape, expected, identity)
    return PeerReceiver(port, shape, expected)
