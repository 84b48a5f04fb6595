"""Nodes on this machine alone, without a secret: messages, questions, deaths."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tandem.cluster.bus.config import free_port
from tests.cluster.bus.nodes import SECRET, NodeProcess, Nodes, meet


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes to which nothing happens."""
    with Nodes(tmp_path_factory.mktemp("healthy")) as nodes:
        one, two = nodes.start("one", secret=""), nodes.start("two", secret="")
        meet([one, two])
        yield one, two


@pytest.fixture
def pair(nodes: Nodes) -> tuple[NodeProcess, NodeProcess]:
    one, two = nodes.start("one", secret=""), nodes.start("two", secret="")
    meet([one, two])
    return one, two


def test_questions_are_answered(healthy: tuple[NodeProcess, NodeProcess]) -> None:
    one, _ = healthy
    assert one.ask("two", "echo", "hello")["text"] == "hello"
    assert one.ask("two", "echo", "x", repeat=3_000_000)["size"] == 3_000_000
    assert one.ask("one", "echo", "myself")["text"] == "myself"


def test_errors_cross_the_bus(healthy: tuple[NodeProcess, NodeProcess]) -> None:
    one, _ = healthy
    failed = one.ask("two", "fail")
    assert (failed["code"], failed["message"]) == ("instance_not_ready", "The model is still loading.")
    crashed = one.ask("two", "crash")
    assert crashed["code"] == "engine_error"
    assert "KeyError" in crashed["message"]


def test_a_question_ends_at_its_deadline(healthy: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = healthy
    failed = one.ask("two", "slow", deadline=0.7)
    assert failed["code"] == "deadline_exceeded"
    assert 0.6 < failed["took"] < 1.5
    two.wait("asked")


def test_nobody_and_nothing_to_ask(healthy: tuple[NodeProcess, NodeProcess]) -> None:
    one, _ = healthy
    for node, topic in (("nobody", "echo"), ("two", "nonsense")):
        failed = one.ask(node, topic, deadline=5.0)
        assert failed["code"] == "node_lost"
        assert failed["took"] < 1.0


def test_the_asked_node_is_killed(pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    asked = one.do("ask", node="two", topic="slow", deadline=10.0)
    two.wait("asked")
    killed = two.signal(signal.SIGKILL)
    failed = one.wait("failed", after=asked)
    assert failed["code"] == "node_lost"
    assert failed["at"] - killed < 3.0
    left = one.wait("left", node_id="two", reason="unreachable")
    print(f"kill -9 over tcp: noticed after {left['at'] - killed:.2f} s")
    assert left["at"] - killed < 3.0


def test_leaving_in_order(pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    two.quit()
    assert two.process.returncode == 0
    assert one.wait("left", node_id="two")["reason"] == "closed"


def test_an_interrupt_does_not_hang(pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    two.signal(signal.SIGINT)
    two.process.wait(timeout=10)
    one.wait("left", node_id="two")


def test_messages_arrive_in_order_and_without_loss(healthy: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = healthy
    one.do("stream", rate=2000)
    two.do("stream", rate=2000)
    for node, other in ((one, "two"), (two, "one")):
        node.wait("counted", 20.0, node=other, count=3000)
        report = node.report()["numbers"][other]
        assert (report["lost"], report["disordered"]) == (0, 0)


def test_a_restart_is_a_new_life(nodes: Nodes, pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    killed = two.signal(signal.SIGKILL)
    again = nodes.start("two", secret="")
    left = one.wait("left", node_id="two", life=two.life)
    joined = one.wait("joined", node_id="two", life=again.life)
    assert killed < left["at"] <= joined["at"]
    assert again.wait("joined", node_id="one", life=one.life)
    assert one.ask("two", "echo", "new")["text"] == "new"
    assert not again.seen("conflict")


def test_two_processes_claim_one_id(nodes: Nodes, pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    second = nodes.start("two", secret="")
    conflict = second.wait("conflict", node_id="two", life=two.life)
    assert conflict["endpoints"]
    assert one.ask("two", "echo", "first")["text"] == "first"
    assert not two.seen("conflict")
    assert not one.seen("left")
    assert [line["life"] for line in one.seen("joined")] == [two.life]


def test_a_hung_loop_counts_as_dead(pair: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = pair
    hung = two.do("hang", seconds=7.5)
    left = one.wait("left", 10.0, node_id="two", life=two.life)
    assert left["reason"] == "silent"
    assert 3.5 < left["at"] - hung < 8.0
    # It did not see the other one die, as it did not listen.
    assert one.wait("joined", 10.0, after=left["at"], node_id="two", life=two.life)
    assert two.ask("one", "echo", "awake")["text"] == "awake"
    assert not two.seen("left")


def test_a_taken_port_is_refused(nodes: Nodes) -> None:
    for secret in ("", SECRET):
        port = free_port("quic" if secret else "tcp")
        nodes.start("one", secret=secret, port=port).wait("ready")
        refused = nodes.start("two", secret=secret, port=port).wait("refused")
        assert refused["code"] == "config_error"
        assert "TANDEM_CLUSTER_PORT" in refused["message"]


def test_a_secret_on_this_machine(nodes: Nodes) -> None:
    one, two = nodes.start("one"), nodes.start("two")
    seconds = meet([one, two])
    print(f"two nodes with a secret met after {seconds:.3f} s")
    assert one.wait("link", name="two")
    assert one.ask("two", "echo", "quic")["text"] == "quic"
    killed = two.signal(signal.SIGKILL)
    left = one.wait("left", node_id="two")
    print(f"kill -9 over quic: noticed after {left['at'] - killed:.2f} s")
    assert left["at"] - killed < 4.0


def test_wrong_and_missing_secrets_stay_out(nodes: Nodes) -> None:
    inside, other = nodes.start("inside"), nodes.start("other")
    wrong, without = nodes.start("wrong", secret="another secret than theirs"), nodes.start("without", secret="")
    opened = nodes.start("opened", secret="", open=True)
    meet([inside, other])
    for node in (wrong, without, opened):
        node.wait("ready")
    # The two of one kind do find each other, so that discovery itself was at work meanwhile.
    friend = nodes.start("friend", secret="another secret than theirs")
    meet([wrong, friend])
    for node in (inside, other):
        assert {line["node_id"] for line in node.seen("joined")} <= {"inside", "other"}
        assert {line["name"] for line in node.seen("link")} <= {"inside", "other"}
    assert not without.seen("joined")
    assert not opened.seen("joined")
    assert inside.ask("wrong", "echo")["code"] == "node_lost"


def test_two_cluster_names_stay_apart(nodes: Nodes) -> None:
    one, two = nodes.start("one", secret=""), nodes.start("two", secret="")
    three = nodes.start("three", secret="", cluster_name="elsewhere")
    four = nodes.start("four", secret="", cluster_name="elsewhere")
    meet([one, two])
    meet([three, four])
    assert [line["node_id"] for line in one.seen("joined")] == ["two"]
    assert [line["node_id"] for line in three.seen("joined")] == ["four"]
