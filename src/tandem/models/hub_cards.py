"""What a hub says of models before any of their weights are here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from huggingface_hub import HfApi, constants

from tandem.errors import CorruptModelError, DownloadError
from tandem.models.cards import ModelCard
from tandem.models.folder import card_from_config, read_json
from tandem.models.hub import hub_endpoint, list_repository
from tandem.models.hub_errors import hub_errors

_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


class HubModel(msgspec.Struct, frozen=True):
    """One match of a search. `last_modified` in ISO 8601; empty where the hub does not say."""

    id: str
    author: str
    downloads: int
    likes: int
    last_modified: str
    tags: list[str]


def hub_card(repository: str, *, offline: bool = False) -> ModelCard:
    """A card from a repository's configuration and the sizes of its files.

    Raises:
        DownloadError: offline, gated, not found, refused, unreachable.
        UnsupportedModelError: it holds no safetensors.
        CorruptModelError: its configuration lacks what a card needs.
    """
    listing = list_repository(repository, offline=offline)
    names = {file.path for file in listing.files}
    if "config.json" not in names:
        raise CorruptModelError(f"{repository} has no config.json. Choose a repository in Hugging Face layout.")
    size = sum(file.size for file in listing.files if file.path.endswith(".safetensors"))
    endpoint = hub_endpoint()
    with tempfile.TemporaryDirectory() as folder, hub_errors(repository, endpoint):
        api = HfApi(endpoint=endpoint, library_name="tandem")
        for name in ("config.json", *(template for template in _TEMPLATES if template in names)):
            api.hf_hub_download(repository, name, revision=listing.commit, local_dir=folder)
        return card_from_config(repository, read_json(Path(folder) / "config.json"), size, _template(Path(folder)))


def _template(folder: Path) -> str:
    plain, config = (folder / name for name in _TEMPLATES)
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    return str(read_json(config).get("chat_template") or "") if config.is_file() else ""


def search_hub(query: str, limit: int, *, offline: bool = False) -> list[HubModel]:
    """Models with safetensors whose names match, by downloads.

    Raises:
        DownloadError: offline, refused, unreachable.
    """
    if offline or constants.is_offline_mode():
        raise DownloadError("Offline mode is on: only models on this machine and known cards are searched.")
    endpoint = hub_endpoint()
    with hub_errors(query, endpoint):
        api = HfApi(endpoint=endpoint, library_name="tandem")
        found = list(api.list_models(search=query, filter="safetensors", sort="downloads", limit=limit))
    return [
        HubModel(
            id=model.id,
            author=model.author or model.id.partition("/")[0],
            downloads=model.downloads or 0,
            likes=model.likes or 0,
            last_modified=model.last_modified.isoformat() if model.last_modified else "",
            tags=list(model.tags or ()),
        )
        for model in found
    ]
