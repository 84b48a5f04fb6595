"""Instances, shards and model cards in exo's form, out and in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from tandem.api.exo_names import ById, memory, snake
from tandem.errors import InvalidRequestError
from tandem.models.cards import ModelCard, plain_card
from tandem.placement.world import card_of
from tandem.types.intents import InstanceIntent, InstanceMeta, Shard, Sharding

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED = frozenset({"placement", "previews", "await"})
"""Ids that `GET /instance/{instance_id}` could not tell from other routes."""
_METAS: dict[str, InstanceMeta] = {
    "MlxRingInstance": "MlxRing",
    "MlxJacclInstance": "MlxJaccl",
    "VllmInstance": "Vllm",
    "SimInstance": "Sim",
}
_SHARDINGS: dict[str, Sharding] = {"PipelineShardMetadata": "Pipeline", "TensorShardMetadata": "Tensor"}


def card_json(card: ModelCard) -> dict[str, Any]:
    """A model card with exo's fields."""
    plain = card.model_dump(mode="json")
    plain["storage_size"] = memory(card.storage_size)
    return {**plain, "components": None, "uses_cfg": False}


def raw_card_json(card: Mapping[str, Any]) -> dict[str, Any]:
    """A card that this version may not be able to read."""
    plain = dict(card)
    if isinstance(plain.get("storage_size"), int):
        plain["storage_size"] = memory(plain["storage_size"])
    return plain


def shard_json(card: dict[str, Any], shard: Shard, sharding: Sharding, layers: int) -> dict[str, Any]:
    """One shard, tagged with how its instance is split.

    Args:
        card: in exo's form.
        layers: of the whole model.
    """
    fields = {
        "model_card": card,
        "device_rank": shard.rank,
        "world_size": shard.world,
        "start_layer": shard.start_layer,
        "end_layer": shard.end_layer,
        "n_layers": layers,
        "immediate_exception": False,
        "should_timeout": None,
    }
    return {f"{sharding}ShardMetadata": fields}


def instance_json(intent: InstanceIntent) -> dict[str, Any]:
    """An instance as exo tags it. `reference`, `options` and `created` are ours: so it can be sent back whole."""
    known = card_of(intent)
    card = raw_card_json(intent.card) if known is None else card_json(known)
    layers = max((shard.end_layer for shard in intent.shards), default=0) if known is None else known.n_layers
    fields: dict[str, Any] = {
        "instance_id": intent.instance_id,
        "shard_assignments": {
            "model_id": intent.model_id,
            "runner_to_shard": ById(
                {shard.runner_id: shard_json(card, shard, intent.sharding, layers) for shard in intent.shards}
            ),
            "node_to_runner": ById({shard.node_id: shard.runner_id for shard in intent.shards}),
        },
    }
    if intent.meta == "MlxRing":
        # Ports of a ring are chosen when it starts; an instance on one node has none.
        fields |= {"hosts_by_node": ById(), "ephemeral_port": 0}
    elif intent.meta == "MlxJaccl":
        fields |= {"jaccl_devices": [], "jaccl_coordinators": ById()}
    fields |= {"reference": intent.reference, "options": ById(intent.options), "created": intent.created}
    return {f"{intent.meta}Instance": fields}


