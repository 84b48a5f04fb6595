"""What `/openapi.json` promises, held against what a real node answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

from .double import DoubleNode
from .served import served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = Settings(home=tmp_path_factory.mktemp("home"), port=0, context_length=2048)
    with served(config, "sim") as server:
        yield server.url


def described() -> dict[str, Any]:
    config = Settings()
    return create_app(DoubleNode(config), config).openapi()  # type: ignore[arg-type]


schema = schemathesis.openapi.from_dict(described())


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_declared(case: Any, address: str) -> None:
    # A request for a model that is not served ends at once: most should get further.
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "sim"
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 4)
    case.call_and_validate(base_url=address, checks=CHECKS, timeout=30)


def test_nothing_promises_422() -> None:
    document = described()
    statuses = {
        status
        for path in document["paths"].values()
        for operation in path.values()
        for status in operation["responses"]
    }
    assert "422" not in statuses
    assert {"200", "400", "401", "403", "404", "413", "499", "500", "503", "504"} == statuses
    assert "HTTPValidationError" not in document["components"]["schemas"]
