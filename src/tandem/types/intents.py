"""What users asked the cluster for. Every node keeps all of it; see `cluster/intents.py` for how copies agree."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

InstanceMeta: TypeAlias = Literal["MlxRing", "MlxJaccl", "Vllm", "Sim"]
"""How an instance runs: the first two are exo's names for MLX over sockets and over RDMA."""
Sharding: TypeAlias = Literal["Pipeline", "Tensor"]


class Stamp(msgspec.Struct, frozen=True, order=True, array_like=True):
    """When something was asked for, by a hybrid logical clock: unix milliseconds, a counter within them, and who.

    Stamps are totally ordered, and no two are equal.
    """

    wall: int
    counter: int
    node_id: str


class Shard(msgspec.Struct, frozen=True):
    """One node's part of an instance: the layers `[start_layer, end_layer)`, as rank `rank` of `world`."""

    node_id: str
    runner_id: str
    rank: int = 0
    world: int = 1
    start_layer: int = 0
    end_layer: int = 0


class InstanceIntent(msgspec.Struct, frozen=True, tag="instance"):
    """One loaded copy of a model that should run.

    Attributes:
        reference: what a node obtains the model by: an id, or `sim:...`.
        card: the model card as plain data, so that nodes without the card can plan with it.
        options: settings of this instance that differ from its nodes' own, e.g. `context_length`.
        created: unix seconds, for people.
        bound: named on the command line of the node's `tandem up`, and gone with it.
    """

    instance_id: str
    model_id: str
    reference: str
    meta: InstanceMeta
    sharding: Sharding
    shards: tuple[Shard, ...]
    card: dict[str, Any]
    options: dict[str, Any] = {}
    created: float = 0.0
    bound: bool = False


class LinkIntent(msgspec.Struct, frozen=True, tag="link"):
    """These instances prefill for those.

    Attributes:
        allow_quantisation: the two sides' weights may be quantised differently.
        automatic: made by the cluster itself, and removed by it.
    """

    link_id: str
    prefill_instances: tuple[str, ...]
    decode_instances: tuple[str, ...]
    allow_quantisation: bool = False
    automatic: bool = False


class CardIntent(msgspec.Struct, frozen=True, tag="card"):
    """A custom model card."""

    model_id: str
    card: dict[str, Any]


Intent: TypeAlias = InstanceIntent | LinkIntent | CardIntent


class Entry(msgspec.Struct, frozen=True):
    """One key of the intent map: its newest value, or None for a tombstone.

    Keys are `instance/<id>`, `link/<id>` and `card/<model id>`.
    """

    key: str
    value: Intent | None
    stamp: Stamp


def key_of(intent: Intent) -> str:
    """The key that an intent is kept under."""
    if isinstance(intent, InstanceIntent):
        return f"instance/{intent.instance_id}"
    if isinstance(intent, LinkIntent):
        return f"link/{intent.link_id}"
    return f"card/{intent.model_id}"
