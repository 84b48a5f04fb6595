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

REPEATS = 8
"""Of each pair, a round: one takes a fraction of a second, so anything else that runs shows in single ones."""


async def measure_throughput(plan: HandoffPlan, work: Path, say: Say) -> Throughput:
    """Receive as many bytes through each, round by round.

    Raises:
        TandemError: a sender failed, or other bytes arrived than were sent.
    """
    shape = Shape(tokens=plan.throughput_tokens)
    pairs: dict[str, list[tuple[float, float]]] = {"plane": [], "plane_tls": [], "peer": []}
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

        async def beside(name: str, yardstick: str) -> None:
            """Both, one right after the other, in an order that changes."""
            order = (name, yardstick) if len(pairs[name]) % 2 else (yardstick, name)
            seconds = {one: await asyncio.to_thread(receivers[one].receive) for one in order}
            pairs[name].append((shape.nbytes / seconds[name], shape.nbytes / seconds[yardstick]))

        for number in range(plan.rounds):
            for repeat in range(REPEATS):
                say(f"throughput, round {number + 1} of {plan.rounds}: {repeat + 1} of {REPEATS}")
                await beside("plane", "socket")
                await beside("plane_tls", "socket_tls")
            say(f"throughput, round {number + 1} of {plan.rounds}: the peer's protocol")
            await beside("peer", "socket")
    figures = {name: ratios(*zip(*pairs[name], strict=True)) for name in pairs}
    rates = {name: Series.of([rate for rate, _ in pairs[name]]) for name in pairs}
    rates |= {f"socket{suffix}": Series.of([rate for _, rate in pairs[f"plane{suffix}"]]) for suffix in ("", "_tls")}
    return Throughput(
        payload_bytes=shape.nbytes,
        socket_ratio=figures["plane"],
        socket_ratio_tls=figures["plane_tls"],
        peer_protocol_ratio=figures["peer"],
        bytes_per_second=rates,
    )


def _receiver(kind: str, port: int, shape: Shape, tls: bool) -> Receiver:
    identity = bench_identity() if tls else None
    expected = shape.entries()
    if kind == "plane":
        return PlaneReceiver(port, shape, expected, identity)
    if kind == "socket":
        return SocketReceiver(port, shape, expected, identity)
    return PeerReceiver(port, shape, expected)
