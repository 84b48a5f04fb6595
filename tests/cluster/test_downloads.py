"""Models on two nodes: fetched from each other, from a hub, given up, gone on with, deleted. Real sockets and disks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster import downloads
from tandem.cluster.bus.config import free_port
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.errors import (
    CorruptModelError,
    InvalidRequestError,
    ModelError,
    NoSpaceError,
    NotFoundError,
    PlacementError,
    UnsupportedError,
)
from tandem.models import packaged
from tandem.models.arriving import ArrivingFile
from tandem.models.manifest import Manifest, ModelFile, manifest_of
from tandem.models.progress import Progress
from tandem.models.store import DOWNLOADS, LocalModel, ModelStore
from tandem.types.facts import DownloadFact
from tests.cluster.small_models import WEIGHTS, write_model
from tests.models.hub_server import Hub, Repository

pytestmark = pytest.mark.anyio
DEADLINE = 20.0
MODEL = "org/small"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_packaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "packaged_gguf", lambda: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
        yield server


class Pair:
    """Two nodes that know each other. `first` has the model, `second` has nothing."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port("tcp") for _ in range(2)]
        self.homes = [folder / "first", folder / "second"]
        self.files = write_model(self.homes[0] / "models" / "org--small", 6 << 20)
        self.first, self.second = (
            Node(
                Settings(
                    home=home,
                    cluster_port=port,
                    cluster_peers=f"127.0.0.1:{ports[0]}",
                )
            )
            for home, port in zip(self.homes, ports, strict=True)
        )

    @property
    def arrived(self) -> Path:
        return self.homes[1] / "models" / "org--small"

    @property
    def staging(self) -> Path:
        return self.homes[1] / "models" / DOWNLOADS / "org--small"

    async def until(self, node: Node, good: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE), node.control.log.subscribe() as events:
            while not good():
                await anext(events)

    def fact(self, seen_by: Node, of: Node, model_id: str = MODEL) -> DownloadFact | None:
        facts = seen_by.state.nodes.get(of.node_id)
        return next((one for one in facts.downloads if one.model_id == model_id), None) if facts else None

    async def is_fact(self, seen_by: Node, of: Node, state: str) -> DownloadFact:
        def good() -> bool:
            fact = self.fact(seen_by, of)
            return fact is not None and fact.state == state

        await self.until(seen_by, good)
        fact = self.fact(seen_by, of)
        assert fact is not None
        return fact

    def check(self) -> None:
        for name, content in self.files.items():
            assert (self.arrived / name).read_bytes() == content
        assert not self.staging.exists()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path)
    for node in (pair.first, pair.second):
        await node.start()
    await pair.is_fact(pair.second, pair.first, "completed")
    await pair.until(pair.first, lambda: pair.second.node_id in pair.first.state.nodes)
    yield pair
    for node in (pair.first, pair.second):
        await node.stop()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Weights stop being written after their first pieces, until the event is set."""
    go = threading.Event()
    write = ArrivingFile.write

    def wait(self: ArrivingFile, piece: bytes) -> None:
        if self.wanted > 1 << 20 and self.size >= 2 << 20:
            go.wait(DEADLINE)
        write(self, piece)

    monkeypatch.setattr(ArrivingFile, "write", wait)
    yield go
    go.set()


@pytest.mark.parametrize("asked_of", ["first", "second"])
async def test_a_model_comes_from_the_node_that_has_it(pair: Pair, hub: Hub, asked_of: str) -> None:
    """Whichever node is asked, the one that is named fetches."""
    node = getattr(pair, asked_of)
    begun = await node.downloads.start(pair.second.node_id, MODEL)
    assert begun.state in ("ongoing", "completed")
    fact = await pair.is_fact(pair.first, pair.second, "completed")
    assert fact.done == fact.total > 6 << 20
    pair.check()
    assert hub.requests == []
    assert (await node.downloads.start(pair.second.node_id, MODEL)).state == "completed"


async def test_cancelled_at_once_and_gone_on_with(pair: Pair, slow_disk: threading.Event) -> None:
    await pair.first.downloads.start(pair.second.node_id, MODEL)

    def some() -> bool:
        fact = pair.fact(pair.first, pair.second)
        return fact is not None and fact.state == "ongoing" and fact.done > 1 << 20

    await pair.until(pair.first, some)
    began = time.monotonic()
    fact = await pair.first.downloads.cancel(pair.second.node_id, MODEL)
    seconds = time.monotonic() - began
    assert (fact.state, seconds < 1.0) == ("cancelled", True)
    await pair.is_fact(pair.first, pair.second, "cancelled")
    [partial] = pair.staging.glob(f"{WEIGHTS}.*.part")
    kept = partial.stat().st_size
    assert kept >= 2 << 20
    slow_disk.set()
    asked: list[int] = []
    file = pair.second.client.file

    def spy(*arguments: Any, start: int = 0) -> Any:
        asked.append(start)
        return file(*arguments, start=start)

    pair.second.client.file = spy  # type: ignore[method-assign]
    await pair.second.downloads.start(pair.second.node_id, MODEL)
    await pair.is_fact(pair.second, pair.second, "completed")
    assert max(asked) >= kept
    pair.check()
    with pytest.raises(NotFoundError, match="not fetching"):
        await pair.first.downloads.cancel(pair.second.node_id, MODEL)


async def test_what_is_damaged_is_fetched_anew(pair: Pair) -> None:
    """Garbage under the partial file's name, a whole file of other content, and something planted."""
    pair.staging.mkdir(parents=True)
    size = len(pair.files[WEIGHTS])
    (pair.staging / f"{WEIGHTS}.{size:016x}.part").write_bytes(bytes(1 << 20))
    (pair.staging / "config.json").write_bytes(bytes(len(pair.files["config.json"])))
    (pair.staging / "tokenizer.json").symlink_to(pair.homes[1] / "node_id")
    (pair.staging / "other.json").write_text("{}")
    identity = (pair.homes[1] / "node_id").read_text()
    await pair.second.downloads.start(pair.second.node_id, MODEL)
    await pair.is_fact(pair.second, pair.second, "completed")
    pair.check()
    assert not (pair.arrived / "other.json").exists()
    assert not (pair.arrived / "tokenizer.json").is_symlink()
    assert (pair.homes[1] / "node_id").read_text() == identity


