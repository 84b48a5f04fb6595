"""`tandem cluster`: one secret on several machines."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cluster.bus.secret import FILE, WORDS, read_secret

from .conftest import TANDEM, Run, Up, environment


def test_a_secret_is_made_once_and_kept_for_its_owner(tandem: Run, home: Path) -> None:
    first = tandem("cluster", "secret")
    assert first.returncode == 0, first.stderr
    words = first.stdout.strip()
    assert len(words.split()) == WORDS
    assert read_secret(words) == words
    assert f"tandem cluster join {words}" in first.stderr
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    again = json.loads(tandem("cluster", "secret", "--json").stdout)
    assert (again["secret"], again["created"]) == (words, False)


def test_another_machine_joins_and_leaves(tandem: Run, home: Path, tmp_path: Path) -> None:
    words = tandem("cluster", "secret").stdout.split()
    there = {"TANDEM_HOME": str(tmp_path / "there")}
    joined = tandem("cluster", "join", *words, **there)
    assert joined.returncode == 0, joined.stderr
    assert tandem("cluster", "secret", **there).stdout.split() == words
    assert json.loads(tandem("cluster", "show", "--json", **there).stdout)["reach"] == "secret"
    assert tandem("cluster", "leave", **there).returncode == 0
    shown = json.loads(tandem("cluster", "show", "--json", **there).stdout)
    assert (shown["reach"], shown["secret"]) == ("machine", "")
    assert json.loads(tandem("cluster", "leave", "--json", **there).stdout)["left"] is False
    assert (home / FILE).exists()


def test_words_are_read_from_standard_input(tandem: Run, tmp_path: Path) -> None:
    words = tandem("cluster", "secret").stdout
    there = {"TANDEM_HOME": str(tmp_path / "there")}
    assert tandem("cluster", "join", input=words, **there).returncode == 0
    assert tandem("cluster", "secret", **there).stdout == words


def test_a_wrong_word_is_named_and_nothing_is_kept(tandem: Run, tmp_path: Path) -> None:
    words = tandem("cluster", "secret").stdout.split()
    there = tmp_path / "there"
    done = tandem("cluster", "join", "tandemm", *words[1:], TANDEM_HOME=str(there))
    assert done.returncode == 1
    assert "Word 1" in done.stderr
    assert not (there / FILE).exists()


def test_a_secret_in_the_environment_counts_more_and_that_is_said(tandem: Run, tmp_path: Path) -> None:
    words = tandem("cluster", "secret").stdout.split()
    done = tandem(
        "cluster", "join", *words, TANDEM_HOME=str(tmp_path / "there"), TANDEM_CLUSTER_SECRET="another, longer text"
    )
    assert done.returncode == 0
    assert "unset it" in done.stderr


def test_a_file_that_others_can_read_is_refused_with_the_command_that_mends_it(tandem: Run, home: Path) -> None:
    tandem("cluster", "secret")
    (home / FILE).chmod(0o644)
    assert "chmod 600" in tandem("cluster", "secret").stderr
    report = json.loads(tandem("doctor", "--json").stdout)
    finding = next(check for check in report["checks"] if check["name"] == "cluster")
    assert finding["state"] == "failure"
    assert "chmod 600" in finding["summary"]


def test_show_says_how_to_go_further(tandem: Run) -> None:
    alone = tandem("cluster", "show").stdout
    assert "tandem cluster secret" in alone
    assert "tandem cluster join WORDS" in alone
    tandem("cluster", "secret")
    assert "this machine only" not in tandem("cluster", "show").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--name", "desk"), ("as desk; nobody else is there yet", "cluster join WORDS")),
        (("--open", "--cluster", "attic"), ("attic, as ", "OPEN: everyone on this network")),
    ],
)
def test_up_says_which_cluster_it_is_in(home: Path, arguments: tuple[str, ...], expected: tuple[str, ...]) -> None:
    command = [*TANDEM, "up", "sim", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        lines = []
        for line in up.stdout:
            lines.append(line)
            if line.strip().startswith("stop"):
                break
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)
    assert up.returncode == 0
    for part in expected:
        assert part in "".join(lines)


def test_a_peer_elsewhere_wants_a_secret(tandem: Run) -> None:
    done = tandem("up", "sim", "--port", "0", "--peers", "192.0.2.1:52414")
    assert done.returncode == 1
    assert "secret" in done.stderr
    wrong = tandem("up", "sim", "--port", "0", "--peers", "nowhere")
    assert wrong.returncode == 1
    assert "--peers=nowhere" in wrong.stderr


def test_a_copied_data_folder_is_said_to_be_that(up: Callable[..., Up], home: Path, tmp_path: Path) -> None:
    """Two nodes of one id: the second one ends, and says why and what to do."""
    together = {"TANDEM_CLUSTER_NAME": f"copied {tmp_path}", "TANDEM_CLUSTER_DISCOVERY": "true"}
    up("--no-models", **together).ready()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "node_id").write_text((home / "node_id").read_text())
    command = [*TANDEM, "up", "--no-models", "--port", "0"]
    second = subprocess.run(
        command,
        env=environment(copy, **together),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 1
    assert "Another process has this node's id" in second.stderr
    assert "remove the file node_id" in second.stderr
