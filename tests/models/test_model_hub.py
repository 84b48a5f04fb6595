"""Fetching from a hub, through the real client, from a server of our own."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_gguf as tiny
from hub_server import COMMIT, Fault, Hub, Repository

from tandem.config import Settings
from tandem.errors import CancelledError, DownloadError, NotFoundError, UnsupportedModelError
from tandem.models import hub as hub_module
from tandem.models import packaged
from tandem.models.folder import check_model_folder
from tandem.models.progress import Progress
from tandem.models.store import ModelStore

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository's files: a small model, and what a model does not need."""
    folder = tiny.write_folder(tmp_path_factory.mktemp("hub") / "x", "qwen3", tiny.weights("qwen3"))
    return {
        "config.json": (folder / "config.json").read_bytes(),
        WEIGHTS: (folder / WEIGHTS).read_bytes(),
        "tokenizer.json": b'{"model": {}}',
        "chat_template.jinja": b"{{ messages }}",
        "LICENSE": b"free",
        "README.md": b"# Model",
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": bytes(10_000),
        "original/consolidated.safetensors": bytes(10_000),
        "consolidated.safetensors": bytes(10_000),
        "onnx/model.onnx": bytes(10_000),
    }


WANTED = {"config.json", WEIGHTS, "tokenizer.json", "chat_template.jinja", "LICENSE"}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        server.repositories["org/tiny"] = Repository(dict(files))
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # Tests of other packages keep their clients off the network; this hub is on loopback.
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
        monkeypatch.setattr(packaged, "packaged_gguf", lambda: None)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's pauses between its own retries
        yield server


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_is_fetched_whole_and_nothing_more(hub: Hub, store: ModelStore, files: dict[str, bytes]) -> None:
    seen: list[Progress] = []
    model = store.obtain("org/tiny", seen.append)
    assert (model.model_id, model.source, model.removable) == ("org/tiny", "hub", True)
    assert names(model.path) == WANTED | {"tandem.json"}
    for name in WANTED:
        assert (model.path / name).read_bytes() == files[name]
    check_model_folder(model.path)
    assert json.loads((model.path / "tandem.json").read_text())["commit"] == COMMIT
    total = sum(len(files[name]) for name in WANTED)
    assert seen[-1] == Progress("download", total, total, "bytes")
    assert all(before.done <= after.done for before, after in itertools.pairwise(seen))
    assert not hub.fetched("README.md")
    assert not hub.fetched("modeling.py")
    assert list((store.settings.models_dir / ".downloads").iterdir()) == []


def test_what_is_here_is_not_fetched_again(hub: Hub, store: ModelStore) -> None:
    store.obtain("org/tiny")
    hub.requests.clear()
    hub.everything = Fault(status=500)
    assert store.obtain("ORG/Tiny").model_id == "org/tiny"
    assert hub.requests == []


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"].token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    store.obtain("org/tiny")
    for request in hub.requests:
        expected = "Bearer hf_secret" if hub.address.endswith(request.host) else None
        assert request.authorization == expected, request
    assert any(hub.storage.endswith(request.host) for request in hub.requests)


