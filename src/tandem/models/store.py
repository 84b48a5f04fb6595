"""The models on this machine, and how others get here.

Under `settings.models_dir` every model is a folder in Hugging Face layout; `settings.converted_dir` caches what GGUF
files elsewhere were converted to. Both only ever hold complete models: see `atomic`. The folders named by
`settings.models_dirs` are read, never written to.
"""

from __future__ import annotations

import builtins
import difflib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.config import Settings
from tandem.errors import NotFoundError, UnsupportedError
from tandem.models import packaged
from tandem.models.atomic import build_once, locked, publish, sweep
from tandem.models.cards import CardStore, ModelCard, file_name
from tandem.models.folder import check_model_folder, derive_card, folder_size, is_model_folder, read_json
from tandem.models.gguf.convert import conversion_key, convert_gguf, write_json
from tandem.models.gguf.describe import gguf_card
from tandem.models.progress import Progress, ProgressCallback, ignore_progress

Source = Literal["folder", "gguf", "hub", "packaged"]
DOWNLOADS = ".downloads"
MARKER = "tandem.json"
"""Our own file in a stored folder: `model_id`, `source`, `origin`."""


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


class ModelStore:
    """Finds, converts, fetches and removes models. Safe to use from several threads and processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cards = CardStore(settings)

    def list(self) -> list[LocalModel]:
        """What is on disk, by id. Converts nothing: some may not be `ready`. Of equal ids the store's own wins."""
        models: dict[str, LocalModel] = {}
        for model in (*self._stored(), *self._elsewhere(), *self._packaged()):
            models.setdefault(model.model_id.casefold(), model)
        return [models[key] for key in sorted(models)]

    def find(self, reference: str) -> LocalModel | None:
        """The local model that `reference` names: an id, an alias, or a path. Converts nothing.

        Raises:
            NotFoundError: a path that does not exist.
            ModelError: a path to something that is not a readable model.
        """
        if _is_path(reference):
            return self._at(Path(reference).expanduser())
        models = {model.model_id.casefold(): model for model in self.list()}
        wanted = [reference]
        card = self.cards.get(reference)
        if card is not None:
            wanted += [card.model_id, *card.aliases]
        return next((models[name.casefold()] for name in wanted if name.casefold() in models), None)

    def locate(self, reference: str, progress: ProgressCallback | None = None) -> LocalModel:
        """A local model, ready to load. Uses no network; a GGUF file is converted if it was not before.

        Raises:
            NotFoundError: it is not on this machine; the message says how to get it.
            ModelError: its files cannot be used.
        """
        model = self.find(reference)
        if model is None:
            raise NotFoundError(self._not_found(reference), param="model")
        if model.source in ("gguf", "packaged") and not model.ready:
            self._convert(model, progress or ignore_progress)
            return self._with_size(model)
        check_model_folder(model.path)
        return model

    def obtain(self, reference: str, progress: ProgressCallback | None = None) -> LocalModel:
        """A local model, ready to load, fetched from the hub if need be.

        Raises:
            NotFoundError: neither here nor a name the hub could know.
            DownloadError: the hub said no, or the transfer broke.
            ModelError: its files cannot be used.
        """
        repository = None if self.find(reference) is not None else self._repository(reference)
        if repository is not None:
            self._pull(*repository, progress or ignore_progress)
        return self.locate(reference, progress)

    def import_(self, path: Path, model_id: str | None = None, progress: ProgressCallback | None = None) -> LocalModel:
        """Copy a model folder, or convert a GGUF file, into the store.

        Args:
            model_id: its name from now on; None takes the folder's or file's name.

        Raises:
            NotFoundError: no such path.
            UnsupportedError: the store has a model of that name already.
            ModelError: it is not a model that we can read.
        """
        report = progress or ignore_progress
        path = path.expanduser().absolute()
        source = self._at(path)
        assert source is not None
        name = model_id or source.model_id
        target = self.settings.models_dir / file_name(name)
        if target.is_dir():
            raise UnsupportedError(f"The store has a model {name!r} already. Remove it, or import under another name.")

        def build(folder: Path) -> None:
            if path.is_file():
                convert_gguf(path, folder, report)
            else:
                check_model_folder(path)
                _copy_folder(path, folder, report)
                check_model_folder(folder)
            kind = "gguf" if path.is_file() else "folder"
            write_json(folder / MARKER, {"model_id": name, "source": kind, "origin": str(path)})

        build_once(target, build)
        return self._stored_at(target)

    def remove(self, model_id: str) -> int:
        """Delete a model from the store and return the bytes freed.

        Raises:
            NotFoundError: there is no such model.
            UnsupportedError: it does not belong to the store.
        """
        model = None if _is_path(model_id) else self.find(model_id)
        if model is None and (unfinished := self.settings.models_dir / DOWNLOADS / file_name(model_id)).is_dir():
            with locked(self.settings.models_dir / unfinished.name):
                freed = folder_size(unfinished)
                shutil.rmtree(unfinished)
            return freed
        if model is None:
            raise NotFoundError(self._not_found(model_id), param="model")
        if model.source == "packaged":
            raise UnsupportedError(
                f"{model.model_id} comes with the Python package {packaged.DISTRIBUTION}, which Tandem leaves alone. "
                f"Remove it with: pip uninstall {packaged.DISTRIBUTION}"
            )
        if not model.removable:
            raise UnsupportedError(
                f"{model.model_id} lies in {model.origin}, which Tandem only reads. Delete it there."
            )
        with locked(model.path):
            doomed = model.path.parent / f".removed-{uuid.uuid4().hex[:8]}"
            model.path.rename(doomed)
        freed = folder_size(doomed)
        shutil.rmtree(doomed)
        return freed

    def clean(self) -> builtins.list[Path]:
        """Remove what interrupted conversions and imports left behind, and return it."""
        folders = (self.settings.models_dir, self.settings.converted_dir)
        return [path for folder in folders if folder.is_dir() for path in sweep(folder)]

    # ------------------------------------------------------------------------------------------------ what is there

    def _stored(self) -> Iterator[LocalModel]:
        for folder in _children(self.settings.models_dir):
            if is_model_folder(folder):
                yield self._stored_at(folder)

    def _stored_at(self, folder: Path) -> LocalModel:
        marker = _marker(folder)
        model_id = str(marker.get("model_id", folder.name.replace("--", "/", 1)))
        source: Source = marker.get("source", "folder")
        return self._folder(model_id, folder, source, removable=True)

    def _elsewhere(self) -> Iterator[LocalModel]:
        for name in filter(None, self.settings.models_dirs.split(os.pathsep)):
            root = Path(name).expanduser()
            for child in _children(root):
                yield from self._described(child, child.name)
                for grandchild in _children(child):
                    yield from self._described(grandchild, f"{child.name}/{grandchild.name}")

    def _described(self, path: Path, model_id: str) -> Iterator[LocalModel]:
        if path.is_dir() and is_model_folder(path):
            yield self._folder(model_id, path, "folder", origin=path)
        elif path.suffix == ".gguf" and path.is_file():
            yield self._gguf(path.stem, path, "gguf")

    def _packaged(self) -> Iterator[LocalModel]:
        path = packaged.packaged_gguf()
        if path is not None:
            yield self._gguf(packaged.MODEL_ID, path, "packaged")

    def _at(self, path: Path) -> LocalModel | None:
        path = path.absolute()
        if not path.exists():
            raise NotFoundError(f"There is no {path}. Check the path.", param="model")
        if path.is_file():
            return self._gguf(path.stem, path, "gguf")
        check_model_folder(path)
        return self._folder(path.name, path, "folder", origin=path)

    def _folder(
        self, model_id: str, path: Path, source: Source, *, origin: Path | None = None, removable: bool = False
    ) -> LocalModel:
        card = self.cards.get(model_id) or derive_card(model_id, path)
        return LocalModel(model_id, path, source, card, folder_size(path), origin, removable)

    def _gguf(self, model_id: str, path: Path, source: Source) -> LocalModel:
        card = self.cards.get(model_id) or gguf_card(model_id, path)
        folder = self.settings.converted_dir / f"{file_name(model_id)}-{conversion_key(path)}"
        return self._with_size(LocalModel(model_id, folder, source, card, path.stat().st_size, path))

    def _with_size(self, model: LocalModel) -> LocalModel:
        if not model.ready:
            return model
        return LocalModel(
            model.model_id, model.path, model.source, model.card, folder_size(model.path), model.origin, model.removable
        )

    # --------------------------------------------------------------------------------------------------- converting

    def _convert(self, model: LocalModel, progress: ProgressCallback) -> None:
        origin = model.origin
        assert origin is not None

        def build(folder: Path) -> None:
            convert_gguf(origin, folder, progress)
            write_json(folder / MARKER, {"model_id": model.model_id, "source": model.source, "origin": str(origin)})

        build_once(model.path, build)
        for other in _children(self.settings.converted_dir):
            if other != model.path and _marker(other).get("origin") == str(origin):
                shutil.rmtree(other)  # of an earlier state of the same file

    # ----------------------------------------------------------------------------------------------------- fetching

    def _repository(self, reference: str) -> tuple[str, str] | None:
        """The hub repository that `reference` names, and the id that its model gets here."""
        card = self.cards.get(reference)
        model_id = card.model_id if card else reference
        for name in (reference, model_id, *(card.aliases if card else ())):
            if name.count("/") == 1:
                return name, model_id
        return None

    def _pull(self, repository: str, model_id: str, progress: ProgressCallback) -> None:
        from tandem.models.hub import download, list_repository

        listing = list_repository(repository, offline=self.settings.offline)
        target = self.settings.models_dir / file_name(model_id)
        staging = self.settings.models_dir / DOWNLOADS / target.name
        with locked(target):
            if target.is_dir():
                return
            download(listing, staging, progress)
            check_model_folder(staging)
            marker = {"model_id": model_id, "source": "hub", "origin": repository, "commit": listing.commit}
            write_json(staging / MARKER, marker)
            publish(staging, target)

    def _not_found(self, reference: str) -> str:
        known = {model.model_id for model in self.list()}
        card = self.cards.get(reference)
        if card is not None:
            if card.model_id == packaged.MODEL_ID:
                return f"{card.model_id} is not installed. Install it with: {packaged.INSTALL_HINT}"
            return f"{card.model_id} is not on this machine. Fetch it with: tandem models pull {card.model_id}"
        names = known | {name for entry in self.cards.all() for name in (entry.model_id, *entry.aliases)}
        close = _close_matches(reference, names)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        if reference.count("/") == 1:
            return f"{reference} is not on this machine.{hint} Fetch it with: tandem models pull {reference}"
        return f"No model is called {reference!r}.{hint} `tandem models list` shows those on this machine."


def _is_path(reference: str) -> bool:
    return reference.startswith(("/", "./", "../", "~")) or reference in (".", "..") or reference.endswith(".gguf")


def _children(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (child for child in sorted(folder.iterdir()) if not child.name.startswith("."))


def _marker(folder: Path) -> dict[str, Any]:
    return read_json(folder / MARKER) if (folder / MARKER).is_file() else {}


def _close_matches(reference: str, names: set[str]) -> list[str]:
    folded = {name.casefold(): name for name in names} | {name.casefold().rpartition("/")[2]: name for name in names}
    found = difflib.get_close_matches(reference.casefold(), folded, n=3, cutoff=0.6)
    return list(dict.fromkeys(folded[name] for name in found))


def _copy_folder(source: Path, target: Path, progress: ProgressCallback) -> None:
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        done += file.stat().st_size
        progress(Progress("copy", done, total, "bytes"))
