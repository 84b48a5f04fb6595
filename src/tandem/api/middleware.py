"""Pure ASGI layers around the routes: authentication, and counting."""

from __future__ import annotations

import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.errors import error_response
from tandem.errors import AuthenticationError
from tandem.telemetry.metrics import Metrics


class Authentication:
    """Asks every HTTP request for the API key, before anything of it is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            error = AuthenticationError("The API key is missing or wrong. Send it as `Authorization: Bearer <key>`.")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class Counting:
    """Counts and times every HTTP request by its route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.http_in_progress.inc()
        try:
            await self._app(scope, receive, counting_send)
        finally:
            self._metrics.http_in_progress.dec()
            # The route's template, not the path: a path can name anything, and each would become a time series.
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if route != "unmatched" else "any"
            self._metrics.http_requests.labels(route, method, str(status)).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - began)
