"""What is on this machine: the store's own models, those in folders that are only read, and the packaged one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tandem.config import Settings
from tandem.errors import ModelError, NotFoundError
from tandem.models import packaged
from tandem.models.cards import CardStore, ModelCard, file_name
from tandem.models.folder import check_model_folder, derive_card, folder_size, is_model_folder, read_json
from tandem.models.gguf.convert import conversion_key
from tandem.models.gguf.describe import gguf_card

Source = Literal["folder", "gguf", "hub", "packaged"]
MARKER = "tandem.json"
"""Our own file in a stored folder: `model_id`, `source`, `origin`, and `commit` of what came from a hub."""


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        path: a folder in Hugging Face layout. It exists once the model is `ready`.
        source: what it was, or still is.
        size_bytes: on disk; of the GGUF file where that was not converted yet.
        origin: the file or folder outside the store that it comes from, None for what the store holds itself.
        removable: it lies in the store.
    """

    model_id: str
    path: Path
    source: Source
    card: ModelCard
    size_bytes: int
    origin: Path | None = None
    removable: bool = False

    @property
    def ready(self) -> bool:
        """Whether `path` can be loaded now; `ModelStore.locate` makes it so."""
        return self.path.is_dir()

    def measured(self) -> LocalModel:
        """The same with its size as it is now."""
        return replace(self, size_bytes=folder_size(self.path)) if self.ready else self


Entry: TypeAlias = tuple[str, LocalModel | ModelError]
"""A model id with its model, or with what is wrong with it."""


class Inventory:
    """Looks, converts nothing, writes nothing."""

    def __init__(self, settings: Settings, cards: CardStore) -> None:
        self.settings = settings
        self.cards = cards

    def entries(self) -> dict[str, Entry]:
        """Everything there, by case-folded id. Of equal ids the store's own wins, then the earlier folder's."""
        found: dict[str, Entry] = {}
        for model_id, path, source in (*self._stored(), *self._elsewhere(), *self._packaged()):
            if model_id.casefold() not in found:
                found[model_id.casefold()] = (model_id, self._described(model_id, path, source))
        return found

    def at(self, path: Path) -> LocalModel:
        """The model folder or GGUF file at `path`.

        Raises:
            NotFoundError: no such path.
            ModelError: not a readable model.
        """
        path = path.absolute()
        if not path.exists():
            raise NotFoundError(f"There is no {path}. Check the path.", param="model")
        if path.is_file():
            return self._gguf(path.stem, path, "gguf")
        check_model_folder(path)
        return self._folder(path.name, path, "folder")

    def stored_at(self, folder: Path) -> LocalModel:
        """The model in this folder of the store.

        Raises:
            ModelError: not a readable model.
        """
        model_id, path, source = _stored_entry(folder)
        return self._folder(model_id, path, source)

    def _stored(self) -> Iterator[tuple[str, Path, Source]]:
        for folder in children(self.settings.models_dir):
            if is_model_folder(folder):
                yield _stored_entry(folder)

    def _elsewhere(self) -> Iterator[tuple[str, Path, Source]]:
        for name in filter(None, self.settings.models_dirs.split(os.pathsep)):
            for child in children(Path(name).expanduser()):
                yield from _recognised(child, child.name)
                for grandchild in children(child):
                    yield from _recognised(grandchild, f"{child.name}/{grandchild.name}")

    def _packaged(self) -> Iterator[tuple[str, Path, Source]]:
        path = packaged.packaged_gguf()
        if path is not None:
            yield packaged.MODEL_ID, path, "packaged"

    def _described(self, model_id: str, path: Path, source: Source) -> LocalModel | ModelError:
        try:
            return (self._gguf if path.is_file() else self._folder)(model_id, path, source)
        except ModelError as error:
            return error

    def _folder(self, model_id: str, path: Path, source: Source) -> LocalModel:
        card = self.cards.get(model_id) or derive_card(model_id, path)
        own = path.parent == self.settings.models_dir
        return LocalModel(model_id, path, source, card, folder_size(path), None if own else path, own)

    def _gguf(self, model_id: str, path: Path, source: Source) -> LocalModel:
        status = path.stat()
        card = self.cards.get(model_id) or _gguf_card(model_id, path, status.st_size, status.st_mtime_ns)
        folder = self.settings.converted_dir / f"{file_name(model_id)}-{conversion_key(path)}"
        return LocalModel(model_id, folder, source, card, status.st_size, path).measured()


def marker(folder: Path) -> dict[str, Any]:
    """What we wrote into a folder of ours; empty for other folders."""
    return read_json(folder / MARKER) if (folder / MARKER).is_file() else {}


def children(folder: Path) -> Iterator[Path]:
    """What lies in `folder`, hidden names left out; nothing where there is no such folder."""
    if folder.is_dir():
        yield from (child for child in sorted(folder.iterdir()) if not child.name.startswith("."))


def _stored_entry(folder: Path) -> tuple[str, Path, Source]:
    written = marker(folder)
    return str(written.get("model_id", folder.name.replace("--", "/", 1))), folder, written.get("source", "folder")


def _recognised(path: Path, model_id: str) -> Iterator[tuple[str, Path, Source]]:
    if path.is_dir() and is_model_folder(path):
        yield model_id, path, "folder"
    elif path.suffix == ".gguf" and path.is_file():
        yield path.stem, path, "gguf"


@lru_cache(maxsize=256)
def _gguf_card(model_id: str, path: Path, size: int, modified: int) -> ModelCard:
    # Reading a large vocabulary takes a noticeable part of a second; size and time only tell changed files apart.
    return gguf_card(model_id, path)
