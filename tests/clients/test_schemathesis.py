"""`schemathesis`: whatever is sent to a running server, it answers as its `/openapi.json` declares."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tandem.api.app import create_app
from tandem.config import Settings

from .server import Server

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


# Tests are collected before any server runs; `test_the_server_tells_the_same` ties this to a running one.
# By default schemathesis makes both data that fits and data that does not.
DESCRIPTION = create_app(cast(Any, None), Settings()).openapi()
schema = schemathesis.openapi.from_dict(DESCRIPTION)


@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_declared(case: Any, sim_server: Server) -> None:
    # A request for a model that is not served ends at once: most should get further.
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "fast"
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 4)
    # Streams without an end of their own, or with a late one; `tests/api/cluster` reads them.
    if case.path == "/events" and isinstance(case.query, dict):
        case.query.pop("follow", None)
    if case.path == "/instance/await" and isinstance(case.query, dict) and _is_wait(case.query.get("timeout_seconds")):
        case.query["timeout_seconds"] = 0.1
    case.call_and_validate(base_url=sim_server.url, checks=CHECKS, timeout=30)


def _is_wait(value: Any) -> bool:
    """Whether the server would wait: the longest time is the default."""
    try:
        return value is None or 0 <= float(value) <= 300
    except (TypeError, ValueError):
        return False


def test_the_server_tells_the_same(sim_server: Server) -> None:
    assert httpx.get(f"{sim_server.url}/openapi.json").json() == DESCRIPTION


def test_every_operation_is_covered() -> None:
    """`test_answers_are_as_declared` cannot be emptied by a schema that schemathesis fails to read."""
    operations = [result.ok() for result in schema.get_all_operations()]
    routes = {(operation.method.upper(), operation.path) for operation in operations}
    assert routes == {(method.upper(), path) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert {("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/health")} <= routes
