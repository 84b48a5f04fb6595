"""Work in threads that nobody waits for any more."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
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


class Held:
    """Work that waits in its first step until nobody waits for it any more."""

    def __init__(self) -> None:
        self._begun, self._go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def step(self) -> None:
        """In the thread."""
        self._begun.set()
        assert self._go.wait(DEADLINE)

    async def give_up(self, work: Awaitable[object]) -> None:
        """Cancel the work in its first step, and see it end after that."""
        task = asyncio.ensure_future(work)
        assert await asyncio.to_thread(self._begun.wait, DEADLINE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self._go.set()
        assert await asyncio.to_thread(self.ended.wait, DEADLINE)


async def test_work_ends_at_its_next_step() -> None:
    held = Held()

    def work(check: Check) -> None:
        try:
            check()
            held.step()
            check()
            raise AssertionError("it goes on")
        except CancelledError:
            held.ended.set()

    await held.give_up(in_thread(work))


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
    held = Held()

    def hold(progress: Progress) -> None:
        steps.append(progress)
        held.step()

    def build(*arguments: object) -> Path:
        try:
            return build_once(*arguments)  # type: ignore[arg-type]
        finally:
            held.ended.set()

    monkeypatch.setattr(store, "build_once", build)
    models = ModelStore(Settings(home=tmp_path / "home"))
    await held.give_up(LocalModels(models).obtain(str(path), hold))
    assert len(steps) == 1
    assert [one for one in models.settings.converted_dir.iterdir() if not one.name.startswith(".locks")] == []


async def test_a_hash_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what an earlier try left of a file: of a large one that takes minutes."""
    monkeypatch.setattr(manifest, "CHUNK", 1024)
    file = ModelFile("model.safetensors", 1 << 20)
    partial_of(tmp_path, file).write_bytes(os.urandom(1 << 19))
    checks, held = 0, Held()

    def work(check: Check) -> None:
        def counted() -> None:
            nonlocal checks
            checks += 1
            held.step()
            check()

        try:
            ArrivingFile(tmp_path, file, counted)
        finally:
            held.ended.set()

    await held.give_up(in_thread(work))
    assert checks == 1
    assert partial_of(tmp_path, file).stat().st_size == 1 << 19
