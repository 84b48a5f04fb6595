"""Reading what the server sends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Sse:
    """A whole event stream: its comments, its JSON events, and whether `[DONE]` came last."""

    comments: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def deltas(self, index: int = 0) -> list[dict[str, Any]]:
        return [
            choice["delta"] for event in self.events for choice in event.get("choices", ()) if choice["index"] == index
        ]

    def text(self, index: int = 0) -> str:
        return "".join(delta.get("content") or "" for delta in self.deltas(index))


def parse_sse(text: str) -> Sse:
    found = Sse()
    for block in text.split("\n\n"):
        if not block:
            continue
        assert not found.done, f"after [DONE]: {block!r}"
        assert "\n" not in block
        if block.startswith(": "):
            found.comments.append(block[2:])
        elif block == "data: [DONE]":
            found.done = True
        else:
            assert block.startswith("data: "), block
            found.events.append(json.loads(block[6:]))
    return found


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Sse:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_sse(response.text)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after checking its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
