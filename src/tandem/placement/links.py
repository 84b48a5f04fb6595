"""Links between instances: which are sound, whom they let prefill for whom, and which the cluster makes by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tandem.errors import InvalidRequestError, NotFoundError
from tandem.placement.addresses import addresses, with_port
from tandem.placement.roles import health, prefill_only, single_runner
from tandem.placement.routing import base_model
from tandem.placement.world import World
from tandem.types.facts import RunnerFact
from tandem.types.intents import InstanceIntent, LinkIntent

WORTH_LINKING = 1.5
"""An automatic link needs a prefill rate so many times that of the instance it helps."""
WORTH_KEEPING = 1.2
"""It goes when the rate falls below this: between the two it stays as it is, so that links do not flicker."""
FaultKind: TypeAlias = Literal["empty", "itself", "unknown", "sharded", "model", "quantisation", "cache"]


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Why a link cannot be, and what to do."""

    kind: FaultKind
    message: str


def link_fault(link: LinkIntent, world: World) -> LinkFault | None:
    """The first thing that is wrong with a link; None if it is sound as far as is known now.

    What only loaded runners can tell (tokenizer, cache layout) is checked where both sides are loaded, again in
    `prefill_peers`, and at last by the two runners themselves.
    """
    for side, members in (("prefill", link.prefill_instances), ("decode", link.decode_instances)):
        if not members:
            return LinkFault("empty", f"The link has no {side} instance. Name at least one on each side.")
    both = sorted(set(link.prefill_instances) & set(link.decode_instances))
    if both:
        return LinkFault("itself", f"{both[0]} is on both sides of the link: an instance cannot prefill for itself.")
    for instance_id in (*link.prefill_instances, *link.decode_instances):
        if instance_id not in world.instances:
            return LinkFault("unknown", f"There is no instance {instance_id}. GET /state lists them.")
    for prefill_id in link.prefill_instances:
        for decode_id in link.decode_instances:
            fault = pair_fault(world.instances[prefill_id], world.instances[decode_id], world, link.allow_quantisation)
            if fault is not None:
                return fault
    return None


def check_link(link: LinkIntent, world: World) -> None:
    """Refuse a link that cannot be.

    Raises:
        NotFoundError: one of its instances does not exist.
        InvalidRequestError: anything else is wrong with it.
    """
    fault = link_fault(link, world)
    if fault is not None:
        raise (NotFoundError if fault.kind == "unknown" else InvalidRequestError)(fault.message)


def pair_fault(
    prefill: InstanceIntent, decode: InstanceIntent, world: World, allow_quantisation: bool
) -> LinkFault | None:
    """Why one instance cannot prefill for another; None if it can, as far as is known."""
    ids = f"{prefill.instance_id} and {decode.instance_id}"
    for instance in (prefill, decode):
        if len(instance.shards) > 1:
            message = f"{instance.instance_id} runs on several nodes: hand-offs with such come in a later version."
            return LinkFault("sharded", message)
    if base_model(prefill) != base_model(decode):
        return LinkFault(
            "model",
            f"{ids} run different models ({prefill.model_id}, {decode.model_id}). Link instances of one base model.",
        )
    known = _quantisation(prefill), _quantisation(decode)
    differs = known[0] != known[1] if None not in known else prefill.model_id.casefold() != decode.model_id.casefold()
    if differs and not allow_quantisation:
        names = [value or model for value, model in zip(known, (prefill.model_id, decode.model_id), strict=True)]
        return LinkFault(
            "quantisation",
            f"{ids} differ in quantisation ({names[0]}, {names[1]}): answers would not be token for token the same. "
            "Set allow_quantisation to permit that.",
        )
    here, there = single_runner(prefill, world), single_runner(decode, world)
    if here is None or there is None:
        return None
    return _cache_fault(ids, here[1], there[1])


def _quantisation(instance: InstanceIntent) -> str | None:
    value = instance.card.get("quantization")
    return value.casefold() if isinstance(value, str) and value else None


def _cache_fault(ids: str, one: RunnerFact, other: RunnerFact) -> LinkFault | None:
    for word, mine, theirs in (
        ("tokenizers", one.tokenizer, other.tokenizer),
        ("cache layouts", one.layout, other.layout),
        ("model fingerprints", one.fingerprint, other.fingerprint),
    ):
        if mine and theirs and mine != theirs:
            detail = f"({mine[:12]}, {theirs[:12]})"
            return LinkFault("cache", f"{ids} have different {word} {detail}. Load both from the same model files.")
    return None


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """A runner that may prefill.

    Attributes:
        addresses: `host:port` of its KV port, the one to try first in front.
        allow_quantisation: a link permits that its weights are quantised differently.
    """

    instance_id: str
    node_id: str
    runner_id: str
    addresses: tuple[str, ...]
    allow_quantisation: bool = False


