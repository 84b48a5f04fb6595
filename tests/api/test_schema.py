"""What `/openapi.json` promises. `tests/clients/test_schemathesis.py` holds a running server to it."""

from __future__ import annotations

from typing import Any

from tandem.api.app import create_app
from tandem.config import Settings

from .double import DoubleNode


def described() -> dict[str, Any]:
    config = Settings()
    return create_app(DoubleNode(config), config).openapi()  # type: ignore[arg-type]


def test_nothing_promises_what_fastapi_would_answer() -> None:
    document = described()
    statuses = {
        status
        for path in document["paths"].values()
        for operation in path.values()
        for status in operation["responses"]
    }
    known = {"200", "400", "401", "403", "404", "409", "413", "422", "499", "500", "503", "504", "507"}
    assert known == statuses
    assert "HTTPValidationError" not in document["components"]["schemas"]
