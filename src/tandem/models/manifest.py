"""What a complete model on this machine consists of, file by file, for another machine that wants the same."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.errors import CorruptModelError, NotFoundError
from tandem.models.inventory import MARKER, LocalModel, marker
from tandem.models.wanted import is_wanted

CHUNK = 4 << 20
MOST_FILES = 10_000


class ModelFile(msgspec.Struct, frozen=True):
    """One file: path within the model's folder, and bytes."""

    path: str
    size: int


class Manifest(msgspec.Struct, frozen=True):
    """A model's files. `commit` of what came from a hub, and from which repository there; else empty."""

    model_id: str
    files: tuple[ModelFile, ...]
    repository: str = ""
    commit: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def check(self) -> None:
        """Make sure that it can be written below one folder.

        Raises:
            CorruptModelError: it names a file twice, one that no model has, or one outside the folder.
        """
        paths = [file.path for file in self.files]
        wrong = [file.path for file in self.files if file.size < 0 or not sendable(file.path, paths)]
        if wrong or not paths or len(paths) > MOST_FILES or len({path.casefold() for path in paths}) < len(paths):
            raise CorruptModelError(
                f"The list of files of {self.model_id} cannot be used ({', '.join(map(repr, wrong[:3])) or 'form'}). "
                "Fetch the model from a hub."
            )


def sendable(path: str, all_paths: list[str]) -> bool:
    """Whether a file of a model may travel: only what a model needs, and never our own notes on it."""
    return path != MARKER and not path.startswith(".") and is_wanted(path, all_paths)


def manifest_of(model: LocalModel) -> Manifest:
    """The files of a ready model. Reads the folder, not the files.

    Raises:
        NotFoundError: a file of it is a symbolic link, which is not followed.
    """
    found = [path for path in sorted(model.path.rglob("*")) if path.is_symlink() or path.is_file()]
    names = [path.relative_to(model.path).as_posix() for path in found]
    files = []
    for path, name in zip(found, names, strict=True):
        if not sendable(name, names):
            continue
        if path.is_symlink():
            raise NotFoundError(
                f"{model.model_id} is made of links ({name}), which are not sent. Import it there with: "
                f"tandem models import {model.path}"
            )
        files.append(ModelFile(name, path.stat().st_size))
    written = marker(model.path)
    from_hub = written.get("source") == "hub"
    repository, commit = (str(written.get(key, "")) if from_hub else "" for key in ("origin", "commit"))
    return Manifest(model.model_id, tuple(files), repository, commit)


class Digests:
    """SHA-256 of files, computed once for each state of a file. For several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int, int], str]] = {}
        self._locks: dict[Path, threading.Lock] = {}

    def of(self, path: Path) -> str:
        """64 hexadecimal digits. Reads the file if it changed since the last time, some seconds for each GB."""
        with self._locks.setdefault(path, threading.Lock()):
            status = path.stat()
            state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._known.get(path)
            if known is None or known[0] != state:
                self._known[path] = known = (state, sha256_of(path).hexdigest())
            return known[1]


def sha256_of(path: Path, check: Callable[[], None] = lambda: None) -> hashlib._Hash:
    """The hash of a file's content, to be gone on with.

    Args:
        check: called for every few megabytes; what it raises ends the work.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            check()
            digest.update(chunk)
    return digest
