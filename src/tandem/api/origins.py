"""Which web pages may use this node.

A browser lets any page send requests to the loopback interface, and a page whose name resolves to it (DNS rebinding)
even read the answers. So requests that come from a page (they carry `Origin`) must come from one on this machine or
from an allowed one, and the name they address (`Host`) must be this machine's. Programs send no `Origin` and address
names or addresses that are the machine's own; they notice nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.api.errors import error_response
from tandem.errors import ForbiddenError

ANY = "*"


class OriginGuard:
    """Refuses requests of foreign pages with 403, and gives those of welcome ones their CORS headers.

    Args:
        allowed: origins such as `https://chat.example` beside those of this machine, separated by commas; `*` for all.
        host: the address that the server listens on.
        has_key: requests prove themselves by an API key, so that the name they address does not matter.
    """

    def __init__(self, app: ASGIApp, *, allowed: str, host: str, has_key: bool) -> None:
        self._app = app
        self._allowed = {origin.strip().rstrip("/").lower() for origin in allowed.split(",") if origin.strip()}
        own = socket.gethostname().lower()
        self._names = {"localhost", own, f"{own}.local", host.lower()}
        self._checks_host = not has_key
        self._cors = CORSMiddleware(
            app,
            allow_origin_regex=".*",  # asked only for origins that passed our own check
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if self._checks_host and not self._is_own_name(_name(f"//{headers.get('host', '')}")):
            error = ForbiddenError(
                f"The request addresses the host '{headers.get('host', '')}', which is not this machine. Use its "
                "address or localhost, or set an API key (TANDEM_API_KEY)."
            )
            await error_response(error)(scope, receive, send)
        elif origin is None:
            await self._app(scope, receive, send)
        elif self._is_welcome(origin):
            await self._cors(scope, receive, send)
        else:
            error = ForbiddenError(f"Pages from {origin} may not use this node. Add it to TANDEM_ALLOWED_ORIGINS.")
            await error_response(error)(scope, receive, send)

    def _is_welcome(self, origin: str) -> bool:
        if ANY in self._allowed or origin.lower() in self._allowed:
            return True
        return origin.startswith(("http://", "https://")) and self._is_local(_name(origin))

    def _is_local(self, name: str) -> bool:
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _is_own_name(self, name: str) -> bool:
        # An address needs no name server, so nobody can rebind it.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._is_local(name)
        return True


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
