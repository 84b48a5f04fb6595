"""What was kept survives a power cut at any byte, garbled files, full disks and other versions."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.cluster import snapshot
from tandem.cluster.clock import HybridClock
from tandem.cluster.intents import IntentMap
from tandem.cluster.records import MAGIC, header, record, scan
from tandem.cluster.snapshot import Recovered, SnapshotStore
from tandem.errors import DiskFullError, NewerFormatError, StorageError
from tandem.types.intents import CardIntent, Entry, Stamp

LAST = Stamp(9, 9, "n")


def entry(number: int, name: str | None = None) -> Entry:
    return Entry(f"card/{name or number}", CardIntent(name or str(number), {}), Stamp(number, 0, "n"))


def store_in(folder: Path) -> SnapshotStore:
    store = SnapshotStore(folder)
    store.load()
    return store


def newest(recovered: Recovered) -> dict[str, Entry]:
    return IntentMap(HybridClock("n", wall=lambda: 0), recovered.entries).entries


def write(folder: Path) -> list[int]:
    """Two generations, each with appended changes; how long the last log was after each append."""
    store = store_in(folder)
    store.replace([entry(1), entry(2)], LAST)
    store.append([entry(3)], LAST)
    store.append([entry(4, "2")], LAST)
    store.replace([entry(1), entry(3), entry(4, "2")], LAST)
    lengths = [file(folder, ".log").stat().st_size]
    for number in (5, 6, 7):
        store.append([entry(number)], Stamp(number, 1, "n"))
        lengths.append(file(folder, ".log").stat().st_size)
    store.close()
    return lengths


def file(folder: Path, suffix: str) -> Path:
    return max(folder.glob(f"*{suffix}"))


ALL = {made.key: made for made in (entry(1), entry(3), entry(4, "2"), entry(5), entry(6), entry(7))}


def test_what_was_written_is_read_again_with_the_clock(tmp_path: Path) -> None:
    write(tmp_path)
    recovered = SnapshotStore(tmp_path).load()
    assert newest(recovered) == ALL
    assert recovered.clock == LAST
    assert recovered.damage == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{generation:012}.{kind}" for generation in (1, 2) for kind in ("log", "snapshot")
    ]


def test_an_empty_folder_and_none_at_all(tmp_path: Path) -> None:
    assert SnapshotStore(tmp_path / "none").load() == Recovered((), None, ())
    assert not (tmp_path / "none").exists()
    store = store_in(tmp_path / "deep" / "none")
    store.replace([], LAST)
    assert SnapshotStore(tmp_path / "deep" / "none").load().clock == LAST


@pytest.mark.parametrize("garble", [False, True], ids=["truncated", "garbled"])
@pytest.mark.parametrize("suffix", [".log", ".snapshot"])
def test_an_end_damaged_from_any_byte_on(tmp_path: Path, suffix: str, garble: bool) -> None:
    lengths = write(tmp_path)
    path = file(tmp_path, suffix)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut] + (bytes(byte ^ 0x5A for byte in data[cut:]) if garble else b""))
        recovered = SnapshotStore(tmp_path).load()
        kept = newest(recovered)
        # The generation before makes up for a damaged snapshot; of a log, what was flushed before the damage is there.
        whole = 3 if suffix == ".snapshot" else sum(cut >= length for length in lengths[1:])
        assert kept == {key: made for key, made in ALL.items() if made.stamp.wall < 5 + whole}, cut
        if garble or suffix == ".snapshot" or cut not in lengths:
            assert recovered.damage


def test_every_single_garbled_byte_is_noticed_and_believed_nowhere(tmp_path: Path) -> None:
    write(tmp_path)
    twice = {key: made for key, made in ALL.items() if made.stamp.wall < 5}
    for path in list(tmp_path.iterdir()):
        data = path.read_bytes()
        for position in range(len(data)):
            path.write_bytes(data[:position] + bytes([data[position] ^ 0x01]) + data[position + 1 :])
            recovered = SnapshotStore(tmp_path).load()
            assert recovered.damage, (path, position)
            assert twice.items() <= newest(recovered).items() <= ALL.items(), (path, position)
        path.write_bytes(data)


def test_work_goes_on_after_a_torn_end(tmp_path: Path) -> None:
    lengths = write(tmp_path)
    path = file(tmp_path, ".log")
    path.write_bytes(path.read_bytes()[: lengths[-1] - 3])
    store = SnapshotStore(tmp_path)
    held = newest(store.load())
    assert "card/7" not in held
    store.replace(held.values(), LAST)
    store.append([entry(8)], LAST)
    recovered = SnapshotStore(tmp_path).load()
    assert {"card/6", "card/8"} <= newest(recovered).keys()


class PowerCutError(BaseException):
    """Nothing that happens after it reaches the disk."""


@contextmanager
def power_for(count: int, patch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Power for `count` bytes written and one for each flush, rename and removal. Yields flushed lengths by inode."""
    left = count
    flushed: dict[int, int] = {}
    plain_write, plain_replace, plain_unlink = os.write, os.replace, Path.unlink

    def spend(cost: int) -> None:
        nonlocal left
        if left < cost:
            raise PowerCutError
        left -= cost

    def short_write(descriptor: int, data: memoryview) -> int:
        done = plain_write(descriptor, data[: min(len(data), left)])
        spend(len(data))
        return done

    def replace(source: Path, target: Path) -> None:
        spend(1)
        plain_replace(source, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        spend(1)
        plain_unlink(path, missing_ok)

    def flush(descriptor: int) -> None:
        spend(1)
        about = os.fstat(descriptor)
        flushed[about.st_ino] = about.st_size

    with patch.context() as patched:
        patched.setattr(snapshot.os, "write", short_write)
        patched.setattr(snapshot.os, "replace", replace)
        patched.setattr(Path, "unlink", unlink)
        patched.setattr(snapshot, "_flush", flush)
        patched.setattr(snapshot, "_flush_folder", lambda folder: spend(1))
        yield flushed


@pytest.mark.slow
def test_a_power_cut_at_every_byte_and_between_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut is made, and the next start has exactly what was kept, plus perhaps what was under way."""

    def live(folder: Path) -> None:
        store = store_in(folder)
        done.clear()
        steps: list[tuple[Entry, Callable[[], None]]] = [
            (entry(1), lambda: store.replace([entry(1)], LAST)),
            (entry(2), lambda: store.append([entry(2)], LAST)),
            (entry(3), lambda: store.append([entry(3)], LAST)),
            (entry(4), lambda: store.replace([entry(number) for number in (1, 2, 3, 4)], LAST)),
            (entry(5), lambda: store.append([entry(5)], LAST)),
            (entry(6), lambda: store.replace([entry(number) for number in range(1, 7)], LAST)),
        ]
        try:
            for made, step in steps:
                doing.append(made)
                step()
                done.append(made)
        finally:
            store.close()

    done: list[Entry] = []
    cuts = 0
    while len(done) < 6:
        folder = tmp_path / "home"
        doing: list[Entry] = []
        with power_for(cuts, monkeypatch) as flushed:
            try:
                live(folder)
            except PowerCutError:
                assert len(doing) == len(done) + 1
        for all_arrived in (True, False):
            # What was written may have reached the disk or not; what was flushed has.
            for path in [] if all_arrived else folder.iterdir():
                os.truncate(path, flushed.get(path.stat().st_ino, 0))
            kept = newest(SnapshotStore(folder).load())
            assert {made.key: made for made in done}.items() <= kept.items(), cuts
            assert kept.items() <= {made.key: made for made in doing}.items(), cuts
        # The next life can write.
        store = store_in(folder)
        with power_for(10**6, monkeypatch):
            store.replace(kept.values(), LAST)
        store.close()
        assert newest(SnapshotStore(folder).load()) == kept
        shutil.rmtree(folder)
        cuts += 1
    print(f"{cuts} power cuts")
    assert cuts > 1000


def test_a_full_disk_keeps_the_old_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    store.replace([entry(1)], LAST)
    room, plain_write = 10, os.write

    def scarce(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = plain_write(descriptor, data[:room])
        room -= done
        return done

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.os, "write", scarce)
        with pytest.raises(DiskFullError, match="Free some space"):
            store.append([entry(2)], LAST)
        assert store.degraded
        assert "memory" in store.degraded
        assert store.wants_everything
        with pytest.raises(StorageError, match="Replace"):
            store.append([entry(2)], LAST)
        room = 50
        with pytest.raises(DiskFullError):
            store.replace([entry(1), entry(2)], LAST)
        assert newest(SnapshotStore(tmp_path).load()) == {"card/1": entry(1)}
    store.replace([entry(1), entry(2)], LAST)
    assert store.degraded is None
    assert set(newest(SnapshotStore(tmp_path).load())) == {"card/1", "card/2"}


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """The kernel says no, in a process whose files may not grow beyond 4 KiB."""
    script = f"""
        import resource, signal
        from pathlib import Path
        from tandem.cluster.snapshot import SnapshotStore
        from tandem.errors import DiskFullError
        from tests.cluster.test_snapshot import LAST, entry
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        store = SnapshotStore(Path({str(tmp_path)!r}))
        store.load()
        store.replace([entry(0)], LAST)
        kept = 0
        try:
            for number in range(1, 1000):
                store.append([entry(number)], LAST)
                kept = number
        except DiskFullError as error:
            print(kept, store.degraded == error.message)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    kept, degraded = done.stdout.split()
    assert degraded == "True"
    recovered = SnapshotStore(tmp_path).load()
    assert len(newest(recovered)) == int(kept) + 1 > 10
    assert recovered.damage


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    store = store_in(tmp_path)
    with pytest.raises(StorageError, match="permissions"):
        store.replace([entry(1)], LAST)
    tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "intents").write_text("")
    store = store_in(tmp_path / "intents")
    with pytest.raises(StorageError, match="Repair"):
        store.replace([entry(1)], LAST)
    assert store.degraded


