"""The documentation names every route, every status and every metric there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.api.app import create_app
from tandem.api.openai.schema_chat import BenchChatRequest
from tandem.api.openai.schema_completions import CompletionRequest
from tandem.config import Settings
from tandem.errors import error_classes
from tandem.telemetry.metrics import Metrics

from .double import DoubleNode

DOCS = Path(__file__).parents[2] / "docs"


def documented(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_route_is_documented(tmp_path: Path) -> None:
    app = create_app(DoubleNode(Settings(home=tmp_path)), Settings(home=tmp_path))  # type: ignore[arg-type]
    routes = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    found = set(re.findall(r"^\| `((?:GET|POST|PUT|DELETE) [^`]+)` \|", documented("api.md"), re.MULTILINE))
    # The schema does not describe itself.
    assert found - {"GET /openapi.json"} == routes


def test_every_request_field_is_documented() -> None:
    text = documented("api.md")
    for model in (BenchChatRequest, CompletionRequest):
        for field in model.model_fields:
            assert f"`{field}`" in text, field


def test_every_error_code_is_documented() -> None:
    text = documented("api.md")
    for code, error in error_classes().items():
        if error.__subclasses__() or code in ("config_error", "download_error", "corrupt_model", "unsupported_model"):
            continue
        assert re.search(rf"^\| {error.status} \|.*`{code}`", text, re.MULTILINE), code


def test_every_metric_is_documented() -> None:
    names = Metrics().names()
    assert "tandem_answers_total" in names
    assert all(name.startswith("tandem_") for name in names)
    found = set(re.findall(r"^\| `(tandem_[a-z_]+)`", documented("metrics.md"), re.MULTILINE))
    assert names <= found
    # The process's metrics exist on Linux only.
    assert all(name.startswith("tandem_process_") for name in found - names)
