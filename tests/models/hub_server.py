"""A hub on 127.0.0.1 that speaks as much of Hugging Face's API as fetching a model takes.

Model info, tree, `resolve` with HEAD and GET, Range, ETag and X-Repo-Commit, redirects to another host for large files,
tokens, gated and unknown repositories, and faults that a test asks for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE = 4096
"""Files of at least this many bytes are kept in large-file storage."""


@dataclass
class Fault:
    """What goes wrong with the next GETs of one file.

    Attributes:
        cut_after: bytes sent before the connection is dropped, of this many following answers.
        corrupt: flip a byte in this many following answers.
        status: answer this instead.
    """

    cut_after: int | None = None
    cuts: int = 1
    corrupt: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Repository:
    """Files by path; whether a token is needed, and which."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    commit: str = COMMIT


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    host: str


class Hub:
    """The server; use it as a context manager. `address` serves the API, `storage` the large files."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, Fault] = {}
        self.requests: list[Request] = []
        self.everything: Fault | None = None
        self.holding: dict[str, threading.Event] = {}
        self.reached: dict[str, threading.Event] = {}
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in self._servers]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def hold(self, path: str, after: int) -> threading.Event:
        """Stop sending `path` after so many bytes, until `holding[path]` is set; the returned event says it has."""
        self.faults[path] = Fault(cut_after=after)
        self.holding[path] = threading.Event()
        self.reached[path] = threading.Event()
        return self.reached[path]

    def fetched(self, path: str) -> list[Request]:
        """The GETs of one file's content."""
        return [request for request in self.requests if request.method == "GET" and request.path.endswith(f"/{path}")]

    def __enter__(self) -> Hub:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for event in self.holding.values():
            event.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_HEAD(self) -> None:
                self._answer()

            def log_message(self, *arguments: Any) -> None:
                pass

            def _answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                headers = self.headers
                hub.requests.append(
                    Request(self.command, path, headers["Range"], headers["Authorization"], headers["Host"])
                )
                if hub.everything is not None:
                    return self._refuse(hub.everything.status or 500, **hub.everything.headers)
                if path.startswith("/storage/"):
                    _, _, digest, name = path.split("/", 3)
                    for repository in hub.repositories.values():
                        content = repository.files.get(name)
                        if content is not None and hashlib.sha256(content).hexdigest() == digest:
                            return self._send(name, content, {"ETag": f'"{digest}"'})
                    return self._refuse(404)
                if path == "/api/models":
                    wanted = parse_qs(urlsplit(self.path).query).get("search", [""])[0]
                    return self._json(
                        [
                            {"id": name, "downloads": 5, "likes": 2, "tags": ["safetensors"], "private": False}
                            for name in hub.repositories
                            if wanted.lower() in name.lower()
                        ]
                    )
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/(.+))?", path)
                resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                match = api or resolve
                if match is None:
                    return self._refuse(404)
                repository = hub.repositories.get(match[1])
                token = headers["Authorization"]
                if repository is None:
                    # The hub does not say whether a repository is missing or private.
                    return self._refuse(401 if token is None else 404, **{"X-Error-Code": "RepoNotFound"})
                if repository.token is not None and token != f"Bearer {repository.token}":
                    if token is not None:
                        return self._refuse(401, **{"X-Error-Message": "Invalid credentials in Authorization header"})
                    if not repository.gated:
                        return self._refuse(401, **{"X-Error-Code": "RepoNotFound"})
                    if resolve or "/tree/" in path:
                        return self._refuse(401, **{"X-Error-Code": "GatedRepo"})
                if match[2] not in (None, "main", repository.commit):
                    return self._refuse(404, **{"X-Error-Code": "RevisionNotFound"})
                if api and "/tree/" in path:
                    return self._json([entry(name, content) for name, content in repository.files.items()])
                if api:
                    siblings = [{"rfilename": name} for name in repository.files]
                    return self._json({"id": match[1], "sha": repository.commit, "siblings": siblings, "tags": []})
                name = match[3]
                if name not in repository.files:
                    return self._refuse(404, **{"X-Error-Code": "EntryNotFound"})
                return self._resolve(repository, name)

            def _resolve(self, repository: Repository, name: str) -> None:
                content = repository.files[name]
                commit = {"X-Repo-Commit": repository.commit}
                if len(content) < LARGE:
                    return self._send(name, content, {**commit, "ETag": f'"{blob_id(content)}"'})
                digest = hashlib.sha256(content).hexdigest()
                self.send_response(302)
                self.send_header("Location", f"{hub.storage}/storage/{digest}/{name}")
                linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Content-Length": "0"}
                for key, value in {**commit, **linked}.items():
                    self.send_header(key, value)
                self.end_headers()
                return None

            def _send(self, name: str, content: bytes, headers: dict[str, str]) -> None:
                fault = hub.faults.get(name) if self.command == "GET" else None
                if fault is not None and fault.status is not None:
                    return self._refuse(fault.status, **fault.headers)
                start = 0
                asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
                if asked:
                    start = int(asked[1])
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                else:
                    self.send_response(200)
                body = content[start:]
                for key, value in {**headers, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "HEAD":
                    return None
                if fault is not None and fault.corrupt > 0:
                    fault.corrupt -= 1
                    body = bytes([body[0] ^ 1]) + body[1:]
                if fault is not None and fault.cut_after is not None and fault.cuts > 0:
                    fault.cuts -= 1
                    self.wfile.write(body[: fault.cut_after])
                    self.wfile.flush()
                    if name in hub.holding:
                        hub.reached[name].set()
                        hub.holding[name].wait(60)
                    self.close_connection = True
                    return None
                self.wfile.write(body)
                return None

            def _json(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def _refuse(self, status: int, **headers: str) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(key, value)
                self.end_headers()

        return Handler


def blob_id(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def entry(name: str, content: bytes) -> dict[str, Any]:
    """One line of the hub's tree listing."""
    value: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        value["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return value
