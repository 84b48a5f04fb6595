"""Asking a running node about its cluster, and the cluster for something; any node will do."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlencode

from tandem.cli.cluster_view import ClusterView, LinkView, links_of, view_of
from tandem.cli.remote import Server, find_server
from tandem.config import Settings
from tandem.errors import DeadlineError, NotFoundError, UnavailableError

POLL_SECONDS = 0.2
LINKS = "/v1/instance-links"


class ClusterClient:
    """Speaks to one node of the cluster; any will do."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def view(self) -> ClusterView:
        """The cluster as that node knows it now.

        Raises:
            TandemError: it did not answer, or with an error.
        """
        # 503 while no instance is ready, with all of them in the body.
        _, health = self.server.get("/health")
        return view_of(self.server.call("GET", "/state"), health.get("instances", []))

    def remove_instance(self, instance_id: str) -> None:
        """Have the cluster stop an instance."""
        self.server.call("DELETE", f"/instance/{quote(instance_id, safe='')}")

    def previews(self, model: str, node_ids: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Every way to place a model now, as `GET /instance/previews` tells it."""
        query = urlencode([("model_id", model), *(("node_ids", node_id) for node_id in node_ids)])
        found: list[dict[str, Any]] = self.server.call("GET", f"/instance/previews?{query}")["previews"]
        return found

    def create(self, instance: dict[str, Any]) -> None:
        """Have the cluster run an instance as a preview planned it."""
        self.server.call("POST", "/instance", {"instance": instance})

    def link(self, prefill: Iterable[str], decode: Iterable[str], *, allow_quantisation: bool = False) -> LinkView:
        """Let instances prefill for others, if wished also those whose weights are quantised otherwise."""
        wanted = frozenset(prefill), frozenset(decode)
        body = {
            "prefill_instances": sorted(wanted[0]),
            "decode_instances": sorted(wanted[1]),
            "allow_quantisation": allow_quantisation,
        }
        self.server.call("POST", LINKS, body)
        for link in links_of(self.server.call("GET", LINKS)):
            if (frozenset(link.prefill), frozenset(link.decode)) == wanted:
                return link
        raise NotFoundError("The link was made, and removed by somebody since.")

    def unlink(self, link_id: str) -> None:
        """Remove a link."""
        self.server.call("DELETE", f"{LINKS}/{quote(link_id, safe='')}")

    def wait_ready(self, instance_ids: Iterable[str], deadline: float) -> None:
        """Wait until all of these instances answer.

        Args:
            deadline: seconds from now.

        Raises:
            UnavailableError: one of them failed.
            DeadlineError: they do not in time.
        """
        missing = set(instance_ids)
        end = time.monotonic() + deadline
        while missing:
            _, health = self.server.get("/health")
            for instance in health.get("instances", []):
                if instance["instance_id"] not in missing:
                    continue
                if instance["state"] in ("failed", "stopped"):
                    raise UnavailableError(f"{instance['model']} is {instance['state']}: {instance['error']}")
                if instance["state"] == "ready":
                    missing.discard(instance["instance_id"])
            if missing and time.monotonic() > end:
                names = ", ".join(sorted(missing))
                raise DeadlineError(f"{names} is not ready after {deadline:g} s. See `tandem status`.")
            if missing:
                time.sleep(POLL_SECONDS)


def cluster_client(settings: Settings) -> ClusterClient:
    """A client of the node that runs at the address in `settings`.

    Raises:
        UnavailableError: none runs there.
        AuthenticationError: it wants another API key.
    """
    server = find_server(settings)
    if server is None:
        raise UnavailableError(
            f"No node runs at {settings.host}:{settings.port}. Start one with `tandem up`, or name another with --port."
        )
    return ClusterClient(server)
