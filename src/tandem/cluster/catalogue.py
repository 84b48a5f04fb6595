"""From a model's name to its card, and to what a node obtains it by."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cluster.local_models import reference_to
from tandem.cluster.state import ClusterState
from tandem.engines.sim.profile import is_sim_reference, parse_sim_reference
from tandem.errors import ConfigError, InvalidRequestError, ModelError, NotFoundError, UnplaceableError
from tandem.models.cards import ModelCard, card_from
from tandem.models.store import ModelStore
from tandem.placement.world import card_of


@dataclass(frozen=True, slots=True)
class Known:
    """A model that can be placed.

    Attributes:
        reference: what a node obtains it by.
        node_ids: the only nodes that can, as its files lie in a folder there; empty for all.
    """

    card: ModelCard
    reference: str
    node_ids: tuple[str, ...] = ()


def find_model(name: str, store: ModelStore, state: ClusterState, node_id: str) -> Known:
    """What `name`, an id or alias in any case, stands for. Reads the disks: call it off the event loop.

    A custom card wins over this machine's files, those over a built-in card.

    Raises:
        NotFoundError: nobody knows such a model.
        InvalidRequestError: a reference to a simulated model that cannot be read.
        UnplaceableError: it is on this machine and cannot be used.
    """
    wanted = name.casefold()
    for intent in state.instances.values():
        if intent.meta == "Sim" and wanted in (intent.model_id.casefold(), intent.reference.casefold()):
            card = card_of(intent)
            if card is not None:
                return Known(card, intent.reference)
    if is_sim_reference(name):
        try:
            return Known(parse_sim_reference(name).card(), name)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="model_id") from error
    for custom in custom_cards(state).values():
        if wanted in custom.names:
            return Known(custom, custom.model_id)
    try:
        local = None if name.startswith(("/", ".", "~")) else store.find(name)
    except ModelError as error:
        raise UnplaceableError(error.message, param="model_id") from error
    if local is not None:
        reference = reference_to(local)
        return Known(local.card, reference, () if reference == local.model_id else (node_id,))
    built_in = store.cards.get(name)
    if built_in is not None:
        return Known(built_in, built_in.model_id)
    for intent in state.instances.values():
        card = card_of(intent)
        if card is not None and wanted in card.names:
            only = () if intent.reference == intent.model_id else tuple(shard.node_id for shard in intent.shards)
            return Known(card, intent.reference, only)
    raise NotFoundError(
        f"No model is known as '{name}'. GET /models lists those that are; POST /models/add makes one of a hub known.",
        param="model_id",
    )


def custom_cards(state: ClusterState) -> dict[str, ModelCard]:
    """The cluster's custom cards that this version can read, by id."""
    cards = {intent.model_id: card_from({**intent.card, "is_custom": True}) for intent in state.cards.values()}
    return {model_id: card for model_id, card in cards.items() if card is not None}
