"""`GET /v1/contract`: what fixes an answer, and what it runs on.

Only ``contract`` is in the fingerprint. The rest says where and how it runs, which changes no answer: a server keeps
its fingerprint on another chip of a mesh of the same shape, and with more or fewer pages.
"""

import platform
from importlib.metadata import version

import msgspec

from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.http_json import JsonObject
from headrace.serving.edge.service import Service


def contract_document(service: Service) -> JsonObject:
    """Raises: ApiError while no engine is ready, since the engine alone knows most of it."""
    ready = service.engine.ready_info
    if ready is None:
        raise ApiError(
            ErrorCode.NOT_READY,
            "The contract is known when the engine is ready; /readyz says when. Retry later.",
            retry_after_ms=5000,
        )
    objective = service.config.first_token_ms
    return {
        "fingerprint": service.contract,
        "contract": service.contract_parts,
        "topology": {"mesh": ready.mesh, **msgspec.to_builtins(ready.topology)},
        "engine": {
            "max_context": ready.max_context,
            "num_slots": ready.num_slots,
            "page_size": ready.page_size,
            "num_pages": ready.num_pages,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "weights_bytes": ready.weights_bytes,
            **({} if objective is None else {"first_token_ms": objective}),
        },
        "versions": {
            "headrace": service.config.version,
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
    }