def test_a_cut_connection_is_resumed_at_once(hub: Hub, store: ModelStore, files: dict[str, bytes]) -> None:
    hub.faults[WEIGHTS] = Fault(cut_after=10_000, cuts=2)
    model = store.obtain("org/tiny")
    assert (model.path / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert len(hub.fetched(WEIGHTS)) == 3


KILLED_WHILE_FETCHING = """
import sys
from pathlib import Path
from tandem.config import Settings
from tandem.models.store import ModelStore

ModelStore(Settings(home=Path(sys.argv[1]))).obtain("org/tiny")
"""


def test_a_killed_download_goes_on_where_it_was(
    hub: Hub, store: ModelStore, home: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"].files[WEIGHTS] = files[WEIGHTS]
    halfway = len(files[WEIGHTS]) // 2
    partial = home / "models" / ".downloads" / "org--tiny"
    # An earlier run's partial file, as a kill between two chunks leaves it.
    digest = hub_module.list_repository("org/tiny").files
    weights = next(file for file in digest if file.path == WEIGHTS)
    partial.mkdir(parents=True)
    (partial / f"{WEIGHTS}.{weights.digest[:16]}.part").write_bytes(files[WEIGHTS][:halfway])
    seen: list[Progress] = []
    model = store.obtain("org/tiny", seen.append)
    assert [request.range for request in hub.fetched(WEIGHTS)] == [f"bytes={halfway}-"]
    assert (model.path / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert seen[-1].done == seen[-1].total


def test_a_killed_download_shows_no_model_and_keeps_whole_files(hub: Hub, store: ModelStore, home: Path) -> None:
    reached = hub.hold(WEIGHTS, after=10_000)
    process = subprocess.Popen([sys.executable, "-c", KILLED_WHILE_FETCHING, str(home)])
    reached.wait(60)
    assert reached.is_set()
    staging = home / "models" / ".downloads" / "org--tiny"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.list() == []
    with pytest.raises(NotFoundError, match="tandem models pull org/tiny"):
        store.locate("org/tiny")
    before = names(staging)
    hub.holding[WEIGHTS].set()
    hub.faults.clear()
    hub.requests.clear()
    model = store.obtain("org/tiny")
    check_model_folder(model.path)
    for name in before & WANTED:
        assert not hub.fetched(name), "was there already"


def test_an_unfinished_download_can_be_removed(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WORKERS", 1)  # so that the config has arrived before the weights fail
    hub.faults[WEIGHTS] = Fault(status=503)
    with pytest.raises(DownloadError):
        store.obtain("org/tiny")
    assert store.remove("org/tiny") > 0
    assert list((store.settings.models_dir / ".downloads").iterdir()) == []
    with pytest.raises(NotFoundError):
        store.remove("org/tiny")


def test_partial_files_of_another_commit_are_not_used(hub: Hub, store: ModelStore, files: dict[str, bytes]) -> None:
    hub.faults[WEIGHTS] = Fault(cut_after=10_000, cuts=100)
    with pytest.raises(DownloadError):
        store.obtain("org/tiny")
    changed = bytearray(files[WEIGHTS])
    changed[-1] ^= 1
    newer = Repository({**files, WEIGHTS: bytes(changed), "LICENSE": b"other"}, commit="d" * 40)
    del newer.files["chat_template.jinja"]
    hub.repositories["org/tiny"] = newer
    hub.faults.clear()
    hub.requests.clear()
    model = store.obtain("org/tiny")
    assert (model.path / WEIGHTS).read_bytes() == bytes(changed)
    assert (model.path / "LICENSE").read_bytes() == b"other"
    assert names(model.path) == WANTED - {"chat_template.jinja"} | {"tandem.json"}
    assert [request.range for request in hub.fetched(WEIGHTS)] == [None]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_damaged_file_is_fetched_again(hub: Hub, store: ModelStore, files: dict[str, bytes], name: str) -> None:
    hub.faults[name] = Fault(corrupt=1)
    model = store.obtain("org/tiny")
    assert (model.path / name).read_bytes() == files[name]
    assert len(hub.fetched(name)) == 2


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_stays_damaged_is_refused(hub: Hub, store: ModelStore, name: str) -> None:
    hub.faults[name] = Fault(corrupt=100)
    with pytest.raises(DownloadError, match=f"{name}.*damaged"):
        store.obtain("org/tiny")
    assert store.list() == []
    assert name not in names(store.settings.models_dir / ".downloads" / "org--tiny")


def test_two_fetches_at_once_fetch_once(hub: Hub, store: ModelStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda _: store.obtain("org/tiny"), range(2)))
    assert models[0] == models[1]
    assert len(hub.fetched(WEIGHTS)) == 1


def test_a_callback_that_raises_stops_the_download(hub: Hub, store: ModelStore) -> None:
    def cancel(progress: Progress) -> None:
        if progress.done > 0:
            raise CancelledError("enough")

    with pytest.raises(CancelledError, match="enough"):
        store.obtain("org/tiny", cancel)
    assert store.list() == []
    assert store.obtain("org/tiny").ready


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (lambda hub: hub.repositories.clear(), "no public model org/tiny.*HF_TOKEN"),
        (lambda hub: setattr(hub.repositories["org/tiny"], "token", "t"), "no public model org/tiny.*HF_TOKEN"),
        (lambda hub: hub.repositories.update({"org/tiny": gated(hub)}), "gated.*Accept its terms.*HF_TOKEN"),
        (lambda hub: setattr(hub, "everything", Fault(status=500)), "answers 500"),
        (lambda hub: setattr(hub, "everything", Fault(status=403)), "403"),
    ],
    ids=["unknown", "private", "gated", "broken", "forbidden"],
)
def test_refusals_say_what_to_do(hub: Hub, store: ModelStore, arrange, message: str) -> None:  # type: ignore[no-untyped-def]
    arrange(hub)
    with pytest.raises(DownloadError, match=message):
        store.obtain("org/tiny")
    assert store.list() == []


def gated(hub: Hub) -> Repository:
    return Repository(hub.repositories["org/tiny"].files, token="t", gated=True)


def test_a_wrong_token_is_said_to_be_wrong(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tiny"].token = "right"
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(DownloadError, match=r"HF_TOKEN"):
        store.obtain("org/tiny")


def test_too_many_requests_names_the_wait(hub: Hub, store: ModelStore) -> None:
    hub.everything = Fault(status=429, headers={"Retry-After": "7"})
    with pytest.raises(DownloadError, match="7 seconds") as error:
        store.obtain("org/tiny")
    assert error.value.retry_after == 7


def test_no_network_is_said_to_be_that(store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(DownloadError, match=r"cannot be reached.*HF_ENDPOINT"):
        store.obtain("org/tiny")


@pytest.mark.parametrize("how", ["setting", "environment"])
def test_offline_asks_nobody(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    store = ModelStore(Settings(home=home, offline=how == "setting"))
    with pytest.raises(DownloadError, match=r"offline.*tandem models import"):
        store.obtain("org/tiny")
    assert hub.requests == []


def test_offline_still_finds_what_is_here(hub: Hub, home: Path, store: ModelStore) -> None:
    store.obtain("org/tiny")
    assert ModelStore(Settings(home=home, offline=True)).obtain("org/tiny").ready


def test_too_small_a_disk_is_noticed_first(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "RESERVE", 1 << 60)
    with pytest.raises(DownloadError, match="TANDEM_HOME"):
        store.obtain("org/tiny")
    assert hub.fetched(WEIGHTS) == []


def test_a_repository_without_safetensors_is_refused(hub: Hub, store: ModelStore, files: dict[str, bytes]) -> None:
    hub.repositories["org/tiny"].files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        store.obtain("org/tiny")
    hub.repositories["org/tiny"].files = {"x-Q4_K_M.gguf": b"GGUF"}
    with pytest.raises(UnsupportedModelError, match=r"x-Q4_K_M\.gguf.*tandem models import"):
        store.obtain("org/tiny")


def test_an_impossible_name_is_not_found(hub: Hub, store: ModelStore) -> None:
    with pytest.raises(NotFoundError):
        store.obtain("no such/na me")


def test_a_cards_alias_fetches_under_the_cards_id(hub: Hub, store: ModelStore) -> None:
    hub.repositories["HuggingFaceTB/SmolLM2-135M-Instruct"] = hub.repositories["org/tiny"]
    model = store.obtain("demo")
    assert model.model_id == "SmolLM2-135M-Instruct"
    assert model.source == "hub"
    assert store.locate("HuggingFaceTB/SmolLM2-135M-Instruct") == model


def test_unsafe_paths_in_a_listing_are_not_followed(hub: Hub, store: ModelStore, home: Path) -> None:
    hub.repositories["org/tiny"].files["../../../escape.json"] = b"{}"
    hub.repositories["org/tiny"].files["additional_chat_templates/../../../x.jinja"] = b"{}"
    hub.repositories["org/tiny"].files["/abs.json"] = b"{}"
    model = store.obtain("org/tiny")
    assert names(model.path) == WANTED | {"tandem.json"}
