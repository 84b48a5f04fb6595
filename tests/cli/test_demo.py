"""`tandem demo`: two real nodes, a real hand-off, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.cli.demo_text import TEXT
from tandem.cli.timeline import draw, rows, scale
from tandem.types import Statistics
from tandem.types.events import HandoffStatistics

from .conftest import TANDEM, Run, environment


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the demonstration puts its folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def children_of(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def test_a_prompt_is_handed_off(tandem: Run, temporary: Path, home: Path) -> None:
    # A person's own settings are none of its business.
    more = {"TANDEM_API_KEY": "x", "TANDEM_CLUSTER_SECRET": "long enough for a secret", "TANDEM_KV_PORT": "-1"}
    done = tandem("demo", "--model", "sim", "--json", TMPDIR=str(temporary), **more)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    handoff = answer["statistics"]["handoff"]
    assert handoff["prefill"] == "remote"
    assert handoff["remote_tokens"] == answer["usage"]["prompt_tokens"] - 1
    assert handoff["bytes"] > 0
    assert answer["text"]
    assert list(temporary.iterdir()) == []
    assert not (home / "node_id").exists()


def test_what_people_see(tandem: Run, temporary: Path) -> None:
    done = tandem("demo", "--model", "sim", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    for part in ("reader reads", "cache travels", "writer writes", "first token", "why", "http://127.0.0.1:"):
        assert part in done.stdout


@pytest.mark.real_model
def test_the_real_model_twice(tandem: Run, temporary: Path) -> None:
    answers = [json.loads(tandem("demo", "--json", TMPDIR=str(temporary)).stdout) for _ in range(2)]
    for answer in answers:
        assert answer["statistics"]["handoff"]["remote_tokens"] >= 300
    assert answers[0]["text"] == answers[1]["text"]


class Keeping:
    """A `tandem demo --keep`."""

    def __init__(self, home: Path, temporary: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*TANDEM, "demo", "--keep", *arguments],
            env=environment(home, TMPDIR=str(temporary), PYTHONUNBUFFERED="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, words: str, stream: str = "stdout") -> list[psutil.Process]:
        """Read until a line with these words, and return the processes that are there then."""
        lines = getattr(self.process, stream)
        seen = []
        for line in lines:
            seen.append(line)
            if words in line:
                return children_of(self.process.pid)
        raise AssertionError(f"no {words!r} in {seen}")

    def close(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        if self.process.poll() is None:
            left = children_of(self.process.pid)
            self.process.kill()
            for one in left:
                one.kill()
        self.process.communicate()


@pytest.fixture
def keeping(home: Path, temporary: Path) -> Iterator[Keeping]:
    demo = Keeping(home, temporary, "--model", "sim")
    yield demo
    demo.close()


# Ctrl-C has a test of its own.
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] if "TANDEM_TEST_LONG" in os.environ else [signal.SIGTERM],
)
def test_it_runs_until_it_is_asked_to_end(keeping: Keeping, temporary: Path, number: signal.Signals) -> None:
    started = keeping.until("Ctrl-C ends them")
    assert len(started) >= 4  # two nodes, two runners
    keeping.process.send_signal(number)
    assert keeping.process.wait(30) == 0
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert list(temporary.iterdir()) == []


def test_ctrl_c_while_nodes_start_ends_them(keeping: Keeping, temporary: Path) -> None:
    keeping.until("loading sim", "stderr")
    started = children_of(keeping.process.pid)
    assert started
    keeping.process.send_signal(signal.SIGINT)
    assert keeping.process.wait(30) == 130
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert list(temporary.iterdir()) == []


def test_ctrl_c_in_a_terminal_reaches_the_whole_group(keeping: Keeping) -> None:
    started = keeping.until("Ctrl-C ends them")
    os.killpg(keeping.process.pid, signal.SIGINT)
    assert keeping.process.wait(30) == 0
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_its_nodes_end_when_it_is_killed(keeping: Keeping) -> None:
    started = keeping.until("Ctrl-C ends them")
    assert len(started) >= 4
    keeping.process.kill()
    keeping.process.wait(30)
    left = psutil.wait_procs(started, timeout=20)[1]
    for one in left:
        one.kill()
    assert left == []


def test_a_node_that_cannot_start_says_why(tandem: Run, temporary: Path) -> None:
    done = tandem("demo", "--model", "sim:max_restarts=nothing", TMPDIR=str(temporary))
    assert done.returncode == 1
    assert "max_restarts" in done.stderr
    failing = tandem("demo", "--model", "sim:fail_at_load=true", TMPDIR=str(temporary), COLUMNS="80")
    assert failing.returncode == 1
    assert "ended before it was ready" in failing.stderr.splitlines()[-1]
    assert list(temporary.iterdir()) == []


def test_the_prompt_is_long_enough_to_try_an_unknown_peer() -> None:
    from tandem.engines.handoff.remote import UNKNOWN_WORTH_TOKENS

    assert len(TEXT.split()) > UNKNOWN_WORTH_TOKENS


HANDOFF = HandoffStatistics("remote", "", "peer", "raw", 299, 1, 1000, 0.5, 1.0, 0.5)
STATISTICS = Statistics(300, 10, prefill_seconds=2.0, ttft_seconds=2.0, decode_seconds=2.0, handoff=HANDOFF)


def test_the_picture_is_to_scale() -> None:
    reading, moving, writing = draw(rows(STATISTICS, "a", "b"), 4.0, 16)
    assert "░░▓▓▓▓" in reading
    assert "····▒▒" in moving
    assert writing.index("█") - len("cache travels  ") == 8
    assert writing.count("█") == 8
    below = scale(STATISTICS, 40).split("\n")
    assert below[0].index("┴") == 20
    assert "first token 2.00 s" in below[1]
    assert below[1].endswith("4.00 s")


@pytest.mark.parametrize("seconds", [0.0, 1e-6])
def test_short_spans_are_seen_and_nothing_divides_by_zero(seconds: float) -> None:
    statistics = Statistics(3, 1, ttft_seconds=seconds, prefill_seconds=seconds)
    drawn = draw(rows(statistics, "a", "b"), seconds)
    assert all(len(line) >= 40 for line in drawn)
    assert scale(statistics)
