"""The intent map on disk: `intents/<generation>.snapshot`, and `intents/<generation>.log` with what came after it.

A change is appended to the log and flushed before it counts as kept. A new generation begins at every start, when the
log has grown, and after any failed write: its snapshot is written beside its final name, flushed, and renamed; only
then do generations go that nothing needs. The generation before stays until the next one, so a snapshot that the disk
garbled loses nothing either.

Reading takes every sound record of every file there is. That is right because entries merge: an older record of a key
changes nothing. A log is never appended to again after a failed write or a restart, since a half-written end would hide
what follows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.cluster.records import header, record, scan
from tandem.errors import DiskFullError, NewerFormatError, StorageError
from tandem.types.intents import Entry, Stamp

log = logging.getLogger(__name__)

_PARTIAL = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ENTRIES_A_RECORD = 64


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a record: entries, the clock when it was written, and whether a snapshot is complete with it."""

    entries: tuple[Entry, ...] = ()
    clock: Stamp | None = None
    complete: bool = False


_decoder = msgspec.msgpack.Decoder(_Batch)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was on disk.

    Attributes:
        entries: in no order; a key may occur more than once, and its newest entry counts.
        clock: the greatest stamp written down.
        damage: what could not be read, for people. A log's torn end after a power cut is the usual case.
    """

    entries: tuple[Entry, ...]
    clock: Stamp | None
    damage: tuple[str, ...]


class SnapshotStore:
    """Keeps entries in a folder. Calls block on the disk: make them off the event loop; they may come from any thread.

    One process at a time: see `identity.HomeLock`.

    Args:
        folder: of the data folder; made at the first write.
        log_bytes: size from which on the log is replaced by a new snapshot.

    Attributes:
        degraded: why what is in memory is not on disk, in words for people; None while it is.
    """

    def __init__(self, folder: Path, *, log_bytes: int = 2**20) -> None:
        self.degraded: str | None = None
        self._folder = folder
        self._log_bytes = log_bytes
        self._lock = threading.Lock()
        self._log: int | None = None
        self._log_size = 0
        self._snapshot_size = 0
        self._generation = 0
        self._sound: int | None = None

    @property
    def wants_everything(self) -> bool:
        """The next write should be `replace`: there is no log that can be appended to, or it has grown long."""
        return self._log is None or self._log_size > max(self._log_bytes, 2 * self._snapshot_size)

    def load(self) -> Recovered:
        """Read what is there, and change nothing.

        Raises:
            NewerFormatError: a later version of Tandem wrote it.
            StorageError: the folder cannot be read.
        """
        entries: list[Entry] = []
        stamps: list[Stamp] = []
        damage: list[str] = []
        with self._lock:
            try:
                for generation, path in self._files():
                    found = scan(path.read_bytes(), generation, str(path))
                    batches = [_decode(payload, path) for payload in found.payloads]
                    entries += [entry for batch in batches for entry in batch.entries]
                    stamps += [batch.clock for batch in batches if batch.clock]
                    if found.damage:
                        damage.append(found.damage)
                    elif path.suffix == ".snapshot":
                        if batches and batches[-1].complete:
                            self._sound = generation
                        else:
                            damage.append(f"{path} lacks its end")
                    self._generation = max(self._generation, generation)
            except OSError as error:
                raise StorageError(
                    f"{self._folder} cannot be read: {error}. Repair its permissions, or move it away to begin without "
                    "what it holds: other nodes send it again."
                ) from error
        return Recovered(tuple(entries), max(stamps, default=None), tuple(damage))

    def append(self, entries: Sequence[Entry], clock: Stamp) -> None:
        """Add changes. They survive a power cut once this returns.

        Raises:
            DiskFullError, StorageError: they are not kept; `degraded` says why, and `replace` has to come next.
        """
        with self._lock:
            if self._log is None:
                raise StorageError("There is no log to append to: a failed write came before. Replace the snapshot.")
            data = _records(tuple(entries), clock, self._generation)
            try:
                _write(self._log, data)
                _flush(self._log)
            except OSError as error:
                self._close_log()
                raise self._failed(error) from error
            self._log_size += len(data)

    def replace(self, entries: Iterable[Entry], clock: Stamp) -> None:
        """Begin a new generation that holds exactly `entries`. They survive a power cut once this returns.

        Raises:
            DiskFullError, StorageError: the files before are still there, and as good as they were.
        """
        with self._lock:
            generation = self._generation + 1
            partial = self._folder / f"{generation:012}.snapshot{_PARTIAL}"
            self._close_log()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for left in self._folder.glob(f"*{_PARTIAL}"):
                    left.unlink()
                size = _write_file(partial, _snapshot(tuple(entries), clock, generation))
                os.replace(partial, self._folder / f"{generation:012}.snapshot")
                self._generation = generation
                path = self._folder / f"{generation:012}.log"
                self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                _write(self._log, header(generation))
                _flush(self._log)
                _flush_folder(self._folder)
            except OSError as error:
                self._close_log()
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise self._failed(error) from error
            self._remove_before(self._sound)
            self._sound = generation
            self._snapshot_size, self._log_size = size, 0
            self.degraded = None

    def close(self) -> None:
        """Give the log up. Nothing is lost: what was kept is flushed."""
        with self._lock:
            self._close_log()

    def _files(self) -> list[tuple[int, Path]]:
        found = [
            (int(path.stem), path)
            for path in self._folder.glob("*")
            if path.suffix in (".snapshot", ".log") and path.stem.isdecimal()
        ]
        return sorted(found)

    def _remove_before(self, sound: int | None) -> None:
        """Remove generations that are older than `sound`, whose snapshot holds all of theirs."""
        for generation, path in self._files():
            if sound is None or generation >= sound:
                continue
            try:
                path.unlink()
            except OSError as error:
                # It only takes room: what it holds is older than what is read beside it.
                log.warning("%s cannot be removed: %s", path, error)

    def _close_log(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _failed(self, error: OSError) -> StorageError:
        if error.errno in _FULL:
            failure: StorageError = DiskFullError(
                f"There is no room in {self._folder} ({error.strerror}): what the cluster should run is kept in memory "
                "only, and on other nodes. Free some space; it is written as soon as there is room."
            )
        else:
            failure = StorageError(
                f"{self._folder} cannot be written ({error}): what the cluster should run is kept in memory only, and "
                "on other nodes. Repair the disk or its permissions; writing is tried again."
            )
        self.degraded = failure.message
        return failure


def _snapshot(entries: tuple[Entry, ...], clock: Stamp, generation: int) -> bytes:
    end = record(msgspec.msgpack.encode(_Batch((), clock, complete=True)), generation)
    return header(generation) + _records(entries, None, generation) + end


def _records(entries: tuple[Entry, ...], clock: Stamp | None, generation: int) -> bytes:
    starts = range(0, len(entries), _ENTRIES_A_RECORD)
    batches = [_Batch(entries[start : start + _ENTRIES_A_RECORD], clock) for start in starts]
    return b"".join(record(msgspec.msgpack.encode(batch), generation) for batch in batches)


def _decode(payload: bytes, path: Path) -> _Batch:
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        # The checksum holds, so these bytes are what somebody wrote.
        raise NewerFormatError(
            f"{path} holds what this version of Tandem does not know ({error}). Install the newer version again, or "
            "move the folder away to begin without what it holds: other nodes send it again."
        ) from error


def _write_file(path: Path, data: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write(descriptor, data)
        _flush(descriptor)
    finally:
        os.close(descriptor)
    return len(data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _flush(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            # On macOS fsync leaves data in the drive's cache.
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:
            log.debug("F_FULLFSYNC is not possible here: %s", error)
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
