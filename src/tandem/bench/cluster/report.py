"""The cluster bench's results as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.bench.cluster.messages import Traffic
from tandem.bench.cluster.plan import BOUNDS, ClusterPlan
from tandem.bench.environment import Environment
from tandem.bench.plan import Bound
from tandem.bench.report import Series


class Forming(msgspec.Struct, frozen=True):
    """A cluster that was started all at once, and lost some of its nodes. Times in seconds.

    Attributes:
        nodes: how many.
        processes: that they run in.
        killed: nodes that were killed while it was idle.
        form_seconds: from the last node's start until every node sees every other.
        start_seconds: what of these the slowest node's own start took.
        kill_noticed_seconds: from the kill until no node has facts of a killed one.
        load: the machine's load average before.
    """

    nodes: int
    processes: int
    killed: int
    form_seconds: float
    start_seconds: float
    kill_noticed_seconds: float
    load: float


class Idle(msgspec.Struct, frozen=True):
    """Processor time of the idle cluster, in percent of one core a node.

    Attributes:
        alone: of each node that has a process of its own.
        shared: of each process with several nodes, by its nodes.
        load: the machine's load average meanwhile.
    """

    alone: Series
    shared: Series | None
    load: float


class Placing(msgspec.Struct, frozen=True):
    """Milliseconds of planning one model's placement.

    Attributes:
        total_ms: a placement and all previews.
        previews: how many there were.
    """

    total_ms: Series
    place_ms: Series
    previews_ms: Series
    previews: int
    nodes: int


class Kill(msgspec.Struct, frozen=True):
    """Nodes that were killed while requests ran.

    Attributes:
        nodes: how many were killed.
        instances: how many of the model's instances died with them, and of how many.
        noticed_seconds: until no node had facts of a killed one.
        traffic: of the nodes that are left.
        answered_after: requests answered by the nodes that are left, once more, when all was over.
    """

    nodes: int
    instances: int
    of_instances: int
    noticed_seconds: float
    traffic: Traffic
    answered_after: int


class ClusterReport(msgspec.Struct, frozen=True):
    """Everything one run found out.

    Attributes:
        small: clusters of three nodes, by scheme: `tcp` without a secret, `quic` under one.
        large: the cluster of the plan.
        idle, idle_after: before and after the requests.
        false_departures: how often a node was taken for gone that was not killed.
    """

    plan: ClusterPlan
    environment: Environment
    small: dict[str, Forming]
    large: Forming
    idle: Idle
    idle_after: Idle
    placing: Placing
    traffic: Traffic
    kill: Kill | None
    false_departures: int

    @property
    def figures(self) -> dict[str, float]:
        """The headline figures by name."""
        found: dict[str, float] = {}
        for scheme, forming in self.small.items():
            end = "" if scheme == "tcp" else f"_{scheme}"
            found[f"form_seconds_3{end}"] = forming.form_seconds
            found[f"kill_noticed_seconds_3{end}"] = forming.kill_noticed_seconds
        traffic = self.traffic
        found["form_seconds"] = self.large.form_seconds
        found["kill_noticed_seconds"] = self.large.kill_noticed_seconds
        found["idle_cpu_percent"] = self.idle.alone.median
        found["idle_cpu_percent_after"] = self.idle_after.alone.median
        found["placement_ms"] = self.placing.total_ms.median
        found["requests_per_second"] = traffic.answered / (traffic.ended - traffic.began)
        found["request_errors"] = traffic.failed_before + traffic.failed_after + traffic.short + traffic.never_ended
        if self.kill is not None:
            found["never_ended"] = self.kill.traffic.never_ended + self.kill.traffic.short
            found["errors_before_a_token"] = self.kill.traffic.failed_before
        found["false_departures"] = self.false_departures
        return found

    @property
    def bounds(self) -> dict[str, Bound]:
        """The bounds of this run: those of QUIC where the large cluster has a secret."""
        noticed = BOUNDS["kill_noticed_seconds_3_quic" if self.plan.secret else "kill_noticed_seconds"]
        return {**BOUNDS, "kill_noticed_seconds": noticed}

    @property
    def missed(self) -> dict[str, Bound]:
        """Bounds that a figure missed."""
        figures = self.figures
        return {
            name: bound for name, bound in self.bounds.items() if name in figures and not bound.met_by(figures[name])
        }

    def to_json(self) -> dict[str, Any]:
        """One flat object: the headline figures first, then their bounds, then everything else."""
        figures = self.figures
        held = {name: msgspec.to_builtins(bound) for name, bound in self.bounds.items() if name in figures}
        passed = {name: name not in self.missed for name in held}
        plain = msgspec.to_builtins(self)
        plain["plan"] = {name: value for name, value in plain["plan"].items() if name != "secret"}
        return {**figures, "bounds": held, "passed": passed, **plain}
