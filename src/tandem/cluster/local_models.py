"""The models on this machine's disks, and those on their way there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.cluster.threads import Check, in_thread
from tandem.engines.sim.profile import is_sim_reference
from tandem.errors import InstanceNotReadyError, NotFoundError
from tandem.models.manifest import sendable
from tandem.models.progress import Progress, ProgressCallback, ignore_progress
from tandem.models.store import LocalModel, ModelStore, is_path


class LocalModels:
    """The store, as the cluster uses it.

    Args:
        store: of this machine.
    """

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._expected: list[str] = []

    @property
    def expected(self) -> tuple[str, ...]:
        """References of models that are being fetched or converted and will be served."""
        return tuple(self._expected)

    @contextmanager
    def expecting(self, references: Iterable[str]) -> Iterator[None]:
        """While the block runs, requests for these models are told to come back instead of that there are none."""
        added = list(references)
        self._expected.extend(added)
        try:
            yield
        finally:
            for reference in added:
                self._expected.remove(reference)

    def check_expected(self, model: str) -> None:
        """Raises:
        InstanceNotReadyError: `model` is one of those that are expected.
        """
        wanted = model.casefold()
        for reference in self._expected:
            card = self._store.cards.get(reference)
            names = (card.names if card is not None else frozenset()) | {reference.casefold()}
            if wanted in names or (wanted == "default" and len(self._expected) == 1):
                raise InstanceNotReadyError(
                    f"{reference} is being fetched or converted; it will answer when it is loaded.", retry_after=5.0
                )

    async def obtain(self, reference: str, report: ProgressCallback = ignore_progress) -> LocalModel | str:
        """Find (or fetch) the model that `reference` names, off the event loop. `sim` references stay as they are.
        Cancelling ends a conversion at its next tensor.

        Args:
            report: called from the thread that does the work.

        Raises:
            NotFoundError, ModelError: there is no such model, or it could not be fetched or converted.
        """
        if is_sim_reference(reference):
            return reference

        def work(check: Check) -> LocalModel:
            def step(progress: Progress) -> None:
                check()
                report(progress)

            return self._store.obtain(reference, step)

        return await in_thread(work)

    def file_of(self, model_id: str, path: str) -> Path:
        """One file of a complete model on this machine, for another node. Reads the disks.

        Raises:
            NotFoundError: the model, or in it the file, is not here.
        """
        model = None if is_path(model_id) or not sendable(path, []) else self._store.find(model_id)
        found = model.path / path if model is not None and model.ready else None
        # Where nothing on the way below the folder is a link, the path is what it says.
        if model is None or found is None or found.resolve() != model.path.resolve() / path or not found.is_file():
            raise NotFoundError(f"This node has no file {path} of {model_id}.")
        return found


def reference_to(model: LocalModel | str) -> str:
    """What `obtain` finds the same model by, on this machine and after a restart."""
    if isinstance(model, str):
        return model
    if model.removable or model.source == "packaged":
        return model.model_id
    return str(model.origin or model.path)
