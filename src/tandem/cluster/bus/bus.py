"""What the rest of the program talks to the other nodes through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
import zenoh

from tandem.cluster.bus.config import MAX_MESSAGE, BusOptions
from tandem.cluster.bus.messages import Message, Subscription
from tandem.cluster.bus.outbox import Outbox
from tandem.cluster.bus.pump import CAPACITY, pump
from tandem.cluster.bus.serving import Envelope, Handler, Service
from tandem.cluster.bus.session import LinkChange, Session
from tandem.errors import DeadlineError, NodeLostError, PayloadTooLargeError, TandemError, UnavailableError
from tandem.types import Failure

ASKS = 64
"""Questions that may be under way at a time; further ones wait, within their deadlines."""
_SENDING = 2.0
_TOPIC = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)*")


class Bus:
    """Messages to all nodes and questions to one, over a session that is reopened as addresses change.

    Used as an async context manager, or with `start` and, in every case, `close`. All methods are called on the loop
    that started it.

    Attributes:
        lives: node ids to the life that questions go to; `Membership` keeps it.
        on_link: called on the loop with every link that comes or goes.
        on_reopened: called on the loop with the reason before a session is opened anew.
    """

    def __init__(self, options: BusOptions) -> None:
        self.options = options
        self.lives: dict[str, str] = {}
        self.on_link: list[Callable[[LinkChange], None]] = []
        self.on_reopened: list[Callable[[str], None]] = []
        self.session = Session(
            options, on_link=partial(_call_all, self.on_link), on_reopened=partial(_call_all, self.on_reopened)
        )
        self._outbox = Outbox(self.session)
        self._askers = ThreadPoolExecutor(ASKS, thread_name_prefix="tandem-ask")
        self._services: list[Service] = []
        self._subscriptions: list[Subscription] = []
        self._closed = False

    async def start(self) -> None:
        """Open the session and start sending.

        Raises:
            ConfigError: the port is taken or the configuration is refused.
        """
        await self.session.open()
        self._outbox.start()

    async def close(self) -> None:
        """Send what waits, end every subscription and service, and leave the cluster. Bounded, and may be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            for service in self._services:
                service.cancel()
            # Cancelled handlers post their answers in the loop's next rounds.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if self._outbox.is_alive():
                await asyncio.to_thread(self._outbox.stop, _SENDING)
            for subscription in self._subscriptions:
                subscription.end()
        finally:
            await self.session.close()
            self._askers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Bus:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def lost(self) -> int:
        """Messages that could not be sent, as no session was open."""
        return self._outbox.lost

    def publish(self, topic: str, payload: bytes, *, urgent: bool = False) -> None:
        """Send to every node that subscribes now. Returns at once; order is kept among messages of equal urgency.

        Raises:
            QueueFullError: too much waits to be sent.
            PayloadTooLargeError: over `MAX_MESSAGE` bytes.
        """
        self._check(topic, payload)
        key = f"say/{self.options.node_id}/{self.options.life}/{topic}"
        priority = zenoh.Priority.INTERACTIVE_HIGH if urgent else zenoh.Priority.DATA

        def send(session: zenoh.Session) -> None:
            block = zenoh.CongestionControl.BLOCK
            session.put(key, payload, congestion_control=block, priority=priority, express=urgent)

        self._outbox.post(send, len(payload))

    async def subscribe(self, topic: str) -> Subscription:
        """Other nodes' messages from now on, also over reopenings of the session."""
        self._check(topic, b"")
        subscription = Subscription(asyncio.get_running_loop())

        def deliver(sample: zenoh.Sample) -> None:
            parts = str(sample.key_expr).split("/", 3)
            subscription.deliver(Message(topic, parts[1], parts[2], sample.payload.to_bytes()))

        def make(session: zenoh.Session) -> Any:
            channel: zenoh.handlers.FifoChannel[zenoh.Sample] = zenoh.handlers.FifoChannel(CAPACITY)
            subscriber = session.declare_subscriber(f"say/*/*/{topic}", channel, allowed_origin=zenoh.Locality.REMOTE)
            pump(f"topic-{topic}", subscriber.handler.recv, deliver)
            return subscriber

        declaration = await self.session.declare(make)
        subscription.attach(lambda: self.session.withdraw(declaration))
        self._subscriptions.append(subscription)
        return subscription

    async def serve(self, topic: str, handler: Handler) -> None:
        """Answer other nodes' questions about `topic` from now on, until the bus is closed."""
        self._check(topic, b"")
        service = Service(topic, handler, self._outbox, asyncio.get_running_loop())

        def make(session: zenoh.Session) -> Any:
            channel: zenoh.handlers.FifoChannel[zenoh.Query] = zenoh.handlers.FifoChannel(CAPACITY)
            key = f"ask/{self.options.node_id}/{self.options.life}/{topic}"
            queryable = session.declare_queryable(key, channel)
            pump(f"serve-{topic}", queryable.handler.recv, service.accept)
            return queryable

        self._services.append(service)
        await self.session.declare(make)

    async def ask(self, node_id: str, topic: str, payload: bytes, *, deadline: float) -> bytes:
        """One node's answer. `deadline` in seconds.

        Raises:
            NodeLostError: the node is not there, does not serve the topic, or died before it answered.
            DeadlineError: no answer in time.
            TandemError: what the other side's handler raised.
        """
        self._check(topic, payload)
        token = zenoh.CancellationToken()
        ask = partial(self._ask, node_id, topic, payload, deadline, token)
        try:
            async with asyncio.timeout(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._askers, ask)
        except TimeoutError as error:
            raise _too_late(node_id, topic, deadline) from error
        finally:
            token.cancel()

    async def reopen(self, reason: str, endpoints: tuple[str, ...] = ()) -> None:
        """Open the session anew and dial `endpoints` (`scheme/host:port`) too."""
        await self.session.reopen(reason, endpoints)

    def _ask(self, node_id: str, topic: str, payload: bytes, deadline: float, token: zenoh.CancellationToken) -> bytes:
        session = self.session.wait_open(deadline)
        if session is None:
            raise _too_late(node_id, topic, deadline)
        envelope = Envelope(self.options.node_id, self.options.life, deadline)
        key = f"ask/{node_id}/{self.lives.get(node_id, '*')}/{topic}"
        channel: zenoh.handlers.FifoChannel[zenoh.Reply] = zenoh.handlers.FifoChannel(16)
        try:
            replies = session.get(
                key,
                channel,
                payload=payload,
                attachment=msgspec.msgpack.encode(envelope),
                # Its own timeout would end a little before ours, and without saying so.
                timeout=deadline + 1.0,
                consolidation=zenoh.ConsolidationMode.NONE,
                congestion_control=zenoh.CongestionControl.BLOCK,
                cancellation_token=token,
            )
            reply = replies.recv()
        except zenoh.ZError as error:
            raise NodeLostError(
                f"Node {node_id} cannot be asked about '{topic}': it is not in the cluster (any more), or does not "
                "serve that. See `tandem nodes` for who is there."
            ) from error
        if reply.ok is not None:
            return reply.ok.payload.to_bytes()
        assert reply.err is not None
        raise _failure(reply.err.payload.to_bytes(), node_id)

    def _check(self, topic: str, payload: bytes) -> None:
        if self._closed:
            raise UnavailableError("This node is leaving the cluster; start it again to use the cluster.")
        if not _TOPIC.fullmatch(topic):
            raise ValueError(f"{topic!r} is no topic")
        if len(payload) > MAX_MESSAGE:
            raise PayloadTooLargeError(
                f"A message about '{topic}' has {len(payload)} bytes; the bus takes {MAX_MESSAGE}."
            )


def _failure(payload: bytes, node_id: str) -> TandemError:
    try:
        return msgspec.msgpack.decode(payload, type=Failure).error()
    except msgspec.DecodeError:
        # zenoh's own errors are plain text.
        return NodeLostError(f"Node {node_id} did not answer: {payload[:200].decode(errors='replace')}.")


def _too_late(node_id: str, topic: str, deadline: float) -> DeadlineError:
    return DeadlineError(
        f"Node {node_id} did not answer '{topic}' within {deadline:.3g} s. It may be overloaded, asleep or cut off; "
        "try again, or ask another node."
    )


def _call_all(listeners: list[Callable[[Any], None]], value: Any) -> None:
    for listener in listeners:
        listener(value)
