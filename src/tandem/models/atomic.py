"""Build a folder so that others see it complete or not at all.

The folder grows under a hidden name beside its target, is flushed to disk, and is then renamed. A file lock per target
makes a second process wait for the first one's result instead of doing the work again. The kernel drops the lock of a
process that dies, so whoever holds a target's lock knows that any half-built folder of that target is a dead one's.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCKS = ".locks"
PARTIAL = ".partial-"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, built by `build(empty_folder)` unless it exists already.

    Raises:
        whatever `build` raises; then nothing is left behind.
    """
    if target.is_dir():
        return target
    with locked(target):
        if target.is_dir():
            return target
        sweep(target.parent, held=target.name)
        partial = target.parent / f"{PARTIAL}{target.name}{PARTIAL}{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        try:
            build(partial)
            publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def publish(folder: Path, target: Path) -> None:
    """Make `folder` durable and give it its final name, on the same disk. The caller holds the target's lock."""
    flush_folder(folder)
    folder.rename(target)
    _flush(target.parent)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock that guards `target`, over threads and processes. Waits as long as the holder works."""
    with lock_of(target):
        yield


def lock_of(target: Path) -> FileLock:
    """The lock that guards `target`, not held. Any thread may release what another acquired."""
    folder = target.parent / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{target.name}.lock", thread_local=False)


def sweep(folder: Path, held: str | None = None) -> list[Path]:
    """Remove what builders that died left in `folder`, and say what it was.

    Args:
        held: name of the target whose lock the caller holds.
    """
    removed = []
    for partial in sorted(folder.glob(f"{PARTIAL}*")):
        name = partial.name.removeprefix(PARTIAL).rsplit(PARTIAL, 1)[0]
        if name == held:
            shutil.rmtree(partial)
            removed.append(partial)
            continue
        (folder / LOCKS).mkdir(exist_ok=True)
        try:
            with FileLock(folder / LOCKS / f"{name}.lock", blocking=False):
                shutil.rmtree(partial)
                removed.append(partial)
        except Timeout:
            continue  # its builder is alive
    return removed


def flush_folder(folder: Path) -> None:
    """Make every file below `folder` survive a power cut."""
    for root, _, files in os.walk(folder):
        for file in files:
            _flush(Path(root) / file)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
