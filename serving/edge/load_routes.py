"""``GET /v1/load``: how loaded the server is, for routers and autoscalers."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.serving.edge.http_json import json_response
from headrace.serving.edge.load_metrics import load_document
from headrace.serving.edge.service import Service


def load_route(service: Service) -> Route:
    async def load(request: Request) -> Response:
        tenant = request.scope.get("state", {}).get("tenant", "")
        document = load_document(service.admission, service.engine, tenant=tenant, now_s=service.now_s())
        return json_response(document, headers={"cache-control": "no-store"})

    return Route("/v1/load", load, methods=["GET"])
