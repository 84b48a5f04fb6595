"""Starting is instant, and mistakes are explained."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tandem import __version__
from tandem.cli import main as cli

from .conftest import Run

HEAVY = (
    "fastapi",
    "gguf",
    "httpx",
    "huggingface_hub",
    "mlx",
    "mlx_lm",
    "numpy",
    "pydantic_settings",
    "transformers",
    "uvicorn",
)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["up", "--help"], ["models", "--help"], ["status", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys, atexit, json; sys.argv = ['tandem', *{arguments!r}]\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from tandem.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert "tandem.cli.main" in modules
    assert modules.isdisjoint(HEAVY)


def test_version(tandem: Run) -> None:
    assert tandem("--version").stdout.strip() == f"tandem {__version__}"


def test_every_command_is_listed(tandem: Run) -> None:
    listed = tandem("--help").stdout
    commands = "demo up run chat models status nodes place instances links cluster doctor verify kv bench"
    for command in commands.split():
        assert f" {command} " in listed


def test_the_bench_commands_are_found(tandem: Run) -> None:
    assert " serve " in tandem("bench", "--help").stdout


def test_unknown_command_suggests_the_nearest(tandem: Run) -> None:
    done = tandem("rum")
    assert done.returncode == 2
    assert "Did you mean 'run'?" in done.stderr


def test_unknown_model_is_one_line_that_says_what_to_do(tandem: Run) -> None:
    done = tandem("models", "show", "SmolLM2-135M-Instrukt")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "Did you mean " in line
    assert "SmolLM2-135M-Instruct" in line


def test_debug_shows_where(tandem: Run) -> None:
    done = tandem("models", "show", "nothing-of-this-name", TANDEM_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_bad_environment_variable_is_named(tandem: Run) -> None:
    done = tandem("models", "list", TANDEM_PORT="99999")
    assert done.returncode == 1
    assert "TANDEM_PORT=99999" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_flag_is_named(tandem: Run) -> None:
    done = tandem("up", "sim", "--max-batch", "0")
    assert done.returncode == 1
    assert "--max-batch=0" in done.stderr


def test_the_unexpected_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def explode(prog_name: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(cli, "app", explode)
    monkeypatch.delenv("TANDEM_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: Unexpected RuntimeError: two lines.")
    assert "TANDEM_DEBUG=1" in line


@pytest.mark.parametrize(("words", "expected"), [("tandem mo", "models"), ("tandem models pu", "pull")])
def test_shell_completion(tandem: Run, words: str, expected: str) -> None:
    count = str(len(words.split()) - 1)
    done = tandem(
        _TANDEM_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD=count,
    )
    assert expected in done.stdout.split()


def test_completion_knows_the_models_here(tandem: Run) -> None:
    words = "tandem run --model Smol"
    done = tandem(
        _TANDEM_COMPLETE="complete_bash",
        COMP_WORDS=words,
        COMP_CWORD="3",
    )
    assert "SmolLM2-135M-Instruct" in done.stdout.split()