class _Exo(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", protected_namespaces=())


def _untagged(value: Any, tags: Mapping[str, str]) -> Any:
    """`{"Tag": {...}}` as `{..., "tag": "Tag"}`."""
    if isinstance(value, dict) and len(value) == 1:
        [(tag, fields)] = value.items()
        if tag in tags and isinstance(fields, dict):
            return {**fields, "tag": tag}
        if tag[:1].isupper():
            raise ValueError(f"the tag {tag} is unknown: use one of {', '.join(tags)}")
    return value


class ShardBody(_Exo):
    """`PipelineShardMetadata` or `TensorShardMetadata`, tagged or bare."""

    tag: str = Field("PipelineShardMetadata", exclude=True)
    model_card: dict[str, Any]
    device_rank: int = Field(0, ge=0)
    world_size: int = Field(1, ge=1)
    start_layer: int = Field(0, ge=0)
    end_layer: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _untag(cls, value: Any) -> Any:
        return _untagged(value, _SHARDINGS)


class AssignmentsBody(_Exo):
    """Which runner has which shard, on which node."""

    model_id: str = Field(min_length=1)
    runner_to_shard: dict[str, ShardBody] = Field(min_length=1)
    node_to_runner: dict[str, str] = Field(min_length=1)


class InstanceOptions(BaseModel):
    """Settings of one instance. Clients may choose these and no other ones: the rest belongs to the nodes."""

    model_config = ConfigDict(extra="forbid")

    context_length: int = Field(0, ge=0, le=1 << 31)
    cache_bytes: int = Field(0, ge=0, le=1 << 50)


class InstanceBody(_Exo):
    """`MlxRingInstance`, `MlxJacclInstance`, `VllmInstance` or `SimInstance`, tagged or bare."""

    tag: str = Field("MlxRingInstance", exclude=True)
    instance_id: str
    shard_assignments: AssignmentsBody
    reference: str | None = None
    options: InstanceOptions = Field(default_factory=lambda: InstanceOptions())

    @model_validator(mode="before")
    @classmethod
    def _untag(cls, value: Any) -> Any:
        return _untagged(value, _METAS)


def read_card(value: Mapping[str, Any]) -> ModelCard:
    """A model card in exo's form, or in ours.

    Raises:
        InvalidRequestError: it is none; the message names the field.
    """
    plain = {name: item for name, item in snake(dict(value)).items() if name in ModelCard.model_fields}
    try:
        return ModelCard.model_validate({name: item for name, item in plain.items() if item is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"The model card's `{name}`: {first['msg']}.", param="instance") from error


def read_instance(body: InstanceBody) -> tuple[InstanceIntent, ModelCard]:
    """The intent that an instance in exo's form stands for, and its card.

    Raises:
        InvalidRequestError: ids, ranks, layers and nodes do not fit together.
    """
    shards = body.shard_assignments.runner_to_shard
    nodes = {runner: node for node, runner in body.shard_assignments.node_to_runner.items()}
    for name in (body.instance_id, *shards):
        if not IDENTIFIER.fullmatch(name):
            raise _wrong(f"'{name[:80]}' cannot be an id: use up to 128 letters, digits, '.', '_' and '-'.")
    if body.instance_id in RESERVED:
        raise _wrong(f"'{body.instance_id}' cannot be an instance's id: a route has that name.")
    if nodes.keys() != shards.keys() or len(nodes) != len(body.shard_assignments.node_to_runner):
        raise _wrong("nodeToRunner and runnerToShard have to name the same runners, each on one node.")
    cards = [read_card(shard.model_card) for shard in shards.values()]
    card = cards[0]
    if any(other != card for other in cards) or card.model_id != body.shard_assignments.model_id:
        raise _wrong("All shards need the same modelCard, and its modelId has to be that of shardAssignments.")
    [tag, *others] = {shard.tag for shard in shards.values()}
    if others:
        raise _wrong("All shards have to be split in the same way.")
    sharding = _SHARDINGS[tag]
    placed = [
        Shard(nodes[runner], runner, shard.device_rank, shard.world_size, shard.start_layer, shard.end_layer)
        for runner, shard in shards.items()
    ]
    placed.sort(key=lambda shard: shard.rank)
    if [(shard.rank, shard.world) for shard in placed] != [(rank, len(placed)) for rank in range(len(placed))]:
        raise _wrong(f"{len(placed)} shards need the deviceRanks 0 to {len(placed) - 1}, and worldSize {len(placed)}.")
    _check_layers(placed, sharding, card)
    intent = InstanceIntent(
        instance_id=body.instance_id,
        model_id=card.model_id,
        reference=body.reference or card.model_id,
        meta=_METAS[body.tag],
        sharding=sharding,
        shards=tuple(placed),
        card=plain_card(card),
        options=body.options.model_dump(exclude_defaults=True),
    )
    return intent, card


def _check_layers(shards: list[Shard], sharding: Sharding, card: ModelCard) -> None:
    end = 0
    for shard in shards:
        whole = sharding == "Tensor" and (shard.start_layer, shard.end_layer) == (0, card.n_layers)
        if not whole and (shard.start_layer != end or shard.end_layer <= shard.start_layer):
            raise _wrong(f"The shards have to cover the layers 0 to {card.n_layers} in the order of their ranks.")
        end = shard.end_layer
    if end != card.n_layers:
        raise _wrong(f"The shards cover {end} of {card.n_layers} layers.")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="instance")