def test_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    path = file(tmp_path, ".snapshot")
    from tandem.cluster import records

    head = records._HEADER.pack(MAGIC, 2, 2, records._header_sum(2, 2))
    path.write_bytes(head + path.read_bytes()[len(head) :])
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(NewerFormatError, match="Install that version again, or move the folder away"):
        SnapshotStore(tmp_path).load()
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_sound_record_of_an_unknown_kind_is_of_a_newer_version(tmp_path: Path) -> None:
    write(tmp_path)
    with file(tmp_path, ".log").open("ab") as log:
        log.write(record(b"\xa5later", 2))
    with pytest.raises(NewerFormatError, match="does not know"):
        SnapshotStore(tmp_path).load()


def test_records_of_another_generation_are_not_believed() -> None:
    stale = record(b"old", 1)
    found = scan(header(2) + record(b"new", 2) + stale, 2, "file")
    assert found.payloads == (b"new",)
    assert found.damage


def test_a_long_log_asks_for_a_new_snapshot_and_old_generations_go(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, log_bytes=500)
    store.load()
    assert store.wants_everything
    for generation in range(1, 5):
        store.replace([entry(1)], LAST)
        assert len(list(tmp_path.iterdir())) == 2 * min(generation, 2)
        appended = 0
        while not store.wants_everything:
            store.append([entry(2)], LAST)
            appended += 1
        assert 2 < appended < 20