async def test_a_hubs_partial_file_is_gone_on_with(pair: Pair) -> None:
    pair.staging.mkdir(parents=True)
    (pair.staging / f"{WEIGHTS}.{'a' * 16}.part").write_bytes(pair.files[WEIGHTS][: 1 << 20])
    await pair.second.downloads.start(pair.second.node_id, MODEL)
    await pair.is_fact(pair.second, pair.second, "completed")
    pair.check()


async def test_deleting(pair: Pair, slow_disk: threading.Event) -> None:
    here, there = pair.first, pair.second
    instance = await there.launch("sim:model_id=held")
    for wrong in (
        here.downloads.delete("nobody", MODEL),
        here.downloads.delete(there.node_id, MODEL),
        there.downloads.delete(there.node_id, "org/unknown"),
        here.downloads.start("nobody", MODEL),
        here.downloads.cancel(there.node_id, MODEL),
    ):
        with pytest.raises(NotFoundError):
            await wrong
    with pytest.raises(InvalidRequestError):
        await here.downloads.delete(there.node_id, "/etc")
    with pytest.raises(InvalidRequestError):
        await here.downloads.start(there.node_id, "/etc")
    with pytest.raises(PlacementError, match=instance):
        await here.downloads.delete(there.node_id, "held")
    # An unfinished download, in the middle.
    await here.downloads.start(there.node_id, MODEL)
    await pair.until(here, lambda: (fact := pair.fact(here, there)) is not None and fact.done > 1 << 20)
    assert await here.downloads.delete(there.node_id, MODEL) > 1 << 20
    assert not pair.staging.exists()
    await pair.until(here, lambda: pair.fact(here, there) is None)
    # A complete model.
    slow_disk.set()
    assert await there.downloads.delete(here.node_id, MODEL) >= 6 << 20
    assert not (pair.homes[0] / "models" / "org--small").exists()
    await pair.until(there, lambda: pair.fact(there, here) is None)


async def test_what_is_not_the_stores_stays(tmp_path: Path) -> None:
    write_model(tmp_path / "shelf" / "mine")
    node = Node(Settings(home=tmp_path / "home", models_dirs=str(tmp_path / "shelf")))
    await node.start()
    with pytest.raises(UnsupportedError, match="only reads"):
        await node.downloads.delete(node.node_id, "mine")
    await node.stop()
    assert (tmp_path / "shelf" / "mine" / WEIGHTS).is_file()


async def test_too_small_a_disk_is_said_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.models.disk.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(NoSpaceError, match="GB are free"):
        await pair.first.downloads.start(pair.second.node_id, MODEL)
    assert (await pair.is_fact(pair.first, pair.second, "failed")).error


async def test_an_instance_gets_its_model_from_the_other_node(pair: Pair, hub: Hub) -> None:
    both = await asyncio.gather(*(pair.second.downloads.obtain(MODEL) for _ in range(2)))
    assert all(isinstance(model, LocalModel) and model.path == pair.arrived for model in both)
    assert hub.requests == []
    pair.check()


async def test_a_node_that_has_just_started_waits_for_its_cluster(tmp_path: Path, hub: Hub) -> None:
    """Before it asks the hub, which has the model, too."""
    pair = Pair(tmp_path)
    hub.repositories[MODEL] = Repository({**pair.files, "config.json": pair.files["config.json"] + b" "})
    await pair.first.start()
    try:
        await pair.is_fact(pair.first, pair.first, "completed")
        await pair.second.start()
        steps: list[Progress] = []
        model = await pair.second.downloads.obtain(MODEL, steps.append)
        assert isinstance(model, LocalModel)
        assert hub.requests == []
        pair.check()
        assert steps[-1].done == steps[-1].total > 6 << 20
    finally:
        await pair.second.stop()
        await pair.first.stop()


