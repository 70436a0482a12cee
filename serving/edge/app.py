"""Puts the routes of the edge together as one ASGI application. Nothing here knows how the parts are made."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from headrace.serving.edge.http_json import EXCEPTION_HANDLERS
from headrace.serving.edge.load_routes import load_route
from headrace.serving.edge.openai_routes import openai_routes
from headrace.serving.edge.ops_routes import ops_routes
from headrace.serving.edge.service import Service

STREAM_PATH = "/v1/stream"


def build_app(
    service: Service,
    *,
    security: Callable[[ASGIApp], ASGIApp],
    stream_endpoint: ASGIApp | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """security wraps everything, HTTP and WebSocket alike. extra_routes: the page, say."""
    routes: list[BaseRoute] = [*openai_routes(service), *ops_routes(service), load_route(service), *extra_routes]
    if stream_endpoint is not None:
        routes += [WebSocketRoute(STREAM_PATH, stream_endpoint), Route(STREAM_PATH, stream_endpoint)]
    return security(Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS))
