"""Changes of the cluster's state as exo writes events: tagged, in snake_case."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.api.exo_instance import instance_json, raw_card_json
from tandem.api.exo_state import link_json
from tandem.cluster.events import Indexed
from tandem.cluster.state import IntentChanged, NodeJoined, NodeLeft
from tandem.types.intents import CardIntent, Entry, InstanceIntent, LinkIntent


def event_json(item: Indexed, life: str) -> dict[str, Any]:
    """One event: exo's tag and fields where it has the kind, with `index` beside `event_id`.

    Args:
        life: of the log, as indices of another life mean something else.
    """
    event = item.event
    common = {"event_id": f"{life}-{item.index}", "index": item.index}
    if isinstance(event, IntentChanged):
        tag, fields = _intent(event.entry)
    elif isinstance(event, NodeLeft):
        tag, fields = "NodeTimedOut", {"node_id": event.node_id, "reason": event.reason}
    else:
        tag = "NodeJoined" if isinstance(event, NodeJoined) else "NodeGatheredInfo"
        fields = {"node_id": event.facts.node_id, "info": msgspec.to_builtins(event.facts)}
    return {tag: {**common, **fields}}


def _intent(entry: Entry) -> tuple[str, dict[str, Any]]:
    value = entry.value
    if isinstance(value, InstanceIntent):
        return "InstanceCreated", {"instance": instance_json(value)}
    if isinstance(value, LinkIntent):
        return "InstanceLinkCreated", {"link": link_json(value)}
    if isinstance(value, CardIntent):
        return "CustomModelCardAdded", {"model_card": raw_card_json(value.card)}
    kind, _, name = entry.key.partition("/")
    if kind == "instance":
        return "InstanceDeleted", {"instance_id": name}
    if kind == "link":
        return "InstanceLinkDeleted", {"link_id": name}
    return "CustomModelCardDeleted", {"model_id": name}
