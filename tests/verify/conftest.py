from __future__ import annotations

from tandem.engines.mlx import blas

BLAS = blas.load()  # before anything imports mlx

import ctypes  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
from engines import tiny  # noqa: E402

from tandem.cli.main import main  # noqa: E402
from tandem.config import Settings  # noqa: E402
from tandem.models.store import ModelStore  # noqa: E402
from tandem.verify.side import Address, prefill_runner  # noqa: E402

SERVER = Path(__file__).with_name("tampering.py")


@dataclass
class Ran:
    """What came of a command."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """What `--json` printed."""
        value: dict[str, Any] = json.loads(self.out)
        return value


Command = Callable[..., Ran]


@pytest.fixture(scope="session", autouse=True)
def _equal_threads() -> Iterator[None]:
    """As many BLAS threads here as in the processes that tests start: with others, sums are added up in other pieces.

    Other tests' conftest may have changed the environment after this process loaded its BLAS.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        if BLAS.library is not None:
            ctypes.CDLL(BLAS.library).openblas_set_num_threads(1)
        yield


@pytest.fixture
def tandem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process, which is the decode side then."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        assert isinstance(exit.value.code, int)
        return Ran(exit.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, built once."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda kind: tiny.build(kind, root / kind))


@pytest.fixture(scope="session")
def start_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Address]]:
    """Starts a prefill runner on a model folder, which runs until the session ends."""
    with ExitStack() as stack:

        def start(folder: Path, **changes: Any) -> Address:
            settings = Settings(home=tmp_path_factory.mktemp("runner"), **changes)
            model = ModelStore(settings).locate(str(folder))
            return stack.enter_context(
                prefill_runner(settings, model, 0, lambda node, instance: node.wait_ready(instance, 120))
            )()

        yield start


@pytest.fixture
def tampering() -> Iterator[Callable[[Path, str], str]]:
    """Starts a prefill server that does something wrong, and gives its `host:port`."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, fault: str) -> str:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(folder), fault], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the server ended before it listened"
        return f"127.0.0.1:{port}"

    yield start
    for process in started:
        process.communicate(timeout=30)  # closes its standard input, which ends it
