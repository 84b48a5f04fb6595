"""Work in threads that nobody waits for any more."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import gguf
import pytest

from tandem.cluster.local_models import LocalModels
from tandem.cluster.threads import Check, in_thread
from tandem.config import Settings
from tandem.errors import CancelledError
from tandem.models import manifest, packaged, store
from tandem.models.arriving import ArrivingFile, partial_of
from tandem.models.atomic import build_once
from tandem.models.manifest import ModelFile
from tandem.models.progress import Progress
from tandem.models.store import ModelStore
from tests.models import tiny_gguf

pytestmark = pytest.mark.anyio
DEADLINE = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_work_ends_at_its_next_step() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work(check: Check) -> None:
        try:
            check()
            begun.set()
            assert go.wait(DEADLINE)
            check()
            raise AssertionError("it goes on")
        except CancelledError:
            ended.set()

    task = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(begun.wait, DEADLINE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, DEADLINE)


async def test_results_and_errors_come_through() -> None:
    assert await in_thread(lambda check: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda check: 1 // 0)


async def test_a_conversion_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind."""
    monkeypatch.setattr(packaged, "packaged_gguf", lambda: None)
    kinds = gguf.GGMLQuantizationType
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", "llama", tiny_gguf.weights("llama"), kinds.F16)
    steps: list[Progress] = []
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def hold(progress: Progress) -> None:
        steps.append(progress)
        begun.set()
        assert go.wait(DEADLINE)

    def build(*arguments: object) -> Path:
        try:
            return build_once(*arguments)  # type: ignore[arg-type]
        finally:
            ended.set()

    monkeypatch.setattr(store, "build_once", build)
    models = ModelStore(Settings(home=tmp_path / "home"))
    task = asyncio.create_task(LocalModels(models).obtain(str(path), hold))
    assert await asyncio.to_thread(begun.wait, DEADLINE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, DEADLINE)
    assert len(steps) == 1
    assert [one for one in models.settings.converted_dir.iterdir() if not one.name.startswith(".locks")] == []


async def test_a_hash_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what an earlier try left of a file: of a large one that takes minutes."""
    monkeypatch.setattr(manifest, "CHUNK", 1024)
    file = ModelFile("model.safetensors", 1 << 20)
    partial_of(tmp_path, file).write_bytes(os.urandom(1 << 19))
    checks, begun, go, ended = 0, threading.Event(), threading.Event(), threading.Event()

    def work(check: Check) -> None:
        def counted() -> None:
            nonlocal checks
            checks += 1
            begun.set()
            assert go.wait(DEADLINE)
            check()

        try:
            ArrivingFile(tmp_path, file, counted)
        finally:
            ended.set()

    task = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(begun.wait, DEADLINE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, DEADLINE)
    assert checks == 1
    assert partial_of(tmp_path, file).stat().st_size == 1 << 19
