"""What one run of the cluster bench does, and the bounds that its results are held to."""

from __future__ import annotations

import msgspec

from tandem.bench.plan import Bound
from tandem.errors import ConfigError

SMALL = 3
"""Nodes of the cluster that the bound on forming is about."""
MODEL_ID = "bench"
"""Of the simulated model that answers."""
BOUNDS: dict[str, Bound] = {
    "form_seconds_3": Bound("at_most", 2.0),
    "form_seconds_3_quic": Bound("at_most", 2.0),
    "kill_noticed_seconds_3": Bound("at_most", 1.0),
    "kill_noticed_seconds_3_quic": Bound("at_most", 2.5),
    "kill_noticed_seconds": Bound("at_most", 1.0),
    "idle_cpu_percent": Bound("at_most", 3.0),
    "idle_cpu_percent_after": Bound("at_most", 3.0),
    "placement_ms": Bound("at_most", 100.0),
    "requests_per_second": Bound("at_least", 500.0),
    "request_errors": Bound("at_most", 0.0),
    "never_ended": Bound("at_most", 0.0),
    "errors_before_a_token": Bound("at_most", 0.0),
}


class ClusterPlan(msgspec.Struct, frozen=True):
    """The settings of one run.

    Attributes:
        nodes: of the large cluster.
        per_process: nodes that share a process; a node takes some 60 MB alone, and a quarter of that in company.
        killed: nodes that are killed while requests run.
        killed_idle: nodes that are killed before, while the cluster is idle. All killed ones have processes of their
            own.
        instances: of a simulated model, on as many nodes; half as many of the killed ones as of the rest have one.
        idle_seconds: for which processor time is measured.
        traffic_seconds: for which requests are sent, as fast as they are answered.
        streams: requests that each node has under way.
        tokens: of each answer, while the rate is measured.
        kill_tokens: of each answer while nodes are killed, so that many are in the middle.
        kill_seconds: for which requests are sent then; the nodes die after a third of it.
        model: its placement is timed; only its card is needed.
        placement_rounds: plans that are timed.
        quic: form and kill the small cluster under a secret too.
        secret: of the large cluster; empty for none.
    """

    nodes: int = 50
    per_process: int = 5
    killed: int = 10
    killed_idle: int = 2
    instances: int = 10
    idle_seconds: float = 10.0
    traffic_seconds: float = 10.0
    streams: int = 2
    tokens: int = 4
    kill_tokens: int = 40
    kill_seconds: float = 9.0
    model: str = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    placement_rounds: int = 5
    quic: bool = True
    secret: str = ""

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: a number is too small, or they do not fit together.
        """
        for name in ("per_process", "instances", "streams", "tokens", "kill_tokens", "placement_rounds", "killed_idle"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.", param=name)
        for name in ("idle_seconds", "traffic_seconds", "kill_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0.", param=name)
        if self.killed < 0 or self.nodes < self.killed + self.killed_idle + 1:
            raise ConfigError(
                f"{self.nodes} nodes are too few to kill {self.killed_idle} and {self.killed} of them and have one "
                "left. Take more, or kill fewer.",
                param="nodes",
            )
        if self.instances > self.nodes - self.killed_idle:
            raise ConfigError("There are more instances than nodes that are to answer.", param="instances")

    @property
    def killed_instances(self) -> int:
        """Instances on nodes that are killed while requests run: at most half."""
        return min(self.killed, self.instances // 2)

    @property
    def processes(self) -> list[int]:
        """Nodes of each process: first those that are killed idle, then those killed at work, then the rest."""
        rest = self.nodes - self.killed - self.killed_idle
        full, left = divmod(rest, self.per_process)
        return [1] * (self.killed_idle + self.killed) + [self.per_process] * full + ([left] if left else [])