@dataclass(frozen=True, slots=True)
class PrefillPeers:
    """Who may prefill for an instance now, and why the other instances of its links may not."""

    peers: tuple[PrefillPeer, ...]
    excluded: dict[str, str]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The first address of each."""
        return tuple(peer.addresses[0] for peer in self.peers)


def prefill_peers(instance_id: str, world: World) -> PrefillPeers:
    """Whom the links let prefill for an instance, by its node's addresses and measurements. Sorted by instance."""
    decode = world.instances.get(instance_id)
    me = world.nodes.get(decode.shards[0].node_id) if decode is not None and decode.shards else None
    if decode is None or me is None:
        return PrefillPeers((), {})
    allowed: dict[str, bool] = {}
    for link in world.links.values():
        if instance_id in link.decode_instances:
            for other in link.prefill_instances:
                allowed[other] = allowed.get(other, False) or link.allow_quantisation
    allowed.pop(instance_id, None)
    peers: list[PrefillPeer] = []
    excluded: dict[str, str] = {}
    for other in sorted(allowed):
        prefill = world.instances.get(other)
        if prefill is None:
            excluded[other] = "It does not exist any more."
            continue
        fault = pair_fault(prefill, decode, world, allowed[other])
        place = single_runner(prefill, world)
        if fault is not None:
            excluded[other] = fault.message
        elif place is None or health(prefill, world) != "ready":
            excluded[other] = f"It is {health(prefill, world)}."
        elif (port := place[1].kv_port) is None:
            excluded[other] = "It opens no KV port. Set TANDEM_KV_PORT on its node."
        else:
            node, runner = place
            found = tuple(with_port(address, port) for address in addresses(node, me, me.links))
            if found:
                peers.append(PrefillPeer(other, node.node_id, runner.runner_id, found, allowed[other]))
            else:
                excluded[other] = "Its node has no address that this one can use."
    return PrefillPeers(tuple(peers), excluded)


def automatic_links(world: World) -> tuple[LinkIntent, ...]:
    """The links that the cluster should have of its own, one for each instance that is helped. All nodes find the same.

    An instance P gets to prefill for D if both are ready, run on different nodes, have the same model in the same
    quantisation and no known difference, and P reads prompts 1.5 times as fast as D (1.2 times, to keep a link). A
    rate that is not measured counts as fast enough: no prompt goes there before it is, as hand-offs are decided by
    predicted times. An instance that a person linked on its decode side, or made prefill-only, is left alone.
    """
    taken = {decode for link in world.links.values() if not link.automatic for decode in link.decode_instances}
    taken |= prefill_only(world)
    existing = {
        (prefill, decode)
        for link in world.links.values()
        if link.automatic
        for prefill in link.prefill_instances
        for decode in link.decode_instances
    }
    ready = [
        world.instances[instance_id]
        for instance_id in sorted(world.instances)
        if len(world.instances[instance_id].shards) == 1 and health(world.instances[instance_id], world) == "ready"
    ]
    links = []
    for decode in ready:
        if decode.instance_id in taken:
            continue
        helpers = tuple(
            prefill.instance_id
            for prefill in ready
            if _worth_it(prefill, decode, world, (prefill.instance_id, decode.instance_id) in existing)
        )
        if helpers:
            links.append(LinkIntent(f"auto-{decode.instance_id}", helpers, (decode.instance_id,), automatic=True))
    return tuple(links)


def _worth_it(prefill: InstanceIntent, decode: InstanceIntent, world: World, exists: bool) -> bool:
    here, there = single_runner(prefill, world), single_runner(decode, world)
    if here is None or there is None or here[0].node_id == there[0].node_id or here[1].kv_port is None:
        return False
    if pair_fault(prefill, decode, world, allow_quantisation=False) is not None:
        return False
    fast, slow = _prefill_rate(here[1]), _prefill_rate(there[1])
    if fast is None or slow is None:
        return True
    return fast >= slow * (WORTH_KEEPING if exists else WORTH_LINKING)


def _prefill_rate(runner: RunnerFact) -> float | None:
    load = runner.load
    # Until it has answered once, an engine's prefill rate is its first guess.
    return load.prefill_tps if load is not None and load.decode_tps > 0 and load.prefill_tps > 0 else None
