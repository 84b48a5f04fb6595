"""A model that arrives from another machine: partial files that are gone on with, checked, and published whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from tandem.models.atomic import publish
from tandem.models.disk import check_disk_space
from tandem.models.folder import check_model_folder
from tandem.models.gguf.convert import write_json
from tandem.models.inventory import MARKER
from tandem.models.manifest import Manifest, ModelFile, sha256_of

PARTIAL_SUFFIX = ".part"


class ArrivingFile:
    """One file, open for appending to what is there. Blocks; one thread at a time writes.

    Args:
        check: called while what is there is read; what it raises ends that.

    Raises:
        OSError: the disk says no.
    """

    def __init__(self, staging: Path, file: ModelFile, check: Callable[[], None] = lambda: None) -> None:
        self.wanted = file.size
        self.final = staging / file.path
        self.partial = partial_of(staging, file)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._writing = threading.Lock()
        self._ending = False
        self._file = os.fdopen(os.open(self.partial, flags, 0o644), "ab", buffering=0)
        try:
            if self._file.tell() > file.size:
                self._file.truncate(0)
            self._digest = sha256_of(self.partial, check)
            self.size = self.partial.stat().st_size
        except BaseException:
            self._file.close()
            raise

    def write(self, piece: bytes) -> None:
        """Append."""
        view = memoryview(piece)
        with self._writing:
            while view:
                view = view[self._file.write(view) :]
            self._digest.update(piece)
            self.size += len(piece)
            if self._ending:
                self._file.close()

    def keep_if(self, digest: str) -> bool:
        """Give the whole file its name if its SHA-256 is `digest`; drop it otherwise."""
        self.close()
        if self.size == self.wanted and self._digest.hexdigest() == digest:
            self.partial.rename(self.final)
            return True
        self.partial.unlink()
        return False

    def close(self) -> None:
        """What has arrived stays. A write that another thread is in the middle of closes it at its end."""
        self._ending = True
        if self._writing.acquire(blocking=False):
            self._file.close()
            self._writing.release()


def partial_of(staging: Path, file: ModelFile) -> Path:
    """Where a file grows. Its size is in the name: a file of another size is another file."""
    return staging / f"{file.path}.{file.size:016x}{PARTIAL_SUFFIX}"


def prepare(staging: Path, manifest: Manifest) -> int:
    """Make the folder ready: leave what can be used of an earlier try, drop the rest. The caller holds the lock.

    Returns:
        Bytes that are there.

    Raises:
        NoSpaceError: the rest does not fit on the disk.
    """
    staging.mkdir(parents=True, exist_ok=True)
    keep: set[Path] = set()
    for file in manifest.files:
        partial, final = partial_of(staging, file), staging / file.path
        if final.is_file() and not final.is_symlink() and final.stat().st_size == file.size:
            keep.add(final)
            continue
        keep.add(partial)
        # A download from a hub names its partial files by their hash. The content is checked in the end.
        for other in sorted(final.parent.glob(f"*{PARTIAL_SUFFIX}")):
            begun = other.name.rsplit(".", 2)[0] == Path(file.path).name
            if begun and not partial.exists() and not other.is_symlink() and other.stat().st_size <= file.size:
                other.rename(partial)
    there = 0
    for path in [path for path in staging.rglob("*") if path.is_symlink() or path.is_file()]:
        if path.is_symlink() or path not in keep:
            path.unlink()
        else:
            there += path.stat().st_size
    check_disk_space(staging, manifest.size - there, manifest.model_id)
    return there


def finish(staging: Path, target: Path, manifest: Manifest) -> None:
    """Publish the complete model. The caller holds the lock.

    Raises:
        CorruptModelError: it is no whole model.
    """
    check_model_folder(staging)
    note = {"model_id": manifest.model_id, "source": "folder"}
    if manifest.commit:
        note |= {"source": "hub", "origin": manifest.repository, "commit": manifest.commit}
    write_json(staging / MARKER, note)
    publish(staging, target)
