"""The cluster as placement sees it, just after a node's start and later."""

from __future__ import annotations

import pytest

from tandem.cluster import view as views
from tandem.cluster.state import ClusterState
from tandem.cluster.view import MEETING_SECONDS, View
from tandem.placement.roles import health
from tandem.types.facts import NodeFacts
from tandem.types.intents import Entry, Stamp, key_of
from tests.placement.worlds import instance, node, runner

HERE, THERE = node(1), node(2, runners=(runner("a"),))
WANTED = instance("a", THERE.node_id)


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(views.time, "monotonic", lambda: self.now)


def state(*nodes: NodeFacts) -> ClusterState:
    return ClusterState(
        {one.node_id: one for one in nodes}, {key_of(WANTED): Entry(key_of(WANTED), WANTED, Stamp(1, 0, "n"))}
    )


def test_a_node_that_was_not_met_yet_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = Clock(monkeypatch), [state(HERE)]
    view = View(HERE.node_id, lambda: now[0], automatic=True)
    assert health(WANTED, view.whole()) == "loading"
    assert health(WANTED, view.routing()) == "loading"
    now[0] = state(HERE, THERE)
    assert health(WANTED, view.whole()) == "ready"
    clock.now += 0.1
    now[0] = state(HERE)
    assert health(WANTED, view.whole()) == "dead", "who leaves was met"


def test_patience_ends_without_any_event(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, only = Clock(monkeypatch), state(HERE)
    view = View(HERE.node_id, lambda: only, automatic=True)
    assert health(WANTED, view.whole()) == "loading"
    clock.now += MEETING_SECONDS
    assert health(WANTED, view.whole()) == "dead"
    assert view.whole() is view.whole(), "nothing is made anew for nothing"
