"""What this node knows of the cluster, and how the others learn of it: membership, facts and intents over one bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from tandem.cluster.bus.bus import Bus
from tandem.cluster.bus.config import options_from
from tandem.cluster.bus.membership import Membership
from tandem.cluster.bus.messages import Message, Subscription
from tandem.cluster.bus.roster import Conflict, Heard, Joined, Left, MemberEvent
from tandem.cluster.bus.serving import Question
from tandem.cluster.events import EventLog
from tandem.cluster.exchange import LARGEST_MESSAGE
from tandem.cluster.facts.gather import FactsGatherer, Sources
from tandem.cluster.replica import Replica
from tandem.cluster.snapshot import SnapshotStore
from tandem.cluster.state import ClusterState, NodeChanged, NodeJoined, NodeLeft
from tandem.cluster.tasks import background, cancelled
from tandem.cluster.transport import Receiver
from tandem.config import Settings
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.types.facts import NodeFacts
from tandem.types.intents import Entry

FACTS, CHANGES, COMPARE = "facts", "intents", "intents-ask"
ASK_SECONDS = 2.0
FIRST_PAUSE = 0.2
logger = logging.getLogger("tandem.cluster")

_facts_decoder = msgspec.msgpack.Decoder(NodeFacts)
_encoder = msgspec.msgpack.Encoder()


class ControlPlane:
    """Owns everything that is said on the bus. For one event loop.

    Args:
        secret: the cluster's; empty for none.
        on_left: called with a node's id when it is gone.
        on_conflict: called when another process has this node's id.
        sources: where this node's facts come from; None for this machine.

    Attributes:
        log: every change of what is known, and the state they lead to.
        facts: this node's own, to push changes into.
    """

    def __init__(
        self,
        settings: Settings,
        node_id: str,
        secret: str,
        *,
        on_left: Callable[[str], None] = lambda node_id: None,
        on_conflict: Callable[[ConfigError], None] = lambda error: None,
        sources: Sources | None = None,
    ) -> None:
        self.node_id = node_id
        self.log = EventLog()
        self.facts = FactsGatherer(settings, node_id, self._emit, sources=sources)
        self.bus = Bus(options_from(settings, node_id, self.facts.life, secret))
        self.membership = Membership(self.bus, describe=self._describe, on_event=self._member)
        self._transport = BusTransport(self.bus, self.membership)
        store = SnapshotStore(settings.home / "intents")
        self.intents = Replica(node_id, self._transport, store, changed=self._changed)
        self._on_left = on_left
        self._on_conflict = on_conflict
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> ClusterState:
        """Facts and intents as they are known here now."""
        return self.log.state

    async def start(self) -> None:
        """Restore the intents, join the cluster, and keep up with it.

        Raises:
            ConfigError: the bus cannot listen, or the settings do not fit together.
            StorageError, NewerFormatError: the intents on disk cannot be read.
        """
        await self.bus.start()
        facts = await self.bus.subscribe(FACTS)
        await self.bus.serve(FACTS, self._tell)
        await self._transport.start()
        await self.intents.start()
        self.log.append_intents(list(self.intents.map))
        await self.facts.start()
        self._tasks = [background(self._listen(facts), "facts of others")]
        # Last: whoever sees this node may ask it for everything.
        await self.membership.start()

    async def stop(self) -> None:
        """Leave the cluster. Bounded."""
        for task in [*self._tasks, *self._fetching.values()]:
            task.cancel()
        await self.facts.stop()
        await self.membership.close()
        await self.intents.stop()
        await self._transport.stop()
        await self.bus.close()
        self.log.close()

    # ----------------------------------------------------------------------------------------------------------- facts

    def _emit(self, facts: NodeFacts) -> None:
        joined = facts.node_id not in self.state.nodes
        self.log.append(NodeJoined(facts) if joined else NodeChanged(facts))
        try:
            self.bus.publish(FACTS, _encoder.encode(facts))
        except TandemError as error:
            # The heartbeat's sequence number tells the others that they lack something.
            logger.info("This node's facts did not get out: %s", error.message)

    def _describe(self) -> bytes:
        current = self.facts.current
        return _encoder.encode(current.sequence if current is not None else 0)

    async def _tell(self, question: Question) -> bytes:
        current = self.facts.current
        if current is None:
            raise UnavailableError("This node has not looked at itself yet.", retry_after=0.5)
        return _encoder.encode(current)

    async def _listen(self, messages: Subscription) -> None:
        async for message in messages:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        beat = self.membership.beat_of(message.node_id)
        # Facts of a node that is not (any more) there are asked for when it joins.
        if beat is not None and beat.life == message.life:
            self._learn(message.node_id, message.life, message.payload)

    def _learn(self, node_id: str, life: str, payload: bytes) -> None:
        try:
            facts = _facts_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            logger.warning("The facts of node %s cannot be read (%s). Install the same Tandem there.", node_id, error)
            return
        if (facts.node_id, facts.life) != (node_id, life):
            logger.warning("Node %s sent facts of %s. They are not believed.", node_id, facts.node_id)
            return
        self.log.append(NodeChanged(facts) if node_id in self.state.nodes else NodeJoined(facts))

    # ------------------------------------------------------------------------------------------------------ membership

    def _member(self, event: MemberEvent) -> None:
        if isinstance(event, Conflict):
            self._on_conflict(
                ConfigError(
                    f"Another process has this node's id {event.node_id} ({', '.join(event.endpoints) or 'unknown'}). "
                    "A data folder was copied: remove the file node_id from this one, and start again."
                )
            )
        elif isinstance(event, Left):
            known = self.state.nodes.get(event.node_id)
            if known is None or known.life == event.life:
                self.log.append(NodeLeft(event.node_id, event.reason))
                self._on_left(event.node_id)
        else:
            self._keep_up(event)
        if not isinstance(event, Heard):
            self.facts.spread(1 + len(self.membership.roster.joined))

    def _keep_up(self, event: Joined | Heard) -> None:
        if isinstance(event, Joined):
            self._transport.appeared(event.node_id)
        known = self.state.nodes.get(event.node_id)
        sequence = msgspec.msgpack.decode(event.payload, type=int)
        current = known is not None and known.life == event.life and known.sequence >= sequence
        if not current and event.node_id not in self._fetching:
            task = asyncio.create_task(self._fetch(event.node_id, event.life), name=f"facts of {event.node_id}")
            self._fetching[event.node_id] = task
            task.add_done_callback(lambda _: self._fetching.pop(event.node_id, None))

    async def _fetch(self, node_id: str, life: str) -> None:
        pause = FIRST_PAUSE
        while (beat := self.membership.beat_of(node_id)) is not None and beat.life == life:
            try:
                facts = await self.bus.ask(node_id, FACTS, b"", deadline=ASK_SECONDS)
                beat = self.membership.beat_of(node_id)
                if beat is not None and beat.life == life:  # it may have left while it answered
                    self._learn(node_id, life, facts)
                return
            except TandemError as error:
                logger.info("Node %s did not tell its facts yet: %s", node_id, error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, ASK_SECONDS)

    def _changed(self, entries: list[Entry]) -> None:
        self.log.append_intents(entries)


class BusTransport:
    """Carries the intents' messages over the bus; see `transport.Transport`."""

    def __init__(self, bus: Bus, membership: Membership) -> None:
        self._bus = bus
        self._membership = membership
        self._receiver: Receiver | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen and answer."""
        changes = await self._bus.subscribe(CHANGES)
        await self._bus.serve(COMPARE, self._answer)
        self._task = background(self._listen(changes), "intents of others")

    async def stop(self) -> None:
        """Listen no more."""
        if self._task is not None:
            await cancelled(self._task)

    def attach(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def nodes(self) -> Sequence[str]:
        return list(self._membership.alive)

    def appeared(self, node_id: str) -> None:
        """A node joined."""
        if self._receiver is not None:
            self._receiver.on_node(node_id)

    async def publish(self, message: bytes, deadline: float) -> None:
        self._bus.publish(CHANGES, message)

    async def ask(self, node_id: str, message: bytes, deadline: float) -> bytes:
        return await self._bus.ask(node_id, COMPARE, message, deadline=deadline)

    async def _answer(self, question: Question) -> bytes:
        if self._receiver is None:
            raise UnavailableError("This node is not ready to compare intents yet.", retry_after=0.5)
        return await self._receiver.on_ask(question.payload)

    async def _listen(self, changes: Subscription) -> None:
        async for message in changes:
            if self._receiver is not None and len(message.payload) <= LARGEST_MESSAGE:
                await self._receiver.on_changes(message.payload)
