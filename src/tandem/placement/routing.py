"""Which instance answers a request, and how to reach its node. Pure: no clock, no chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias

from tandem.errors import (
    InstanceNotReadyError,
    NotFoundError,
    PlacementError,
    TandemError,
    UnavailableError,
)
from tandem.placement.addresses import addresses, with_port
from tandem.placement.roles import health, prefill_only, trouble
from tandem.placement.world import World, card_of, leader
from tandem.types.intents import InstanceIntent

__all__ = ["Asked", "Refused", "Route", "addresses", "choose", "with_port"]

Reason: TypeAlias = Literal["no_such_model", "loading", "dead", "prefill_only"]

USUAL_ANSWER = 256
"""Tokens that an answer is taken to have, for comparing instances."""
USUAL_PREFILL_TPS, USUAL_DECODE_TPS = 500.0, 25.0
"""Speeds of an instance that none of its rivals' measurements tells anything about."""
SAME_SHARE = 1.05
"""Instances within this factor of the best expected time are equal: small differences are noise."""
RETRY_AFTER = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as the choice depends on it.

    Attributes:
        model: id or alias; `default` when exactly one model is served.
        request_id: spreads equal choices; the same id always chooses the same.
        prompt_tokens: 0 if not known yet.
        held: leading prompt tokens that an instance's prefix cache has, by instance, where known.
        pending: requests that this node sent to an instance and that its facts do not show yet.
        avoid: instances that this request failed on already.
    """

    model: str
    request_id: str = ""
    prompt_tokens: int = 0
    held: Mapping[str, int] | None = None
    pending: Mapping[str, int] | None = None
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen instance, the runner that takes its requests, and the seconds that its answer is expected to take."""

    instance_id: str
    node_id: str
    runner_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Why nobody can answer."""

    reason: Reason
    message: str

    def error(self) -> TandemError:
        """404 no such model, 503 loading (with `retry_after`) or dead, 409 prefill-only."""
        if self.reason == "no_such_model":
            return NotFoundError(self.message, param="model")
        if self.reason == "loading":
            return InstanceNotReadyError(self.message, retry_after=RETRY_AFTER)
        if self.reason == "prefill_only":
            return PlacementError(self.message, param="model")
        return UnavailableError(self.message)


def choose(asked: Asked, world: World) -> Route | Refused:
    """The instance with the least expected time; among equal ones the request's id decides, which spreads load.

    Candidates are the model's own instances. If all of these only prefill, the instances that they prefill for answer
    in their place where the link permits another quantisation of the same base model.
    """
    own = _named(asked.model, world)
    if not own:
        served = ", ".join(sorted({instance.model_id for instance in world.instances.values()})) or "no model at all"
        message = f"No instance serves the model '{asked.model}'. This cluster serves {served}."
        return Refused("no_such_model", message)
    helpers = prefill_only(world)
    answering = [instance for instance in own if instance.instance_id not in helpers]
    candidates = answering or _stand_ins(own, world, helpers)
    if not candidates:
        return Refused(
            "prefill_only",
            f"Every instance of {own[0].model_id} only prefills for others. Ask for the model that its links lead to, "
            "or remove the link.",
        )
    ready = [
        instance
        for instance in candidates
        if instance.instance_id not in asked.avoid and health(instance, world) == "ready"
    ]
    if not ready:
        return _not_ready(candidates, world, asked)
    return _least_expected(ready, world, asked)


def _named(model: str, world: World) -> list[InstanceIntent]:
    wanted = model.casefold()
    instances = [world.instances[instance_id] for instance_id in sorted(world.instances)]
    if wanted == "default" and len({instance.model_id.casefold() for instance in instances}) == 1:
        return instances
    found = [instance for instance in instances if instance.model_id.casefold() == wanted]
    if found:
        return found
    cards = [(instance, card_of(instance)) for instance in instances]
    return [instance for instance, card in cards if card is not None and wanted in card.names]


def base_model(instance: InstanceIntent) -> str:
    """What an instance's model is a quantisation of; its own id where the card does not say."""
    named = instance.card.get("base_model")
    return (named if isinstance(named, str) and named else instance.model_id).casefold()


def _stand_ins(own: Sequence[InstanceIntent], world: World, helpers: frozenset[str]) -> list[InstanceIntent]:
    mine = {instance.instance_id for instance in own}
    bases = {base_model(instance) for instance in own}
    linked = {
        instance_id
        for link in world.links.values()
        if link.allow_quantisation and not mine.isdisjoint(link.prefill_instances)
        for instance_id in link.decode_instances
    }
    return [
        world.instances[instance_id]
        for instance_id in sorted(linked - helpers)
        if instance_id in world.instances and base_model(world.instances[instance_id]) in bases
    ]


def _not_ready(candidates: Sequence[InstanceIntent], world: World, asked: Asked) -> Refused:
    model_id = candidates[0].model_id
    left = [instance for instance in candidates if instance.instance_id not in asked.avoid]
    if any(health(instance, world) == "loading" for instance in left):
        return Refused("loading", f"{model_id} is being loaded. Ask again in some seconds.")
    if not left:
        return Refused("dead", f"Every instance of {model_id} failed at this request. Look at their logs.")
    reasons = "; ".join(f"{instance.instance_id}: {trouble(instance, world)}" for instance in left)
    return Refused("dead", f"No instance of {model_id} can answer ({reasons}). Remove it and place it again.")


def _least_expected(ready: Sequence[InstanceIntent], world: World, asked: Asked) -> Route:
    speeds = {instance.instance_id: _speeds(instance, world) for instance in ready}
    prefill = _average([pair[0] for pair in speeds.values()], USUAL_PREFILL_TPS)
    decode = _average([pair[1] for pair in speeds.values()], USUAL_DECODE_TPS)
    routes = []
    for instance in ready:
        shard = leader(instance)
        assert shard is not None  # an instance without shards is dead
        runner = world.runner(shard)
        queue = (runner.running if runner is not None else 0) + (asked.pending or {}).get(instance.instance_id, 0)
        prefill_tps, decode_tps = speeds[instance.instance_id]
        missing = max(0, asked.prompt_tokens - (asked.held or {}).get(instance.instance_id, 0))
        seconds = (queue + 1) * USUAL_ANSWER / (decode_tps or decode) + missing / (prefill_tps or prefill)
        routes.append(Route(instance.instance_id, shard.node_id, shard.runner_id, seconds))
    best = min(route.seconds for route in routes)
    equal = [route for route in routes if route.seconds <= best * SAME_SHARE]
    return min(equal, key=lambda route: _draw(asked.request_id, route.instance_id))


def _speeds(instance: InstanceIntent, world: World) -> tuple[float, float]:
    """Measured prefill and decode tokens per second; 0 where nothing was measured."""
    shard = leader(instance)
    runner = world.runner(shard) if shard is not None else None
    load = runner.load if runner is not None else None
    if load is None or load.decode_tps <= 0:
        return 0.0, 0.0  # a prefill rate without one answer is the engine's first guess
    return load.prefill_tps, load.decode_tps


def _average(values: Sequence[float], usual: float) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else usual


def _draw(request_id: str, instance_id: str) -> bytes:
    return blake2b(f"{request_id}\0{instance_id}".encode(), digest_size=8).digest()
