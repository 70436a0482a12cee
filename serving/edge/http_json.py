"""JSON over ASGI: bodies in (bounded in bytes and time, strict), answers and errors out."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.strict_json import LONG_BYTES, NotJson, parse

BODY_TIMEOUT_S = 30.0
JsonObject = dict[str, object]


class ClientGone(Exception):
    """The client closed its connection before the body was complete; there is nobody to answer."""


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error.body(), status=error.status, headers={**error.headers(), **(headers or {})})


async def read_object(scope: Scope, receive: Receive, *, max_bytes: int) -> JsonObject:
    """The body as a JSON object. Raises ApiError (408, 413, 415, 400) or ClientGone."""
    headers = Request(scope).headers
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.replace('"', "").strip().lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise ApiError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON in UTF-8; send content-type: application/json."
        )
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await _read(receive, max_bytes)
    except TimeoutError:
        raise ApiError(ErrorCode.REQUEST_TIMEOUT, f"The body was not complete after {BODY_TIMEOUT_S:g} s.") from None
    body = parse_object(raw)
    if len(raw) > LONG_BYTES:
        await asyncio.sleep(0)  # The checks to come take as long again, and others need not wait for both.
    return body


def parse_object(raw: bytes) -> JsonObject:
    """Strict JSON: no NaN, no lone surrogates, no repeated keys, bounded depth. Raises ApiError."""
    try:
        parsed = parse(raw)
    except NotJson as error:
        raise ApiError(ErrorCode.MALFORMED_JSON, f"The body is refused: {error}.") from None
    if parsed.fault is not None:
        raise ApiError(ErrorCode.MALFORMED_JSON, f"The body is refused: {parsed.fault}.")
    if not isinstance(parsed.value, dict):
        raise ApiError(ErrorCode.MALFORMED_JSON, "The body must be a JSON object.")
    return parsed.value


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorCode.REQUEST_TOO_LARGE, f"The body has more than the {max_bytes} bytes that are allowed.")


# What Starlette calls for exceptions that leave a route.


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    code = ErrorCode.METHOD_NOT_ALLOWED if error.status_code == 405 else ErrorCode.NOT_FOUND
    texts = {ErrorCode.METHOD_NOT_ALLOWED: "This path does not take that method.", ErrorCode.NOT_FOUND: "No such path."}
    return error_response(ApiError(code, texts[code]), error.headers)


async def on_fault(request: Request, error: Exception) -> Response:
    """A defect of ours: nothing of it is shown; the server log has the traceback."""
    return error_response(ApiError(ErrorCode.INTERNAL, "The server failed to handle the request."))


EXCEPTION_HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: on_api_error,
    HTTPException: on_http_error,
    Exception: on_fault,
}
