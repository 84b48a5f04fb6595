"""`tandem chat`: turns, commands, and Ctrl-C in a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import TANDEM, Run, environment


def prompts(errors: str) -> list[int]:
    """Prompt lengths, from the statistics lines. One sim token is one byte."""
    return [int(length) for length in re.findall(r"prompt (\d+) tokens", errors)]


def test_turns_build_on_one_another(tandem: Run) -> None:
    done = tandem("chat", "--model", "sim:script=Fine.", input="Hello\nAnd you?\n")
    assert done.returncode == 0
    assert done.stdout == "Fine.\nFine.\n"
    first, second = prompts(done.stderr)
    assert second > first + len("Fine.") + len("And you?")


def test_commands(tandem: Run) -> None:
    turns = "Hello\n/clear\nHello\n/system Be brief.\n/clear\nHello\n/nonsense\n/exit\nHello\n"
    done = tandem("chat", "--model", "sim:script=Fine.", input=turns)
    assert done.returncode == 0
    first, second, with_system = prompts(done.stderr)
    assert first == second
    assert with_system >= first + len("Be brief.")
    assert "There is no /nonsense." in done.stderr


def test_a_failed_answer_leaves_the_conversation_usable(tandem: Run) -> None:
    long = "x" * 600
    done = tandem("chat", "--model", "sim:context_length=256,script=Fine.", input=f"{long}\nHello\n")
    assert done.returncode == 0
    assert done.stdout == "Fine.\n"
    assert "Error: " in done.stderr
    assert len(prompts(done.stderr)) == 1


class Terminal:
    """A pseudo-terminal with `tandem chat` in it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.execve(TANDEM[0], [*TANDEM, "chat", *arguments], environment(home, TERM="dumb"))
        self._seen = ""

    def until(self, text: str) -> str:
        """Everything up to and including `text`."""
        while text not in self._seen:
            readable, _, _ = select.select([self._file], [], [], 60)
            assert readable, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._file, 4096).decode()
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._file, text.encode())

    def status(self) -> int:
        """Wait for the end."""
        while True:
            try:
                if not os.read(self._file, 4096):
                    break
            except OSError:  # Linux's way to say that the other side is closed
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Hang up."""
        os.close(self._file)


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    terminal = Terminal(home, "--model", "sim:decode_tps=20,answer_tokens=10000")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_only(terminal: Terminal) -> None:
    terminal.until(">>> ")
    terminal.type("Hello\n")
    terminal.until("Hello\r\n")
    terminal.until(" ")
    terminal.type("\x03")
    terminal.until("[stopped]")
    terminal.until(">>> ")
    terminal.type("half a line\x03")
    terminal.until("(/exit or Ctrl-D leaves)")
    terminal.until(">>> ")
    terminal.type("/exit\n")
    assert terminal.status() == 0
