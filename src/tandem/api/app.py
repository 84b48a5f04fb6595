"""The HTTP application: routes, layers and error handlers put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem import __version__
from tandem.api import admin, peers
from tandem.api.cluster import awaiting, downloads, instances, links, state
from tandem.api.cluster import models as cluster_models
from tandem.api.context import Context
from tandem.api.errors import envelope, error_response, status_response
from tandem.api.middleware import Authentication, Counting
from tandem.api.openai import models, routes
from tandem.api.openapi import install_openapi
from tandem.api.origins import OriginGuard
from tandem.config import Settings
from tandem.errors import InvalidRequestError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.node import Node


def create_app(node: Node, settings: Settings) -> FastAPI:
    """The application that serves `node`. Its parts are in `app.state.context`."""
    # FastAPI's own documentation pages load their scripts from elsewhere; a node may have no way there.
    app = FastAPI(title="Tandem", version=__version__, docs_url=None, redoc_url=None)
    context = Context(node, settings)
    app.state.context = context
    # `/instance/await` before `/instance/{instance_id}`.
    cluster = (awaiting, instances, links, cluster_models, downloads, state)
    for module in (routes, models, admin, peers, *cluster):
        app.include_router(module.router)
    app.add_exception_handler(TandemError, _tandem_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    app.add_exception_handler(Exception, _unexpected_error)
    if settings.api_key:
        app.add_middleware(Authentication, api_key=settings.api_key)
    app.add_middleware(
        OriginGuard, allowed=settings.allowed_origins, host=settings.host, has_key=bool(settings.api_key)
    )
    app.add_middleware(Counting, metrics=context.metrics)
    install_openapi(app)
    return app


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404:
        detail = f"There is no route {request.method} {request.url.path}. /openapi.json lists them."
    elif error.status_code == 405:
        detail = f"{request.url.path} does not take {request.method}."
    return status_response(error.status_code, detail, dict(error.headers or {}))


async def _parameter_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(InvalidRequestError(f"`{name}`: {first['msg']}.", param=name))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    body = envelope(500, "The server failed in an unexpected way; its log says how.", TandemError.code)
    return Response(body, 500, media_type="application/json")
