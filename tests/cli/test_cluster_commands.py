"""`tandem status`, `nodes`, `instances`, `place`, `links`: against two real nodes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.bus.config import free_port

from .conftest import TANDEM, Up, environment

Ask = Callable[..., subprocess.CompletedProcess[str]]
SIM = "sim:answer_tokens=3"


class Pair:
    """Two nodes that know each other, `alpha` and `beta`, each with one instance of the same model."""

    def __init__(self, folder: Path) -> None:
        ports = free_port("tcp"), free_port("tcp")
        self.nodes = [
            Up(
                folder / name,
                SIM,
                *("--name", name, "--peers", f"127.0.0.1:{ports[1 - own]}"),
                TANDEM_CLUSTER_PORT=str(ports[own]),
                TANDEM_AUTOMATIC_LINKS="false",
            )
            for own, name in enumerate(("alpha", "beta"))
        ]
        self.home = folder / "elsewhere"
        self.ready = [node.ready() for node in self.nodes]

    @property
    def instances(self) -> list[str]:
        """Their ids: alpha's, then beta's."""
        return [str(event["models"][0]["instance_id"]) for event in self.ready]

    def port(self, own: int = 0) -> str:
        """Of the HTTP server."""
        return str(self.ready[own]["url"].rpartition(":")[2])

    def ask(self, *arguments: str, own: int = 0) -> subprocess.CompletedProcess[str]:
        """A command that speaks to one of them."""
        return subprocess.run(
            [*TANDEM, *arguments, "--port", self.port(own)],
            env=environment(self.home),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def json(self, *arguments: str, own: int = 0) -> Any:
        """What it prints for scripts."""
        done = self.ask(*arguments, "--json", own=own)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def close(self) -> None:
        """Leave nothing behind."""
        for node in self.nodes:
            node.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    nodes = Pair(tmp_path_factory.mktemp("pair"))
    yield nodes
    nodes.close()


def test_every_node_knows_the_whole_cluster(pair: Pair) -> None:
    for own in (0, 1):
        view = pair.json("status", own=own)
        assert [node["name"] for node in view["nodes"]] == ["alpha", "beta"]
        assert {one["instance_id"] for one in view["instances"]} == set(pair.instances)
        assert [node["name"] for node in pair.json("nodes", own=own)] == ["alpha", "beta"]


def test_what_people_see(pair: Pair) -> None:
    shown = pair.ask("status").stdout
    for part in ("alpha", "beta", "MEMORY FREE", "GB", "ready", pair.instances[0][:8]):
        assert part in shown
    assert "alpha" in pair.ask("nodes").stdout
    assert pair.instances[1][:8] in pair.ask("instances", "list").stdout


def test_status_on_a_terminal_goes_on_until_ctrl_c(pair: Pair) -> None:
    ours, theirs = pty.openpty()
    command = [*TANDEM, "status", "--port", pair.port()]
    with subprocess.Popen(
        command, env=environment(pair.home, TERM="xterm"), stdout=theirs, start_new_session=True
    ) as shown:
        os.close(theirs)
        seen = b""
        while seen.count(b"alpha") < 2:
            seen += os.read(ours, 4096)
        shown.send_signal(signal.SIGINT)
        assert shown.wait(30) == 0
    os.close(ours)


def test_a_link_is_made_seen_and_removed(pair: Pair) -> None:
    reader, writer = pair.instances
    made = pair.json("links", "add", "--prefill", reader[:8], "--decode", writer[:8])
    assert (made["prefill"], made["decode"]) == ([reader], [writer])
    assert [link["link_id"] for link in pair.json("links", "list")] == [made["link_id"]]
    shown = pair.ask("links", "list").stdout
    assert f"{reader[:8]} on alpha" in shown
    assert f"{writer[:8]} on beta" in shown
    twice = pair.ask("links", "add", "--prefill", reader, "--decode", reader)
    assert twice.returncode == 1
    assert "both sides" in twice.stderr
    assert made["allow_quantisation"] is False
    pair.json("links", "rm", made["link_id"][:6])
    assert pair.json("links", "list") == []
    mixed = pair.json("links", "add", "--prefill", reader, "--decode", writer, "--allow-quantisation")
    assert mixed["allow_quantisation"] is True
    assert "any quantisation" in pair.ask("links", "list").stdout
    pair.json("links", "rm", mixed["link_id"])
    gone = pair.ask("links", "rm", made["link_id"])
    assert gone.returncode == 1
    assert "tandem links" in gone.stderr


def test_a_model_is_placed_on_a_node_by_name_and_removed(pair: Pair) -> None:
    placed = pair.json("place", "sim:model_id=more", "--node", "beta")
    beta = next(node["node_id"] for node in pair.json("nodes") if node["name"] == "beta")
    assert placed["nodes"] == [beta]
    found = next(one for one in pair.json("instances", "list") if one["instance_id"] == placed["instance_id"])
    assert (found["model_id"], found["state"], found["nodes"]) == ("more", "ready", [beta])
    pair.json("instances", "rm", placed["instance_id"][:8])
    assert placed["instance_id"] not in {one["instance_id"] for one in pair.json("instances", "list")}


def test_a_group_without_a_command_lists(pair: Pair) -> None:
    assert pair.json("instances") == pair.json("instances", "list")
    assert pair.json("links") == []
    lost = subprocess.run(
        [*TANDEM, "instances", "--port", pair.port(), "rm", "x"],
        env=environment(pair.home),
        capture_output=True,
        text=True,
    )
    assert lost.returncode == 2
    assert "behind the command" in " ".join(lost.stderr.split())


def test_a_preview_changes_nothing(pair: Pair) -> None:
    ways = pair.json("place", "sim", "--preview")
    assert any(way["instance"] is not None for way in ways)
    assert "alpha" in pair.ask("place", "sim", "--preview", "--node", "alpha").stdout
    assert {one["instance_id"] for one in pair.json("instances", "list")} == set(pair.instances)


def test_what_cannot_be_placed_says_why(pair: Pair) -> None:
    for arguments, part in (
        (("--node", "gamma"), "Nodes: alpha, beta."),
        (("--min-nodes", "2"), "nodes"),
    ):
        done = pair.ask("place", "sim", *arguments)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert part in line
    unknown = pair.ask("place", "nothing-of-this-name")
    assert unknown.returncode == 1
    assert "nothing-of-this-name" in unknown.stderr


def test_ids_that_mean_several_are_refused(pair: Pair) -> None:
    done = pair.ask("instances", "rm", "")
    assert done.returncode == 1
    assert "names 2 instances" in done.stderr


def test_no_node_is_one_line_that_says_what_to_do(pair: Pair) -> None:
    for arguments in (("status",), ("nodes",), ("place", "sim"), ("links",), ("instances",)):
        done = subprocess.run(
            [*TANDEM, *arguments], env=environment(pair.home), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert "tandem up" in line


def test_the_second_node_names_the_first(pair: Pair) -> None:
    assert pair.ready[1]["cluster"]["node"] == "beta"
    assert pair.ready[1]["cluster"]["reach"] == "machine"
    shown = pair.json("cluster", "show")
    assert (shown["node"], shown["others"], shown["running"]) == ("alpha", ["beta"], True)
