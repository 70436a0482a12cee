"""Discovery and operations: models, tokenizer, liveness, readiness, metrics."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.serving.edge.bodies import ChatPrompt, Values, chat_prompt
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS, Field, check_table
from headrace.serving.edge.http_json import ClientGone, JsonObject, json_response, read_object
from headrace.serving.edge.metrics import CONTENT_TYPE
from headrace.serving.edge.openai_chunks import token_text
from headrace.serving.edge.service import Service


def ops_routes(service: Service) -> list[Route]:
    ops = _Operations(service)
    return [
        Route("/v1/models", ops.models, methods=["GET"]),
        Route("/v1/models/{name:path}", ops.model, methods=["GET"]),
        Route("/v1/contract", ops.contract, methods=["GET"]),
        Route("/tokenize", ops.tokenize, methods=["POST"]),
        Route("/detokenize", ops.detokenize, methods=["POST"]),
        Route("/livez", ops.livez, methods=["GET"]),
        Route("/readyz", ops.readyz, methods=["GET"]),
        Route("/health", ops.readyz, methods=["GET"]),
        Route("/version", ops.version, methods=["GET"]),
        Route("/metrics", ops.metrics, methods=["GET"]),
    ]


class _Operations:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        names = self._service.model_names
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        self._service.require_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> JsonObject:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "headrace",
            "root": service.model_names[0],
            "parent": None,
            "max_model_len": service.max_context,
        }

    async def contract(self, request: Request) -> Response:
        return json_response(self._service.contract_document(), headers={"cache-control": "no-store"})

    async def tokenize(self, request: Request) -> Response:
        """vLLM's shape: {"prompt"} or {"messages"} → {"count", "max_model_len", "tokens", "token_strs"}."""
        service = self._service
        values = await self._values(request, TOKENIZE_FIELDS)
        if values is None:
            return Response()
        chat: ChatPrompt | None = None
        prompt: str | None = values.get("prompt")
        if ("messages" in values) == (prompt is not None):
            raise ApiError(ErrorCode.CONFLICTING_FIELDS, "Send either prompt or messages.", param="prompt")
        if prompt is None:
            chat = chat_prompt(values)
        ids = await service.preparation.token_ids(chat, prompt, add_special=values.get("add_special_tokens", True))
        strings = [token_text(service.token_bytes(i)) for i in ids] if values.get("return_token_strs") else None
        return json_response(
            {"count": len(ids), "max_model_len": service.max_context, "tokens": ids, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        """vLLM's shape: {"tokens"} → {"prompt"}; control tokens are shown, broken characters become U+FFFD."""
        values = await self._values(request, DETOKENIZE_FIELDS)
        if values is None:
            return Response()
        if "tokens" not in values:
            raise ApiError(ErrorCode.MISSING_FIELD, "tokens is required.", param="tokens")
        ids: tuple[int, ...] = values["tokens"]
        vocab_size = self._service.config.vocab_size
        if max(ids, default=0) >= vocab_size:
            position = next(position for position, token_id in enumerate(ids) if token_id >= vocab_size)
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"tokens[{position}] must be a token id from 0 to {vocab_size - 1}.",
                param="tokens",
            )
        return json_response({"prompt": await self._service.preparation.text(ids)})

    async def _values(self, request: Request, fields: tuple[Field, ...]) -> Values | None:
        """None when the client left before its body was complete."""
        limit = self._service.config.max_body_bytes
        try:
            body = await read_object(request.scope, request.receive, max_bytes=limit)
        except ClientGone:
            return None
        values = check_table(fields, body).values
        name = values.get("model")
        self._service.require_model(name if isinstance(name, str) else None)
        return values

    async def livez(self, request: Request) -> Response:
        """About this process only: it answers, so it lives."""
        return json_response({"live": True})

    async def readyz(self, request: Request) -> Response:
        """200 while new requests are taken; 503 and the reason from the moment that they are not."""
        readiness = self._service.is_ready()
        body = {
            "ready": readiness.ready,
            "reason": readiness.reason,
            "probe": self._service.probe.status,
            "engine": self._service.engine.state.value,
            "in_flight": self._service.engine.in_flight,
            "engine_restarts": self._service.engine.num_restarts,
        }
        return json_response(body, status=200 if readiness.ready else 503, headers={"cache-control": "no-store"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._service.config.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})
