"""Whom the instances of this machine may have prompts prefilled by: those that were named, and those of links."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tandem.cluster.instances import LocalInstances
from tandem.config import Settings, parse_addresses
from tandem.engines.base import PrefillPort
from tandem.errors import TandemError
from tandem.placement.links import prefill_peers
from tandem.placement.world import World

logger = logging.getLogger("tandem.cluster")


class Peering:
    """Keeps every local instance's prefill peers as settings, the API and links say."""

    def __init__(self, settings: Settings, local: LocalInstances) -> None:
        self._default = parse_addresses(settings.prefill_peers.split(","))
        self._local = local
        self._named: dict[str, tuple[str, ...]] = {}
        self._refused: dict[str, tuple[PrefillPort, ...]] = {}

    def name(self, instance_id: str, addresses: Iterable[str]) -> None:
        """Use these instead of the settings' for one instance, beside those of links.

        Raises:
            NotFoundError: it does not run here.
            InvalidRequestError: an address cannot be used.
        """
        self._named[instance_id] = self._local.check_peers(instance_id, addresses)

    def named(self, instance_id: str) -> tuple[str, ...]:
        """Those that were named for an instance: by the API, else when it was launched, else by the settings."""
        launched = self._local.get(instance_id).launched_with.get("prefill_peers", self._default)
        return self._named.get(instance_id, tuple(launched))

    def apply(self, world: World) -> None:
        """Tell every instance whose peers have changed."""
        there = {instance.instance_id for instance in self._local}
        for gone in self._named.keys() - there:
            del self._named[gone]
        for instance_id in there:
            peers = self._peers(instance_id, world)
            try:
                self._local.name_peers(instance_id, peers)
            except TandemError as error:
                # One address that cannot be used must not keep the cluster from being followed.
                if self._refused.get(instance_id) != peers:
                    logger.error("prefill peers of instance %s: %s", instance_id, error.message)
                self._refused[instance_id] = peers

    def _peers(self, instance_id: str, world: World) -> tuple[PrefillPort, ...]:
        """Those that were named, which get no other weights, and those of links, which may allow them."""
        allowed = dict.fromkeys(self.named(instance_id), False)
        for peer in prefill_peers(instance_id, world).peers:
            address = peer.addresses[0]
            allowed[address] = allowed.get(address, False) or peer.allow_quantisation
        return tuple(PrefillPort(address, allow) for address, allow in allowed.items())
