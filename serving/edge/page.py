"""The chat page at ``/``: one static file, whose own script and style are the only ones that the browser may run."""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@dataclass(frozen=True, slots=True)
class Page:
    """body: UTF-8 HTML. headers: with a content security policy that names script and style by their SHA-256."""

    body: bytes
    headers: Mapping[str, str]


def load_page() -> Page:
    """Read the page and derive its headers; ValueError when it has not exactly one script and one style."""
    body = files("headrace.serving.edge").joinpath("page.html").read_bytes()
    script, style = _source_hash(body, b"script"), _source_hash(body, b"style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return Page(body, MappingProxyType(headers))


def page_route() -> Route:
    """``GET /``: the page, or 304 when the browser has this very one. Reads the file once."""
    page = load_page()

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == page.headers["etag"]:
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, media_type="text/html", headers=page.headers)

    return Route("/", endpoint, methods=["GET"])


def _source_hash(body: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), body, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"page.html has {len(found)} <{tag.decode()}> elements; its policy is made for exactly one")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
