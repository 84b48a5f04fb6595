"""Asking a running server, over the same HTTP surface as any client.

The standard library's client is enough for one connection at a time, and imports in no time.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from tandem.config import Settings
from tandem.errors import RunnerDiedError, TandemError, UnavailableError
from tandem.types import (
    ChatPrompt,
    Event,
    Failure,
    Finished,
    GenerationRequest,
    PrefillProgress,
    Statistics,
    TextDelta,
    Usage,
)

CONNECT_SECONDS = 2.0
CALL_SECONDS = 30.0
SILENCE_SECONDS = 60.0
"""The server sends a comment every ten seconds, so a longer silence means that it is gone."""

STATISTICS = b": generation_stats "
PROGRESS = b": prefill_progress "
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Server:
    """A Tandem server that answers.

    Attributes:
        instances: model id and state of each, from `/health`.
    """

    host: str
    port: int
    api_key: str
    instances: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def answerer(self, model: str | None) -> RemoteAnswerer | None:
        """Answers for `model` from here, None if it is not served; None as `model` takes the first ready one."""
        if model is None:
            ready = sorted(self.instances, key=lambda instance: instance[1] != "ready")
            return RemoteAnswerer(self, ready[0][0]) if ready else None
        status, body = self.get(f"/v1/models/{quote(model)}")
        if status == 200 and body.get("state") != "downloaded":
            return RemoteAnswerer(self, str(body["id"]))
        return None

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """One GET: the status and the JSON object, empty if it is none.

        Raises:
            UnavailableError: the server went away.
        """
        connection = self.connect(CONNECT_SECONDS)
        try:
            connection.request("GET", path, headers=self.headers())
            response = connection.getresponse()
            return response.status, _json_object(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"The server at {self.url} does not answer: {error}. Is it still running?"
            ) from error
        finally:
            connection.close()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = CALL_SECONDS) -> Any:
        """One request with a JSON answer.

        Args:
            timeout: seconds of silence after which the server is given up.

        Raises:
            TandemError: what the server said no with, as its own class.
            UnavailableError: the server went away.
        """
        connection = self.connect(timeout)
        try:
            content = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, self.headers() | content)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"The server at {self.url} does not answer: {error}. Is it still running?"
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _error(response.status, _json_object(text))
        try:
            return json.loads(text)
        except ValueError as error:
            raise UnavailableError(f"{self.url}{path} answers with something else than JSON. Is it Tandem?") from error

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection to be opened by the first request. `timeout` in seconds, for every read."""
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def find_server(settings: Settings) -> Server | None:
    """The server at the address in `settings`, None if nothing there is Tandem.

    Raises:
        AuthenticationError: it wants another API key.
    """
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    candidate = Server(host, settings.port, settings.api_key, ())
    if settings.port == 0:
        return None
    try:
        status, body = candidate.get("/health")
    except UnavailableError:
        return None
    if status == 401 and "error" in body:
        raise _error(status, body)
    instances = body.get("instances")
    if not isinstance(instances, list):
        return None
    found = tuple((str(instance["model"]), str(instance["state"])) for instance in instances)
    return Server(host, settings.port, settings.api_key, found)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _error(status: int, body: dict[str, Any]) -> TandemError:
    detail = body.get("error") or {}
    message = detail.get("message") or f"The server answered with HTTP status {status}."
    return Failure(detail.get("code") or "internal_error", message, detail.get("param")).error()


@dataclass(slots=True)
class RemoteAnswerer:
    """Sends each request to `server` and reads the stream back."""

    server: Server
    model_id: str

    def answer(self, request: GenerationRequest) -> Generator[Event]:
        """See `Answerer.answer`."""
        connection = self.server.connect(SILENCE_SECONDS)
        try:
            body = json.dumps(_chat_body(self.model_id, request)).encode()
            headers = {"Content-Type": "application/json", **self.server.headers()}
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _error(response.status, _json_object(response.read()))
            yield from _StreamReader().read(response)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"The connection to {self.server.url} broke: {error}. Ask again.") from error
        finally:
            connection.close()


def _chat_body(model: str, request: GenerationRequest) -> dict[str, Any]:
    assert isinstance(request.prompt, ChatPrompt)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message.role, "content": message.content} for message in request.prompt.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
        "seed": request.sampling.seed,
    }
    return {name: value for name, value in body.items() if value is not None}


@dataclass(slots=True)
class _StreamReader:
    """Turns server-sent events back into the events that they were made of."""

    reason: Any = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    statistics: Statistics = field(default_factory=Statistics)

    def read(self, response: http.client.HTTPResponse) -> Iterator[Event]:
        for line in iter(response.readline, b""):
            if line.startswith(DATA):
                data = line[len(DATA) :].strip()
                if data == b"[DONE]":
                    if self.reason is None:
                        break
                    yield Finished(self.reason, self.usage, self.statistics)
                    return
                yield from self._chunk(json.loads(data))
            elif line.startswith(PROGRESS):
                progress = json.loads(line[len(PROGRESS) :])["PrefillProgressChunk"]
                yield PrefillProgress(progress["processed_tokens"], progress["total_tokens"])
            elif line.startswith(STATISTICS):
                counts = json.loads(line[len(STATISTICS) :])
                peak = counts.pop("peak_memory_usage", {}).get("in_bytes", 0)
                self.statistics = msgspec.convert(counts | {"peak_memory": peak}, Statistics)
        raise RunnerDiedError("The server closed the stream before the answer was complete. Ask again.")

    def _chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        if "error" in chunk:
            raise _error(500, chunk)
        if chunk.get("usage"):
            usage = chunk["usage"]
            self.usage = Usage(
                usage["prompt_tokens"],
                usage["completion_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens_details"]["reasoning_tokens"],
            )
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                yield TextDelta(delta["reasoning_content"], reasoning=True)
            if delta.get("content"):
                yield TextDelta(delta["content"])
            self.reason = choice["finish_reason"] or self.reason