async def test_a_node_without_a_cluster_asks_the_hub_after_a_while(tmp_path: Path, hub: Hub) -> None:
    hub.repositories["org/other"] = Repository(write_model(tmp_path / "files"))
    for peers, least in (("", 0.0), (f"127.0.0.1:{free_port('tcp')}", downloads.FORMING_SECONDS - 1.0)):
        node = Node(Settings(home=tmp_path / f"home{least}", cluster_peers=peers))
        await node.start()
        began = time.monotonic()
        model = await node.downloads.obtain("org/other")
        assert isinstance(model, LocalModel)
        assert time.monotonic() - began >= least
        await node.stop()


async def test_a_cancelled_download_is_its_instances_error(pair: Pair, slow_disk: threading.Event) -> None:
    waiting = asyncio.create_task(pair.second.downloads.obtain(MODEL))
    await pair.is_fact(pair.first, pair.second, "ongoing")
    await pair.first.downloads.cancel(pair.second.node_id, MODEL)
    with pytest.raises(ModelError, match="was cancelled") as caught:
        await waiting
    assert caught.value.permanent


async def test_nobody_waits_any_more(pair: Pair, slow_disk: threading.Event) -> None:
    """An instance that is removed while its model arrives ends the download."""
    waiting = asyncio.create_task(pair.second.downloads.obtain(MODEL))
    await pair.is_fact(pair.first, pair.second, "ongoing")
    waiting.cancel()
    await pair.is_fact(pair.first, pair.second, "cancelled")


async def test_from_the_hub_if_no_node_has_it(pair: Pair, hub: Hub) -> None:
    files = {**pair.files, "config.json": pair.files["config.json"] + b" "}
    hub.repositories["org/other"] = Repository(files)
    reached = hub.hold(WEIGHTS, 3 << 20)
    await pair.first.downloads.start(pair.second.node_id, "org/other")
    assert await asyncio.to_thread(reached.wait, DEADLINE)
    began = time.monotonic()
    fact = await pair.first.downloads.cancel(pair.second.node_id, "org/other")
    assert (fact.state, time.monotonic() - began < 1.0) == ("cancelled", True)
    hub.faults.clear()
    hub.holding.pop(WEIGHTS).set()
    await pair.first.downloads.start(pair.second.node_id, "org/other")
    await pair.until(
        pair.first,
        lambda: (fact := pair.fact(pair.first, pair.second, "org/other")) is not None and fact.state == "completed",
    )
    # The other node has it now, and so the hub is not asked again.
    hub.requests.clear()
    await pair.first.downloads.start(pair.first.node_id, "org/other")
    await pair.until(
        pair.first,
        lambda: (fact := pair.fact(pair.first, pair.first, "org/other")) is not None and fact.state == "completed",
    )
    assert hub.requests == []
    with pytest.raises(ModelError, match="no public model"):
        await pair.first.downloads.start(pair.second.node_id, "org/nothing")
    with pytest.raises(NotFoundError):
        await pair.first.downloads.start(pair.second.node_id, "nothing")


@pytest.mark.parametrize(
    "path",
    ["../x.json", "/etc/x.json", "a/../../x.json", "additional_chat_templates/../../x.jinja", "x\0.json", ".x.json",
     "tandem.json", "a\\..\\x.json", "", "x.py", "additional_chat_templates//x.jinja"],
)  # fmt: skip
def test_lists_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(CorruptModelError):
        Manifest("m", (ModelFile("config.json", 1), ModelFile(path, 1))).check()


def test_lists_that_are_odd_are_refused() -> None:
    for files in ((), (ModelFile("x.json", 1), ModelFile("X.json", 1)), (ModelFile("x.json", -1),)):
        with pytest.raises(CorruptModelError):
            Manifest("m", files).check()


async def test_links_are_not_followed(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "org--small")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "models" / "org--small" / "extra.json").symlink_to(tmp_path / "secret.json")
    store = ModelStore(Settings(home=tmp_path))
    model = store.find(MODEL)
    assert model is not None
    with pytest.raises(NotFoundError, match="links"):
        manifest_of(model)
    node = Node(Settings(home=tmp_path))
    assert node.models.file_of(MODEL, "config.json").is_file()
    for path in ("extra.json", "../../secret.json", "../org--small/config.json", str(tmp_path / "secret.json")):
        with pytest.raises(NotFoundError):
            node.models.file_of(MODEL, path)
    with pytest.raises(NotFoundError):
        node.models.file_of(str(tmp_path / "models" / "org--small"), "config.json")
