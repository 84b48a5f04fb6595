"""What the replica of the intents needs of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Receiver(Protocol):
    """What a transport calls, on the event loop of the replica."""

    async def on_changes(self, message: bytes) -> None:
        """A node published this. Never raises because of what is in it."""

    async def on_ask(self, message: bytes) -> bytes:
        """A node asks this; the answer. Never raises because of what is in it."""

    def on_node(self, node_id: str) -> None:
        """A node appeared, or came back. More often than needed is harmless."""


class Transport(Protocol):
    """Carries opaque messages between the replicas of one cluster.

    What is published may be lost, repeated and reordered; what is asked may be answered too late. Messages keep within
    `exchange.LARGEST_MESSAGE` bytes, and nearly always within `exchange.MESSAGE_BYTES`.
    """

    def attach(self, receiver: Receiver) -> None:
        """Call `receiver` from now on."""

    def nodes(self) -> Sequence[str]:
        """Ids of the other nodes that seem to be there."""

    async def publish(self, message: bytes, deadline: float) -> None:
        """Send to every other node.

        Args:
            deadline: seconds.

        Raises:
            TandemError: it did not get out.
        """

    async def ask(self, node_id: str, message: bytes, deadline: float) -> bytes:
        """Send to one node and wait for its answer.

        Args:
            deadline: seconds, for both ways together.

        Raises:
            UnavailableError: the node is not there.
            DeadlineError: it did not answer in time.
        """
