"""The contract of the engine that is ready, `GET /v1/contract`, and what clients expect of it.

Only ``contract`` and ``numerics`` have hashes. The rest says where and how it runs, which changes no answer.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from headrace.serving.core.contract import (
    CANCEL_SEMANTICS,
    CONTRACT_FORMAT,
    LOGPROB_SEMANTICS,
    BadExpectation,
    Contract,
    parse_expectation,
    unmet,
)
from headrace.serving.core.policy import POLICY_VERSION
from headrace.serving.core.request import SAMPLING_POLICY
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.http_json import JsonObject
from headrace.serving.edge.messages import SUBPROTOCOL
from headrace.serving.engine.messages import Ready

EXPECT_HEADER = "x-headrace-expect-contract"
CONTRACT_HEADER = "x-headrace-contract"


def quantization(ready: Ready) -> dict[str, object]:
    """The exact scheme: how many tensors of which type the files hold, and what becomes of each kind in memory."""
    return {"stored": dict(ready.stored_types), "served": dict(ready.scheme)}


class ServedContract:
    """The contract of whatever engine is ready. tokenizer, template: content hashes; template None = the model has no
    chat. stop_ids: that end a generation."""

    def __init__(self, *, tokenizer: str, template: str | None, stop_ids: tuple[int, ...]) -> None:
        self._edge = {"tokenizer": tokenizer, "template": template, "stop_ids": sorted(stop_ids)}
        self._last: tuple[Ready, Contract] | None = None

    def of(self, ready: Ready) -> Contract:
        """Made once for each engine."""
        if self._last is None or self._last[0] is not ready:
            self._last = (ready, Contract(self._parts(ready), dict(ready.numerics)))
        return self._last[1]

    def _parts(self, ready: Ready) -> dict[str, object]:
        return {
            "format": CONTRACT_FORMAT,
            "model": ready.model_hash,
            "adapter": None,
            "family": ready.family,
            "architecture": ready.architecture,
            "dtype": ready.dtype,
            "weights": ready.weights,
            "quantization": quantization(ready),
            "kv_dtype": ready.kv_dtype,
            "attention": ready.attention,
            "activations": ready.activations,
            **self._edge,
            "max_context": ready.max_context,
            "sampling": SAMPLING_POLICY,
            "deterministic": ready.deterministic,
            "logprobs": LOGPROB_SEMANTICS,
            "cancellation": CANCEL_SEMANTICS,
            "tool_calls": None,
            "scheduler": f"headrace-scheduler/{POLICY_VERSION}",
            "protocol": SUBPROTOCOL,
        }


def check_expectation(expected: str, contract: Contract, param: str = "expect_contract") -> None:
    """Raises: ApiError for an expectation that cannot be read, or that this contract does not meet."""
    try:
        wrong = unmet(parse_expectation(expected), contract)
    except BadExpectation as error:
        raise ApiError(ErrorCode.INVALID_VALUE, f"{param} {error}.", param=param) from None
    if wrong is not None:
        raise ApiError(
            ErrorCode.CONTRACT_MISMATCH,
            f"This server does not serve the expected contract: {wrong}. GET /v1/contract says what is in it; accept "
            "it, or ask another replica.",
            param=param,
        )


def contract_document(
    contract: Contract,
    ready: Ready,
    *,
    headrace: str,
    revision: str | None,
    shows_date: bool,
    probe: Mapping[str, object],
    first_token_ms: int | None = None,
) -> JsonObject:
    """Body of ``/v1/contract``. revision: of the model, where it has one; a name, so it is in no hash. shows_date: the
    chat template writes the day of the start into prompts. probe: see ``edge.probe``.
    first_token_ms: the server's objective."""
    return {
        "fingerprint": contract.fingerprint,
        "contract": dict(contract.parts),
        "numerics_hash": contract.numerics_hash,
        "numerics": dict(contract.numerics),
        "probe": dict(probe),
        "revision": revision,
        "template_shows_date": shows_date,
        "topology": {"mesh": ready.mesh, **msgspec.to_builtins(ready.topology)},
        "engine": {
            "max_context": ready.max_context,
            "num_slots": ready.num_slots,
            "page_size": ready.page_size,
            "num_pages": ready.num_pages,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "weights_bytes": ready.weights_bytes,
            "kernels": ready.why or ready.attention,
            **({} if first_token_ms is None else {"first_token_ms": first_token_ms}),
        },
        "versions": {
            "headrace": headrace,
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "python": platform.python_version(),
        },
    }
