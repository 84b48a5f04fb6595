"""What people ask of the cluster: instances, links and custom cards, checked before they become intents."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable

import msgspec

from tandem.cluster.control import ControlPlane
from tandem.errors import DeadlineError, InvalidRequestError, NotFoundError
from tandem.models.cards import ModelCard, plain_card
from tandem.placement.links import check_link
from tandem.placement.plan import PlacementRequest, over_several, place
from tandem.placement.preview import Preview, previews
from tandem.placement.world import World
from tandem.types.intents import CardIntent, InstanceIntent, LinkIntent


class Commands:
    """Every method answers when the outcome is known on this node, and says no with a reason. Nodes that are away hear
    of it when they are back.

    Args:
        world: the cluster as it is known now.
    """

    def __init__(self, control: ControlPlane, world: Callable[[], World]) -> None:
        self._control = control
        self._world = world
        self._planning = asyncio.Lock()

    async def place(
        self, request: PlacementRequest, *, instance_id: str | None = None, runner_id: str | None = None
    ) -> InstanceIntent:
        """Plan an instance and have the cluster run it.

        Args:
            instance_id, runner_id: of the new instance and its runner; None makes them up.

        Raises:
            PlacementError: it does not fit the cluster as it is now (409).
            UnplaceableError: it cannot work whatever the state is (422).
            InvalidRequestError: the instance's id is taken.
        """
        name = instance_id or str(uuid.uuid4())
        # One after another: each plan has to see what the one before has taken.
        async with self._planning:
            intent = await asyncio.to_thread(place, request, self._world(), name, launch=True, created=time.time())
        if runner_id is not None:
            [shard] = intent.shards
            intent = msgspec.structs.replace(intent, shards=(msgspec.structs.replace(shard, runner_id=runner_id),))
        # Known here before it waits for the disk, and so before the next plan begins.
        return await self.create(intent)

    async def create(self, intent: InstanceIntent) -> InstanceIntent:
        """Have the cluster run this instance. Its nodes begin when they hear of it.

        Raises:
            InvalidRequestError: it has no shards, or on several nodes, or its id is taken.
            NotFoundError: a node of it is not there.
            PayloadTooLargeError: it cannot travel.
        """
        if len(intent.shards) != 1:
            raise InvalidRequestError(
                f"The instance has {len(intent.shards)} shards; {over_several(intent.meta)}. Place it on one node.",
                param="instance",
            )
        missing = [shard.node_id for shard in intent.shards if shard.node_id not in self._control.state.nodes]
        if missing:
            raise NotFoundError(f"There is no node {missing[0]}. GET /state lists the nodes.", param="instance")
        if intent.instance_id in self._control.state.instances:
            raise InvalidRequestError(f"There is an instance {intent.instance_id} already.", param="instance")
        await self._control.intents.put(intent)
        return intent

    async def remove(self, instance_id: str) -> InstanceIntent:
        """Have the cluster stop this instance, wherever it runs.

        Raises:
            NotFoundError: there is no such instance.
        """
        intent = self._control.state.instances.get(instance_id)
        if intent is None:
            raise NotFoundError(f"There is no instance {instance_id}. GET /health lists them.")
        await self._control.intents.remove(f"instance/{instance_id}")
        return intent

    def previews(self, card: ModelCard, node_ids: Iterable[str] = (), *, reference: str = "") -> list[Preview]:
        """Every way in which a model could be placed now. Some milliseconds: call it off the event loop."""
        return previews(card, self._world(), node_ids, identify=lambda: str(uuid.uuid4()), reference=reference)

    async def link(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        *,
        link_id: str | None = None,
        allow_quantisation: bool = False,
    ) -> LinkIntent:
        """Let instances prefill for others; replaces the link of that id.

        Raises:
            NotFoundError: one of the instances is not there.
            InvalidRequestError: they cannot be linked; the message says why.
        """
        link = LinkIntent(
            link_id or str(uuid.uuid4()),
            tuple(dict.fromkeys(prefill)),
            tuple(dict.fromkeys(decode)),
            allow_quantisation,
        )
        check_link(link, self._world())
        await self._control.intents.put(link)
        return link

    async def unlink(self, link_id: str) -> LinkIntent:
        """Remove a link.

        Raises:
            NotFoundError: there is no such link.
            InvalidRequestError: the cluster made it, and would make it again.
        """
        link = self._world().links.get(link_id) or self._control.state.links.get(link_id)
        if link is None:
            raise NotFoundError(f"There is no link {link_id}. GET /v1/instance-links lists them.")
        if link.automatic:
            raise InvalidRequestError(
                f"The cluster made the link {link_id} by itself. Link its decode instance otherwise, or set "
                "TANDEM_AUTOMATIC_LINKS=false."
            )
        await self._control.intents.remove(f"link/{link_id}")
        return link

    async def add_card(self, card: ModelCard) -> CardIntent:
        """Make a custom model card known to the whole cluster."""
        intent = CardIntent(card.model_id, plain_card(card))
        await self._control.intents.put(intent)
        return intent

    async def remove_card(self, model_id: str) -> CardIntent:
        """Remove a custom card everywhere.

        Raises:
            NotFoundError: there is no custom card of that id.
        """
        card = self._control.state.cards.get(model_id)
        if card is None:
            raise NotFoundError(f"{model_id} has no custom card in this cluster.")
        await self._control.intents.remove(f"card/{model_id}")
        return card

    async def settled(self, instance_id: str, deadline: float) -> InstanceIntent:
        """Wait until an instance is known here.

        Raises:
            DeadlineError: it is not after `deadline` seconds.
        """
        try:
            async with asyncio.timeout(deadline), self._control.log.subscribe() as events:
                while (intent := self._control.state.instances.get(instance_id)) is None:
                    await anext(events)
                return intent
        except TimeoutError as error:
            raise DeadlineError(f"There is no instance {instance_id} after {deadline:g} s.") from error
